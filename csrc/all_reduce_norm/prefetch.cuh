// CTAs that load memory into L2 while the others of their kernel wait for peers.
//
// They stand behind the CTAs that exchange rows, so they are placed last, and have no part in anything: they wait for
// nobody, nobody waits for them, and they end once they have asked. What they ask for arrives whenever it does, as a
// prefetch has no result: memory that is written afterwards, or was written just before, is read all the same.
#pragma once

#include "all_reduce_norm/prefetch.h"

namespace weave::gpu {

// Of one request. A thread issues few of them, and the requests of one moment cover memory that is read together.
constexpr uint32_t kPrefetchBytes = 4096;

// The bytes [begin, end) as far as they are whole pieces of 16: nothing outside them is asked for.
__device__ __forceinline__ void prefetch_to_l2(const char* begin, const char* end) {
#if __CUDA_ARCH__ >= 900
    constexpr uint64_t kAlignment = 16;
    const uint64_t first = (reinterpret_cast<uint64_t>(begin) + kAlignment - 1) & ~(kAlignment - 1);
    const uint64_t last = reinterpret_cast<uint64_t>(end) & ~(kAlignment - 1);
    if (first < last)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first), "r"(static_cast<uint32_t>(last - first))
                     : "memory");
#else
    constexpr int32_t kLineBytes = 128;
    for (const char* at = begin; at < end; at += kLineBytes)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
#endif
}

// All threads of `num_ctas` CTAs, of which this is number `cta`. What is wanted first is asked for first, by all CTAs.
__device__ __forceinline__ void prefetch_ranges(const Prefetch& prefetch, uint32_t cta, uint32_t num_ctas) {
    const uint32_t own = threadIdx.x * num_ctas + cta, all = blockDim.x * num_ctas;
    for (int32_t each = 0; each < prefetch.num_ranges; ++each) {
        const PrefetchRange& range = prefetch.range[each];
        const uint32_t row_bytes = range.row_bytes;
        const uint32_t a_row = (row_bytes + kPrefetchBytes - 1) / kPrefetchBytes;
        const uint32_t count = a_row * static_cast<uint32_t>(range.rows);
        for (uint32_t piece = own; piece < count; piece += all) {
            const uint32_t row = piece / a_row, from = (piece - row * a_row) * kPrefetchBytes;
            const char* begin = range.begin + row * range.pitch_bytes;
            prefetch_to_l2(begin + from, begin + min(from + kPrefetchBytes, row_bytes));
        }
    }
}

}  // namespace weave::gpu
