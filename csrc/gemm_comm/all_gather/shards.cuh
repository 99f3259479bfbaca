// Arrival of shards, as kernels see it: word rows[source][0] of the channel, by the number of the running call.
#pragma once

#include "fabric/call.cuh"

namespace weave::gpu {

// Of a kernel after the one that counted the call. The word is read from memory: it was written a kernel ago.
__device__ __forceinline__ uint64_t running_call(const fabric::GroupView& group) {
    return fabric::load_relaxed(&group.state()->num_calls);
}

// In `of`'s arena.
__device__ __forceinline__ uint64_t* shard_flag(const fabric::GroupView& group, int32_t of, int32_t source) {
    return &group.channel(of)->rows[source][0];
}

__device__ __forceinline__ void await_shard(const fabric::Watch& watch, uint64_t epoch, int32_t source) {
    fabric::wait(shard_flag(watch.group, watch.group.rank, source), fabric::signal_word(epoch, 1), watch, source,
                 fabric::Slot::kRows);
}

}  // namespace weave::gpu
