// The kernel of gather_rows.h: each warp copies rows. It is launched while the kernel ahead runs, and the next one
// while it runs; both wait on the device.
#pragma once

#include "experts/gather_rows.h"
#include "experts/kernel_ahead.cuh"

namespace weave::moe_experts {

constexpr int kGatherCtaThreads = 256;
constexpr int kGatherCtasAnSm = 8;
constexpr int kGatherAtOnce = 4;  // chunks of a lane

struct GatherWork {
    RowsToGather of;
    const int32_t* order;
    const int32_t* table;
};

__device__ __forceinline__ void gather(const GatherWork& work) {
    await_kernel_ahead();
    const int32_t tiles = work.table[0];
    const int32_t rows = tiles == 0 ? 0 : work.table[4 * tiles + 2];  // the last tile's expert ends there
    const int32_t lane = threadIdx.x % 32, warps = kGatherCtaThreads / 32;
    const auto* x = reinterpret_cast<const int4*>(work.of.x);
    auto* to = static_cast<int4*>(work.of.gathered);
    const int32_t step = static_cast<int32_t>(gridDim.x) * warps;
    for (int32_t row = static_cast<int32_t>(blockIdx.x) * warps + static_cast<int32_t>(threadIdx.x) / 32; row < rows;
         row += step) {
        const int4* source = x + int64_t{work.order[row] / work.of.choices} * work.of.x_chunks;
        int4* target = to + int64_t{row} * work.of.chunks;
        for (int32_t first = lane; first < work.of.chunks; first += 32 * kGatherAtOnce) {
            int4 held[kGatherAtOnce];
#pragma unroll
            for (int i = 0; i < kGatherAtOnce; ++i)
                if (first + 32 * i < work.of.chunks) held[i] = source[first + 32 * i];
#pragma unroll
            for (int i = 0; i < kGatherAtOnce; ++i)
                if (first + 32 * i < work.of.chunks) target[first + 32 * i] = held[i];
        }
    }
    let_next_kernel_launch();
}

}  // namespace weave::moe_experts
