// Recursive doubling between hosts, from csrc/reduction/hosts, as functions of a library for tests: on the CPU,
// among emulated ranks.
#include <algorithm>
#include <string>
#include <utility>

#include "reduction/hosts/doubling.cuh"

namespace weave::hosts {
namespace {

std::string failure;

// A place in the arena of `peer`, by puts.
struct EmulatedRemote {
    static constexpr bool kPuts = true;
    char* local;
    int32_t peer;

    // Every thread of the CTA brings its part on its way, without waiting for the others.
    void put(const void* from, int64_t bytes) const { send_part(from, bytes, 0); }

    // One thread sends the signal once all have begun.
    void put_signal(const void* from, int64_t bytes, uint64_t* word, uint64_t value) const {
        emulated::Thread& thread = emulated::running();
        const emulated::Cta& cta = *thread.cta;
        const uint64_t kernel = cta.rank->next, rank = cta.rank->index, block = cta.block.x;
        const uint64_t put = ((rank * 1024 + kernel) * 1024 + block) * 1024 + ++thread.num_puts;
        send_part(from, bytes, put);
        __syncthreads();
        if (thread.index.x != 0) return;
        emulated::Flight signal{reinterpret_cast<uint64_t*>(there(word)), nullptr, value};
        signal.put = put;
        signal.is_signal = true;
        emulated::send(signal);
    }

    static void arrived(const uint64_t* word, uint64_t value) {
        if (*word < value) throw std::runtime_error("a signal that nobody has seen");
    }

  private:
    char* there(const void* place) const {
        const emulated::Rank& own = *emulated::running().cta->rank;
        const int64_t offset = static_cast<const char*>(place) - reinterpret_cast<const char*>(own.arena.data());
        return reinterpret_cast<char*>(emulated::world->ranks[peer].arena.data()) + offset;
    }
    void send_part(const void* from, int64_t bytes, uint64_t put) const {
        const emulated::Thread& thread = emulated::running();
        char* to = there(local);
        for (int64_t at = thread.index.x * 8; at < bytes; at += thread.cta->threads.x * 8) {
            emulated::Flight flight{reinterpret_cast<uint64_t*>(to + at),
                                    reinterpret_cast<const uint64_t*>(static_cast<const char*>(from) + at), 0};
            flight.put = put;
            emulated::send(flight);
        }
    }
};

// What a call runs, beside its arguments.
struct Variant {
    bool flagged, plain, bf16;
    int32_t vecs;
};

template <typename T, int kVecs, class Travel>
void run_kernel(const Call& call, const Doubling& exchange, bool plain) {
    float (*parts)[kMostWarps] = reinterpret_cast<float (*)[kMostWarps]>(emulated::running().cta->shared);
    if (exchange.num_of_host > 1) return doubling_kernel<T, kVecs, false, true, Travel>(call, exchange, parts);
    if (plain) return doubling_kernel<T, kVecs, true, false, Travel>(call, exchange, parts);
    doubling_kernel<T, kVecs, false, false, Travel>(call, exchange, parts);
}

template <typename T, int kVecs, class Remote>
void run_kernel(const Call& call, const Doubling& exchange, const Variant& variant) {
    if (variant.flagged) return run_kernel<T, kVecs, FlaggedRows<T, kVecs, Remote>>(call, exchange, variant.plain);
    run_kernel<T, kVecs, PacketRows<T, kVecs, Remote>>(call, exchange, variant.plain);
}

template <class Remote>
void run_kernel(const Call& call, const Doubling& exchange, const Variant& variant) {
    using B = __nv_bfloat16;
    if (!variant.bf16) return run_kernel<float, 1, Remote>(call, exchange, variant);
    if (variant.vecs == 1) return run_kernel<B, 1, Remote>(call, exchange, variant);
    if (variant.vecs == 2) return run_kernel<B, 2, Remote>(call, exchange, variant);
    run_kernel<B, kMostVecs, Remote>(call, exchange, variant);
}

}  // namespace
}  // namespace weave::hosts

extern "C" {

// Which of the mistakes that tests put into the code is switched on; 0: none.
int weave_mistake = 0;

// Calls one after the other on every rank. Arrays of a call lie one behind the other, [rank][tokens][hidden].
struct Asked {
    int32_t hosts, num_calls, hidden, bf16, vecs, num_ctas;
    int32_t ranks_of_host;  // numbered through the hosts in turn where `mixed`, else host by host
    int32_t mixed;
    int32_t norm;         // 0: the sum alone
    int32_t direct;       // of hosts. 2: where ranks differ in parity they are mapped; 0: nowhere; 1: everywhere
    int32_t other_site;   // the rank that runs another site in the last call; -1: none
    int32_t absent_rank;  // runs one call less; -1: none
    uint32_t seed;
    const int32_t* tokens;  // of every call
    const int32_t* flagged;  // of every call: rows travel as they are, with flags
    const void* const* partial;
    const void* const* residual;  // [tokens][hidden]; a null pointer: none in that call
    void* const* normalized;
    void* const* sum;
    const void* weight;
    float eps;
};

const char* run(const Asked* asked) {
    using namespace weave;
    using namespace weave::hosts;
    failure.clear();
    try {
        emulated::World world;
        world.random.seed(asked->seed);
        const int32_t num_ranks = asked->hosts * asked->ranks_of_host;
        std::vector<std::vector<int32_t>> of_hosts(asked->hosts);
        for (int32_t index = 0; index < num_ranks; ++index)
            of_hosts[asked->mixed != 0 ? index % asked->hosts : index / asked->ranks_of_host].push_back(index);
        world.ranks.resize(num_ranks);
        const int64_t element = asked->bf16 ? 2 : 4, hidden = asked->hidden;
        const int32_t most = *std::max_element(asked->tokens, asked->tokens + asked->num_calls);
        int64_t offset = fabric::kHeaderBytes;
        Places places;
        for (const Transfer transfer : {Transfer::kPacket, Transfer::kFlaggedRow}) {
            const std::pair<const char*, Place*> named[] = {
                {"host_inbox", &places.inbox},         {"host_outbox", &places.outbox},
                {"host_row_inbox", &places.row_inbox}, {"host_row_outbox", &places.row_outbox},
                {"host_flags", &places.flags},         {"host_sums", &places.sums},
            };
            for (const fabric::BufferNeed& need : doubling_needs(transfer, most, hidden, asked->hosts, asked->ranks_of_host))
                for (const auto& [name, place] : named)
                    if (need.name == name && place->num_bytes == 0) {
                        *place = {offset, need.num_bytes};
                        offset += (need.num_bytes + 255) / 256 * 256;
                    }
        }
        const int64_t vecs = hidden * element / 16;
        world.cta_threads = static_cast<uint32_t>((((vecs + asked->vecs - 1) / asked->vecs) + 31) / 32 * 32);
        for (int32_t index = 0; index < num_ranks; ++index) {
            world.ranks[index].index = index;
            world.ranks[index].arena.assign(offset, 0);
        }
        for (int32_t index = 0; index < num_ranks; ++index) {
            emulated::Rank& rank = world.ranks[index];
            const int32_t num_calls = asked->num_calls - (index == asked->absent_rank);
            for (int32_t at = 0; at < num_calls; ++at) {
                Call call{};
                call.group.base[0] = reinterpret_cast<char*>(rank.arena.data());
                call.group.own = reinterpret_cast<fabric::ArenaHeader*>(rank.arena.data());
                call.group.channel_offset = offsetof(fabric::ArenaHeader, channel);
                call.group.world = 1;
                call.tokens = asked->tokens[at];
                call.hidden = asked->hidden;
                const int64_t bytes = call.tokens * hidden * element;
                call.partial = static_cast<const char*>(asked->partial[at]) + index * bytes;
                call.residual = asked->residual[at];
                if (asked->norm != 0) call.normalized = static_cast<char*>(asked->normalized[at]) + index * bytes;
                call.sum = static_cast<char*>(asked->sum[at]) + index * bytes;
                call.site = 7 + (at + 1 == asked->num_calls && index == asked->other_site);
                call.scale = 1.0f;
                call.norm.spec.kind = asked->norm != 0 ? NormKind::kRms : NormKind::kNone;
                call.norm.spec.eps = asked->eps;
                call.norm.weight.data = asked->weight;
                const HostRanks of_rank = host_ranks(of_hosts, index);
                Doubling exchange = placed(doubling(of_rank), places);
                const auto map = [&](HostStep& step) {
                    step.direct = reinterpret_cast<char*>(world.ranks[step.peer].arena.data());
                };
                for (HostStep& step : exchange.step) {
                    const int32_t sum = (asked->mixed != 0 ? step.peer % asked->hosts : step.peer / asked->ranks_of_host) +
                                        of_rank.host;
                    if (asked->direct == 1 || (asked->direct == 2 && sum % 2 == 1)) map(step);
                }
                for (int32_t other = 0; other < exchange.num_of_host; ++other) {
                    for (WithinHost* within : {&exchange.parts[other], &exchange.finished[other]}) {
                        map(within->to);
                        map(within->from);
                    }
                }
                const Variant variant{asked->flagged[at] != 0, gpu::is_plain(call), asked->bf16 != 0, asked->vecs};
                if (!fits(exchange, variant.flagged ? Transfer::kFlaggedRow : Transfer::kPacket, call.tokens, hidden))
                    throw std::runtime_error("the call does not fit its buffers");
                const bool puts = asked->direct != 1;
                rank.kernels.push_back([call, exchange, variant, puts] {
                    if (puts) return run_kernel<EmulatedRemote>(call, exchange, variant);
                    run_kernel<NoPuts>(call, exchange, variant);
                });
                rank.grids.push_back(std::min(asked->num_ctas, call.tokens));
            }
        }
        emulated::run(world);
    } catch (const std::exception& error) {
        failure = error.what();
    }
    return failure.c_str();
}
}
