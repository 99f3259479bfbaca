// The threads of a CTA that share a row.
#pragma once

#include "reduction/finish.cuh"

namespace weave::gpu {

// Sums are made in one order, so they agree bitwise wherever they are made.
template <int kWarps>
struct BlockTeam {
    float (*parts)[kWarps];  // by reduction parity
    uint32_t num_reductions = 0;

    template <class Combine>
    __device__ __forceinline__ float reduce(float value, const Combine& combine) {
        float* row = parts[num_reductions++ & 1];
        value = combine(value);
        if ((threadIdx.x & 31) == 0) row[threadIdx.x >> 5] = value;
        __syncthreads();
        return combine((threadIdx.x & 31) < kWarps ? row[threadIdx.x & 31] : 0.0f);
    }
    __device__ __forceinline__ float sum(float value) {
        return reduce(value, [](float part) { return warp_sum(part); });
    }
    __device__ __forceinline__ float max(float value) {
        return reduce(value, [](float part) { return warp_max(part); });
    }
};

}  // namespace weave::gpu
