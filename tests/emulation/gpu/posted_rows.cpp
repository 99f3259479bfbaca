// The posted kernel of all_reduce_norm, from csrc/reduction, as a function of a library for tests: on the CPU, among
// emulated ranks whose arenas are memory of the host. What only a rank's own kernels touch is apart from its arena.
#include <algorithm>
#include <string>

#include "reduction/posted.cuh"

namespace weave::gpu {
namespace {

std::string failure;

constexpr int kThreads = 64;
constexpr uint8_t kPoison = 0xff;  // NaN, and no state of a channel

template <typename T>
void run_kernel(const Call& call, const PostedLayout& layout, int32_t vecs) {
    auto* parts = reinterpret_cast<float (*)[kThreads / 32]>(emulated::running().cta->shared);
    if (is_plain(call)) return posted_cta<kThreads, T, 4, true>(call, layout, parts);
    if (vecs <= 2) return posted_cta<kThreads, T, 2, false>(call, layout, parts);
    posted_cta<kThreads, T, 4, false>(call, layout, parts);
}

}  // namespace
}  // namespace weave::gpu

extern "C" {

// Which of the mistakes that tests put into the code is switched on; 0: none.
int weave_mistake = 0;

// Calls one after the other on every rank. Tensors by call and rank; those that all ranks share by call.
struct Asked {
    int32_t world, num_calls, hidden, bf16, vecs, num_ctas, rows_a_unit;
    int32_t norm_kind;    // a NormKind; none: the sum alone
    int32_t post_kind;
    int32_t sum_whole;
    int32_t wide_out;     // normalized rows in fp32
    int32_t other_site;   // the rank that runs another site in the last call; -1: none
    int32_t absent_rank;  // runs one call less; -1: none
    uint32_t seed;
    const int32_t* tokens;
    const void* const* partial;
    const void* const* residual;  // null pointers: none
    void* const* normalized;      // null pointers: not wanted
    void* const* sum;
    const void* weight;
    float eps;
};

// All rows of an output buffer, copied into tensors of the caller by one CTA.
void copy_rows(int32_t tokens, int32_t hidden, int32_t out_kind, int32_t row_scales, int32_t sum_whole, int32_t threads,
               void* output, void* normalized, void* sum, void* row_scale) {
    using namespace weave;
    using namespace weave::gpu;
    Call call{};
    call.group.base[0] = static_cast<char*>(output);
    call.hidden = hidden;
    call.out_kind = static_cast<OutKind>(out_kind);
    call.quant = row_scales != 0 ? QuantKind::kPerToken : QuantKind::kNone;
    call.sum_whole = sum_whole;
    call.normalized = normalized;
    call.sum = sum;
    call.row_scale = row_scale;
    const OutputLayout layout = output_layout(row_kind(call, DType::kBFloat16), tokens);
    emulated::World world;
    world.cta_threads = threads;
    world.ranks.resize(1);
    world.ranks[0].kernels.push_back([=] {
        for (int32_t row = 0; row < tokens; ++row)
            copy_row_out(call, layout, row, threadIdx.x, threads);
    });
    world.ranks[0].grids.push_back(1);
    emulated::run(world);
}

const char* run(const Asked* asked) {
    using namespace weave;
    using namespace weave::gpu;
    failure.clear();
    try {
        emulated::World world;
        world.random.seed(asked->seed);
        world.cta_threads = kThreads;
        world.reads_own_only = true;
        world.ranks.resize(asked->world);
        const DType dtype = asked->bf16 ? DType::kBFloat16 : DType::kFloat32;
        const OutKind out = asked->wide_out ? OutKind::kFloat32 : OutKind::kSame;
        const int32_t most = *std::max_element(asked->tokens, asked->tokens + asked->num_calls);
        int64_t end = fabric::kHeaderBytes, staging = 0, output = 0;
        Buffers buffers{};
        for (const fabric::BufferNeed& need :
             buffer_needs(GpuKernel::kPosted, most, asked->hidden, dtype, out, asked->world)) {
            (need.name == "staging" ? staging : output) = end;
            (need.name == "staging" ? buffers.staging_bytes : buffers.output_bytes) = need.num_bytes;
            end += need.num_bytes;
        }
        buffers.staging_offset = staging;
        buffers.output_offset = output;
        std::vector<std::vector<uint8_t>> own(asked->world, std::vector<uint8_t>(fabric::kHeaderBytes, 0));
        for (int32_t index = 0; index < asked->world; ++index) {
            world.ranks[index].index = index;
            world.ranks[index].arena.assign(end, kPoison);
            std::fill_n(world.ranks[index].arena.begin(), fabric::kHeaderBytes, 0);
            auto* header = reinterpret_cast<fabric::ArenaHeader*>(world.ranks[index].arena.data());
            memset(static_cast<void*>(&header->channel[0].state), kPoison, sizeof(fabric::ChannelState));
        }
        for (int32_t index = 0; index < asked->world; ++index) {
            emulated::Rank& rank = world.ranks[index];
            const int32_t num_calls = asked->num_calls - (index == asked->absent_rank);
            for (int32_t at = 0; at < num_calls; ++at) {
                const int32_t of = at * asked->world + index;
                Call call{};
                for (int32_t other = 0; other < asked->world; ++other)
                    call.group.base[other] = reinterpret_cast<char*>(world.ranks[other].arena.data());
                call.group.own = reinterpret_cast<fabric::ArenaHeader*>(own[index].data());
                call.group.channel_offset = offsetof(fabric::ArenaHeader, channel);
                call.group.world = asked->world;
                call.group.rank = index;
                call.tokens = asked->tokens[at];
                call.hidden = asked->hidden;
                call.partial = asked->partial[of];
                call.residual = asked->residual[at];
                call.normalized = asked->normalized[of];
                call.sum = asked->sum[of];
                call.sum_whole = asked->sum_whole;
                call.out_kind = out;
                call.site = 7 + (at + 1 == asked->num_calls && index == asked->other_site);
                call.buffers = buffers;
                call.scale = 1.0f;
                call.norm.spec.kind = static_cast<NormKind>(asked->norm_kind);
                call.post.spec.kind = static_cast<NormKind>(asked->post_kind);
                call.norm.spec.eps = call.post.spec.eps = asked->eps;
                call.norm.weight.data = call.post.weight.data = asked->weight;
                for (int32_t other = 0; other <= asked->world; ++other)
                    call.begin[other] = static_cast<int32_t>(int64_t{call.tokens} * other / asked->world);
                call.share = static_cast<int32_t>(share_of(call.tokens, asked->world));
                const PostedLayout layout{output_layout(row_kind(call, dtype), call.tokens), asked->rows_a_unit};
                const int32_t units = (call.share + asked->rows_a_unit - 1) / asked->rows_a_unit, vecs = asked->vecs;
                rank.kernels.push_back([call, layout, vecs, dtype] {
                    if (dtype == DType::kBFloat16) return run_kernel<__nv_bfloat16>(call, layout, vecs);
                    run_kernel<float>(call, layout, vecs);
                });
                rank.grids.push_back(std::min(asked->num_ctas, units));
            }
        }
        emulated::run(world);
    } catch (const std::exception& error) {
        failure = error.what();
    }
    return failure.c_str();
}
}
