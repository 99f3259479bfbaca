// What the kernel of both.cuh needs beyond copies.cuh: numbers in memory that clusters of one grid share, and words
// that a thread puts into the shared memory of both CTAs of its cluster.
#pragma once

#include <cstdint>

#include "experts/copies.cuh"
#include "fabric/signal.cuh"

namespace weave::moe_experts {

// Another number at every call, ascending. Orders nothing.
__device__ __forceinline__ int32_t take_number(int32_t* next) {
    int32_t taken;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(taken) : "l"(next) : "memory");
    return taken;
}

// Release at the scope of the GPU: of this thread's stores, and of those of threads that it synchronized with at a
// barrier since.
__device__ __forceinline__ void count_stored(int32_t* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ bool has_counted(const int32_t* counter, int32_t value) {
    int32_t seen;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    return seen >= value;
}

// As long as a wait for a peer may take unless said otherwise (WEAVE_TIMEOUT_S).
constexpr int64_t kCountedWithinNs = 120'000'000'000;

// Until the counter has the value, which running clusters of the same grid bring it to: whoever waits longer found
// something broken, and ends the kernel with a trap.
__device__ __forceinline__ void await_counted(const int32_t* counter, int32_t value) {
    const uint64_t begin = fabric::nanoseconds();
    while (!has_counted(counter, value)) {
        // Signed: the clock is not guaranteed to be monotonic.
        if (static_cast<int64_t>(fabric::nanoseconds() - begin) > kCountedWithinNs) __trap();
        __nanosleep(32);
    }
}

// Ordinary stores and TMA are two ways to memory. Between the wait for rows that ordinary stores wrote, and their
// copies; says nothing of shared memory.
__device__ __forceinline__ void order_rows_before_copies() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// The 128 threads of the producer warp group, and no others: consumers have barriers 1 and 2.
__device__ __forceinline__ void await_producers() {
    asm volatile("bar.sync 3, 128;" ::: "memory");
}

// At the same barrier of CTA `cta` of the cluster: arrives, and keeps its phase open until `bytes` have been put there.
__device__ __forceinline__ void arrive_expecting_at(uint64_t* barrier, uint32_t cta, uint32_t bytes) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote], %2;\n}" ::"r"(gemm::shared_address(barrier)),
        "r"(cta), "r"(bytes)
        : "memory");
}

// To the same place of CTA `cta`, whose `barrier` counts 16 bytes then: whoever waits for it sees them.
__device__ __forceinline__ void put_words(int4* to, const int4& words, uint64_t* barrier, uint32_t cta) {
    asm volatile(
        "{\n.reg .b32 there, remote;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 remote, %1, "
        "%2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [there], {%3, %4, %5, %6}, [remote];\n}" ::"r"(
            gemm::shared_address(to)),
        "r"(gemm::shared_address(barrier)), "r"(cta), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
        : "memory");
}

}  // namespace weave::moe_experts
