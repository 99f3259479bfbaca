// A place in another rank's arena, over NVSHMEM: the operations of fabric/remote.cuh where ranks are on several hosts.
//
//   put(from, bytes)      by all threads of the CTA: starts to copy out of this rank's memory, which nobody may write
//                         before the peer has what it held. Nothing orders what two puts bring, nor the words of one
//   flush()               waits until all puts of this thread have arrived. Slow (it waits for the NIC)
//   put_signal(...)       put, and a word that the peer sees only once the rest is there. On some networks NVSHMEM
//   makes
//                         it of a fence in software (NVRAR, section 4.2.2), so kernels send packets instead
//
// What threads stored before a put: each of them fences at system scope, then the barrier of the CTA, then the put.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstdint>

namespace weave::fabric {

struct NvshmemRemote {
    char* local;  // the same place in this rank's arena: that is how NVSHMEM names it
    int32_t rank;

    __device__ __forceinline__ void put(const void* from, int64_t bytes) const {
        nvshmemx_putmem_nbi_block(local, from, static_cast<size_t>(bytes), rank);
    }

    __device__ __forceinline__ static void flush() { nvshmem_quiet(); }

    __device__ __forceinline__ void put_signal(const void* from, int64_t bytes, uint64_t* word, uint64_t value) const {
        nvshmemx_putmem_signal_nbi_block(local, from, static_cast<size_t>(bytes), word, value, NVSHMEM_SIGNAL_SET,
                                         rank);
    }
};

}  // namespace weave::fabric
