// A place in another rank's arena, and the ways to write to it. Where the transport is a load-store fabric of one host,
// as here, the place has an address; a transport between hosts has the same operations but for pointer().
//
//   put(from, bytes)      starts a bulk copy (TMA) out of shared memory; of the calling thread's open group
//   flush()               closes the group and waits until all copies of this thread have arrived
//   put_signal(...)       put, flush, and a release after it: the peer that waits for the word sees the data
//
// Before the copy reads shared memory that ordinary stores wrote: order_shared_stores_before_copies(), then a barrier.
// Where many copies are in flight, a thread of its own signals for several of them.
#pragma once

#include "fabric/bulk_copy.cuh"
#include "fabric/signal.cuh"

namespace weave::fabric {

struct Remote {
    const GroupView& group;
    int32_t rank;
    int64_t offset;

    __device__ __forceinline__ char* pointer() const { return group.base[rank] + offset; }

#ifdef WEAVE_BULK_COPY
    __device__ __forceinline__ void put(const void* from, uint32_t bytes) const { copy_out(pointer(), from, bytes); }

    __device__ __forceinline__ static void flush() {
        commit_copies();
        await_arrival<0>();
    }

    __device__ __forceinline__ void put_signal(const void* from, uint32_t bytes, uint64_t* word, uint64_t value) const {
        put(from, bytes);
        flush();
        signal(word, value);
    }
#endif
};

}  // namespace weave::fabric
