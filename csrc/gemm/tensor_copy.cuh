// Copies of tiles (TMA with tensor maps), and barriers that CTAs of a cluster share (sm_90 and newer).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "fabric/bulk_copy.cuh"

namespace weave::gemm {

using fabric::shared_address;

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all CTAs of the cluster.
__device__ __forceinline__ void await_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void init_barrier(uint64_t* barrier, uint32_t num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals)
                 : "memory");
}

// Before other CTAs of the cluster and copies may use the barriers; await_cluster() follows.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// At the same barrier of CTA `cta` of the cluster. Releases at the scope of the CTA only, which orders nothing for the
// other one and need not: what has been read was read by multiplies that are waited for. At the scope of the cluster it
// would wait for all that this thread ever wrote to memory, about 1 us.
__device__ __forceinline__ void arrive_at(uint64_t* barrier, uint32_t cta) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
        "r"(cta)
        : "memory");
}

// The box of `map` at (`x`, `y`), x along rows; what is beyond the tensor arrives as zeros.
__device__ __forceinline__ void load_tile(void* to, const CUtensorMap* map, int32_t x, int32_t y, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
        : "memory");
}

// The same into all CTAs of the cluster in `mask`, at the same place and counted by the same barrier of each.
__device__ __forceinline__ void load_tile_to(uint16_t mask, void* to, const CUtensorMap* map, int32_t x, int32_t y,
                                             uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(mask)
        : "memory");
}

// What is beyond the tensor is not written. Of the calling thread's open group of copies.
__device__ __forceinline__ void store_tile(const CUtensorMap* map, const void* from, int32_t x, int32_t y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y)
                 : "memory");
}

}  // namespace weave::gemm
