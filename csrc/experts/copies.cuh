// What the kernel needs of sm_90 beyond gemm/: copies that a thread makes for itself (cp.async), and boxes of three
// dimensions (TMA).
#pragma once

#include <cstdint>

#include "experts/kernel_ahead.cuh"
#include "gemm/tensor_copy.cuh"

namespace weave::moe_experts {

// The same number, of which nothing is computed ahead of a loop: that would take registers all the way through it.
__device__ __forceinline__ int32_t here(int32_t number) {
    int32_t same;
    asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(number));
    return same;
}

// 16 bytes into shared memory; zeros if not `inside`, and nothing is read then. 128 bytes are brought into the L2.
__device__ __forceinline__ void copy_chunk(uint32_t to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
}

// One of the arrivals that the barrier was made for, once all of this thread's copies so far have arrived.
__device__ __forceinline__ void arrive_after_chunks(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(gemm::shared_address(barrier))
                 : "memory");
}

// Chunks are written as ordinary stores are, and wgmma reads as TMA does: between the wait for them and the multiply.
__device__ __forceinline__ void order_chunks_before_multiplies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The box of `map` at (`x`, `y`, `z`), x along rows, into both CTAs of the cluster; see gemm::load_tile_to.
__device__ __forceinline__ void load_box_to_both(void* to, const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                                                 uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(gemm::shared_address(to)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(gemm::shared_address(barrier)), "h"(static_cast<uint16_t>(3))
        : "memory");
}

// The same into this CTA alone.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                                         uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(gemm::shared_address(to)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(gemm::shared_address(barrier))
        : "memory");
}

// Gates and ups of an expert from octet `octet` of columns on: 8 gates, their 8 ups, the next 8 gates, ...
__device__ __forceinline__ void load_gates_and_ups(void* to, const CUtensorMap* map, int32_t depth, int32_t octet,
                                                   int32_t expert, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, 0, 0, %3, %4}], [%5];" ::"r"(gemm::shared_address(to)),
        "l"(map), "r"(depth), "r"(octet), "r"(expert), "r"(gemm::shared_address(barrier))
        : "memory");
}

// Dynamic shared memory as an S, aligned to 1024 bytes: it begins at a multiple of 16 only.
template <class S>
__device__ __forceinline__ S& shared_memory() {
    constexpr uint32_t kAlignment = 1024;
    extern __shared__ uint8_t memory[];
    const uint32_t beyond = gemm::shared_address(memory) % kAlignment;
    return *reinterpret_cast<S*>(memory + (kAlignment - beyond) % kAlignment);
}

}  // namespace weave::moe_experts
