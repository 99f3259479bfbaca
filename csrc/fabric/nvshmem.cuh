// A place in another rank's arena, over NVSHMEM: the operations of fabric/remote.cuh where ranks are on several hosts.
//
//   put(from, bytes)      by all threads of the CTA: starts to copy out of this rank's memory, which must not be
//   written
//                         before the peer has what it held. Nothing orders what two puts bring, nor the words of one
//   flush()               waits until all puts of this thread have arrived. Slow (it waits for the NIC)
//   put_signal(...)       put, and a word that the peer sees only once the rest is there; by all threads of the CTA. On
//                         some networks NVSHMEM makes it of a fence in software (NVRAR, section 4.2.2)
//   arrived(word, value)  by a thread that has seen `value` in a word of put_signal(), before anything reads the rest:
//                         on some networks a word may become visible before what the NIC wrote earlier
//
// Functions of their own, not inlined: NVSHMEM's code for networks would cost kernels registers and occupancy where
// peers are mapped and none of it runs.
//
// What threads stored before a put: each of them fences at system scope, then the barrier of the CTA, then the put.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstdint>

namespace weave::fabric {

struct NvshmemRemote {
    static constexpr bool kPuts = true;
    char* local;  // the same place in this rank's arena: that is how NVSHMEM names it
    int32_t rank;

    __device__ __forceinline__ void put(const void* from, int64_t bytes) const {
        start_put(local, from, static_cast<size_t>(bytes), rank);
    }

    __device__ __forceinline__ static void flush() { nvshmem_quiet(); }

    __device__ __forceinline__ void put_signal(const void* from, int64_t bytes, uint64_t* word, uint64_t value) const {
        start_put_signal(local, from, static_cast<size_t>(bytes), word, value, rank);
    }

    __device__ __forceinline__ static void arrived(uint64_t* word, uint64_t value) { look_once(word, value); }

  private:
    static __device__ __noinline__ void start_put(char* to, const void* from, size_t bytes, int32_t rank) {
        nvshmemx_putmem_nbi_block(to, from, bytes, rank);
    }
    static __device__ __noinline__ void start_put_signal(char* to, const void* from, size_t bytes, uint64_t* word,
                                                         uint64_t value, int32_t rank) {
        nvshmemx_putmem_signal_nbi_block(to, from, bytes, word, value, NVSHMEM_SIGNAL_SET, rank);
    }
    // NVSHMEM's own look at the word does what the network needs, once it finds the value there.
    static __device__ __noinline__ void look_once(uint64_t* word, uint64_t value) {
        nvshmem_uint64_test(word, NVSHMEM_CMP_GE, value);
    }
};

}  // namespace weave::fabric
