// Recursive doubling between hosts, from csrc/hierarchical_all_reduce, as functions of a library for tests: on the CPU,
// among emulated ranks.
#include <algorithm>
#include <string>

#include "hierarchical_all_reduce/doubling.cuh"

namespace weave::hosts {
namespace {

std::string failure;

// A place in the arena of `peer`, by puts.
struct EmulatedRemote {
    char* local;
    int32_t peer;

    // Every thread of the CTA brings its part on its way, without waiting for the others.
    void put(const void* from, int64_t bytes) const {
        const emulated::Thread& thread = emulated::running();
        emulated::Rank& own = *thread.cta->rank;
        const int64_t offset = local - reinterpret_cast<char*>(own.arena.data());
        char* to = reinterpret_cast<char*>(emulated::world->ranks[peer].arena.data()) + offset;
        for (int64_t at = thread.index.x * 8; at < bytes; at += thread.cta->threads.x * 8)
            emulated::send({reinterpret_cast<uint64_t*>(to + at),
                            reinterpret_cast<const uint64_t*>(static_cast<const char*>(from) + at), 0});
    }
};

}  // namespace
}  // namespace weave::hosts

extern "C" {

// Calls one after the other on every rank. Arrays of a call lie one behind the other, [rank][tokens][hidden].
struct Asked {
    int32_t hosts, num_calls, hidden, bf16, vecs, num_ctas;
    int32_t norm;         // 0: the sum alone
    int32_t direct;       // of 2: ranks whose number differs by it in parity are mapped; 0: none; 1: all
    int32_t other_site;   // the rank that runs another site in the last call; -1: none
    int32_t absent_rank;  // runs one call less; -1: none
    uint32_t seed;
    const int32_t* tokens;  // of every call
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
        world.ranks.resize(asked->hosts);
        const int64_t element = asked->bf16 ? 2 : 4, hidden = asked->hidden;
        const int32_t most = *std::max_element(asked->tokens, asked->tokens + asked->num_calls);
        int64_t offset = fabric::kHeaderBytes, offsets[3] = {}, half = 0;
        const auto needs = doubling_needs(most, hidden, asked->hosts);
        for (std::size_t i = 0; i < needs.size(); ++i) {
            offsets[i] = offset;
            offset += (needs[i].num_bytes + 255) / 256 * 256;
        }
        half = needs[0].num_bytes / kNumHalves;
        const int64_t vecs = hidden * element / 16;
        world.cta_threads = static_cast<uint32_t>((((vecs + asked->vecs - 1) / asked->vecs) + 31) / 32 * 32);
        for (int32_t index = 0; index < asked->hosts; ++index) {
            world.ranks[index].index = index;
            world.ranks[index].arena.assign(offset, 0);
        }
        for (int32_t index = 0; index < asked->hosts; ++index) {
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
                Doubling exchange = doubling(index, asked->hosts);
                exchange.inbox = offsets[0];
                exchange.outbox = offsets[1];
                exchange.sums = offsets[2];
                exchange.half_bytes = half;
                for (HostStep& step : exchange.step)
                    if (asked->direct == 1 || (asked->direct == 2 && (index + step.peer) % 2 == 1))
                        step.direct = reinterpret_cast<char*>(world.ranks[step.peer].arena.data());
                const bool plain = gpu::is_plain(call), bf16 = asked->bf16 != 0;
                const int32_t vecs = asked->vecs;
                rank.kernels.push_back([call, exchange, plain, bf16, vecs] {
                    float (*parts)[kMostWarps] =
                        reinterpret_cast<float (*)[kMostWarps]>(emulated::running().cta->shared);
                    using B = __nv_bfloat16;
                    using R = EmulatedRemote;
                    if (!bf16) return doubling_kernel<float, 1, false, R>(call, exchange, parts);
                    if (vecs == 1 && plain) return doubling_kernel<B, 1, true, R>(call, exchange, parts);
                    if (vecs == 1) return doubling_kernel<B, 1, false, R>(call, exchange, parts);
                    if (vecs == 2 && plain) return doubling_kernel<B, 2, true, R>(call, exchange, parts);
                    if (vecs == 2) return doubling_kernel<B, 2, false, R>(call, exchange, parts);
                    if (plain) return doubling_kernel<B, kMostVecs, true, R>(call, exchange, parts);
                    doubling_kernel<B, kMostVecs, false, R>(call, exchange, parts);
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
