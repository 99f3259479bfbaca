// The dispatch of rows to the ranks of their experts and the sum of the results, from csrc/experts/sharded, as a function
// of a library for tests: on the CPU, among emulated ranks. Between the two kernels runs one that is no GEMM, and stores
// as the second GEMM does.
#include <algorithm>
#include <string>

#include "experts/sharded/exchange.cuh"

namespace weave::moe {
namespace {

std::string failure;

constexpr uint64_t kPoison = 0x7fc07fc07fc07fc0;  // NaN

// Row [source][token] times a small number by expert, to the choice's slot in the combine buffer.
void stand_in_for_experts(const Exchange& exchange) {
    const fabric::GroupView& group = exchange.group;
    const char* own = group.base[group.rank];
    const int64_t items = int64_t{group.world} * exchange.slot_tokens * exchange.choices;
    const int64_t stride = int64_t{gridDim.x} * blockDim.x;
    for (int64_t item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += stride) {
        const int64_t id = *reinterpret_cast<const int64_t*>(own + exchange.ids_offset + item * 8);
        if (id == kNobody) continue;
        if (id < 0 || id >= exchange.num_experts) throw std::runtime_error("an id that is no expert of this rank");
        const int64_t slot = item / exchange.choices, source = slot / exchange.slot_tokens;
        const int64_t place = slot % exchange.slot_tokens * exchange.choices + item % exchange.choices;
        for (int64_t vec = 0; vec < exchange.row_vecs; ++vec) {
            float x[8];
            const char* from = own + exchange.rows_offset + (slot * exchange.row_vecs + vec) * kVecBytes;
            fabric::widen(fabric::load(from), x, static_cast<const __nv_bfloat16*>(nullptr));
            for (float& each : x)
                each *= static_cast<float>(1 + (group.rank * exchange.num_experts + id) % 7);
            char* to = group.base[source] + exchange.combine_offset + (place * exchange.row_vecs + vec) * kVecBytes;
            fabric::store(to, fabric::narrow(x, static_cast<const __nv_bfloat16*>(nullptr)));
        }
    }
}

}  // namespace
}  // namespace weave::moe

extern "C" {

// Which of the mistakes that tests put into the code is switched on; 0: none.
int weave_mistake = 0;

// Calls one after the other on every rank. Arrays are by call and rank, tensors as the kernels take them, in bf16, with
// weights in fp32.
struct Asked {
    int32_t world, num_calls, choices, num_experts, hidden, num_ctas, cta_threads, parts;
    int32_t other_site;   // the rank that runs another site in the last call; -1: none
    int32_t absent_rank;  // leaves the last call out; -1: none
    int32_t max_tokens;
    uint32_t seed;
    const int32_t* slot_tokens;  // of every call
    const int32_t* tokens;
    const void* const* x;
    const void* const* experts;
    const void* const* weights;
    void* const* out;
    void* counters;  // of every rank
};

// What failed; empty if nothing did.
const char* run(const Asked* asked) {
    using namespace weave;
    using namespace weave::moe;
    failure.clear();
    try {
        emulated::World world;
        world.random.seed(asked->seed);
        world.cta_threads = static_cast<uint32_t>(asked->cta_threads);
        world.ranks.resize(asked->world);
        const int64_t row_bytes = asked->hidden * 2, slots = int64_t{asked->world} * asked->max_tokens;
        const int64_t ids = fabric::kHeaderBytes, rows = ids + (slots * asked->choices * 8 + 255) / 256 * 256;
        const int64_t combine = rows + slots * row_bytes;
        const int64_t end = combine + int64_t{asked->max_tokens} * asked->choices * row_bytes;
        for (int32_t index = 0; index < asked->world; ++index) {
            emulated::Rank& rank = world.ranks[index];
            rank.index = index;
            rank.arena.assign(end, 0);
            std::fill(reinterpret_cast<uint64_t*>(rank.arena.data() + ids),
                      reinterpret_cast<uint64_t*>(rank.arena.data() + end), kPoison);
        }
        for (int32_t index = 0; index < asked->world; ++index) {
            emulated::Rank& rank = world.ranks[index];
            const int32_t num_calls = asked->num_calls - (index == asked->absent_rank);
            for (int32_t at = 0; at < num_calls; ++at) {
                const int32_t of = at * asked->world + index;
                Exchange exchange{};
                for (int32_t other = 0; other < asked->world; ++other)
                    exchange.group.base[other] = reinterpret_cast<char*>(world.ranks[other].arena.data());
                exchange.group.own = reinterpret_cast<fabric::ArenaHeader*>(rank.arena.data());
                exchange.group.channel_offset = offsetof(fabric::ArenaHeader, channel);
                exchange.group.world = asked->world;
                exchange.group.rank = index;
                exchange.ids_offset = ids;
                exchange.rows_offset = rows;
                exchange.combine_offset = combine;
                exchange.site = 7 + (at + 1 == asked->num_calls && index == asked->other_site);
                exchange.slot_tokens = asked->slot_tokens[at];
                exchange.tokens = asked->tokens[of];
                exchange.choices = asked->choices;
                exchange.num_experts = asked->num_experts;
                exchange.row_vecs = static_cast<int32_t>(row_bytes / kVecBytes);
                const auto* experts = static_cast<const int64_t*>(asked->experts[of]);
                const Dispatch sent{exchange,
                                    static_cast<const char*>(asked->x[of]),
                                    row_bytes,
                                    experts,
                                    static_cast<Counters*>(asked->counters) + index,
                                    asked->parts};
                const Combine summed{exchange, experts, asked->weights[of], DType::kFloat32,
                                     static_cast<char*>(asked->out[of])};
                rank.kernels.push_back([sent] { dispatch_rows(sent); });
                rank.kernels.push_back([exchange] { stand_in_for_experts(exchange); });
                rank.kernels.push_back([summed] { combine_rows<__nv_bfloat16>(summed); });
                rank.grids.insert(rank.grids.end(), 3, asked->num_ctas);
            }
        }
        emulated::run(world);
    } catch (const std::exception& error) {
        failure = error.what();
    }
    return failure.c_str();
}
}
