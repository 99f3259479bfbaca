// The threads of a cluster of CTAs that share a row, and their sums over it.
#pragma once

#include "reduction/finish.cuh"

namespace weave::gpu {

constexpr int kMaxThreads = 512;  // of a CTA
constexpr int kMaxCluster = 8;
constexpr int kMaxWarps = kMaxThreads / 32;

// Where a CTA is among the clusters of its grid, all of `size` CTAs.
struct ClusterPlace {
    int cta;  // in its cluster
    int cluster;
};

__device__ __forceinline__ ClusterPlace cluster_place([[maybe_unused]] int size) {
#if __CUDA_ARCH__ >= 900
    if (size > 1) {
        ClusterPlace place;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(place.cta));
        asm("mov.u32 %0, %%clusterid.x;" : "=r"(place.cluster));
        return place;
    }
#endif
    return {0, static_cast<int>(blockIdx.x)};
}

// The threads of a cluster that share a row. Sums are made of all warps' parts in one order, so they agree bitwise
// wherever they are made.
struct ClusterTeam {
    // Parts by reduction parity, CTA of the cluster, and warp.
    float (*parts)[kMaxCluster * kMaxWarps];
    uint64_t* arrived;  // one mbarrier for each parity
    int cluster;
    int rank;
    int num_warps;
    uint32_t num_reductions = 0;

    // All threads of a cluster of several CTAs: before one of them uses another one's memory, await_peers().
    __device__ __forceinline__ void init() const {
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0) {
            for (int parity = 0; parity < 2; ++parity) {
                const uint32_t barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&arrived[parity]));
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
                expect(barrier, cluster * num_warps);
            }
            // This releases the barriers, so the arrival need not: at this scope that would take as long as a store
            // to memory.
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    }
    __device__ __forceinline__ void await_peers() const {
#if __CUDA_ARCH__ >= 900
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }

    template <class Combine>
    __device__ __forceinline__ float reduce(float value, const Combine& combine) {
        [[maybe_unused]] const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const int parity = num_reductions & 1;
        [[maybe_unused]] const uint32_t phase = (num_reductions >> 1) & 1;
        ++num_reductions;
        value = combine(value);
        const int num_parts = cluster * num_warps;
#if __CUDA_ARCH__ >= 900
        if (cluster == 1) {
            barrier(value, parity);
            return total(parity, num_parts, combine);
        }
        const uint32_t slot = static_cast<uint32_t>(__cvta_generic_to_shared(&parts[parity][rank * num_warps + warp]));
        const uint32_t barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&arrived[parity]));
        if (lane < cluster) {
            uint32_t remote_slot, remote_barrier;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_slot) : "r"(slot), "r"(lane));
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(barrier), "r"(lane));
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote_slot),
                         "r"(__float_as_uint(value)), "r"(remote_barrier)
                         : "memory");
        }
        uint32_t done = 0;
        while (done == 0) {
            asm volatile(
                "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                "selp.u32 %0, 1, 0, p;\n}"
                : "=r"(done)
                : "r"(barrier), "r"(phase)
                : "memory");
        }
        if (threadIdx.x == 0) expect(barrier, num_parts);
#else
        barrier(value, parity);
#endif
        return total(parity, num_parts, combine);
    }

    // The threads of one CTA.
    __device__ __forceinline__ void barrier(float value, int parity) const {
        if ((threadIdx.x & 31) == 0) parts[parity][threadIdx.x >> 5] = value;
        asm volatile("bar.sync 1, %0;" ::"r"(num_warps * 32) : "memory");
    }

    template <class Combine>
    __device__ __forceinline__ float total(int parity, int num_parts, const Combine& combine) const {
        const int lane = threadIdx.x & 31;
        float sum = lane < num_parts ? parts[parity][lane] : 0.0f;
        // More than 32 parts: the order is fixed all the same.
        for (int i = lane + 32; i < num_parts; i += 32)
            sum = combine.two(sum, parts[parity][i]);
        return combine(sum);
    }

    __device__ __forceinline__ static void expect(uint32_t barrier, int num_parts) {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_parts * 4)
                     : "memory");
#endif
    }

    struct Sum {
        __device__ __forceinline__ float operator()(float value) const { return warp_sum(value); }
        __device__ __forceinline__ float two(float a, float b) const { return a + b; }
    };
    struct Max {
        __device__ __forceinline__ float operator()(float value) const { return warp_max(value); }
        __device__ __forceinline__ float two(float a, float b) const { return fmaxf(a, b); }
    };
    __device__ __forceinline__ float sum(float value) { return reduce(value, Sum{}); }
    __device__ __forceinline__ float max(float value) { return reduce(value, Max{}); }
};

}  // namespace weave::gpu
