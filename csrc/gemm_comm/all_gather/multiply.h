// The GEMM of gathered rows on Hopper (compute capability 9.0), which begins before they are all here.
#pragma once

#include <cstdint>

#include "gemm_comm/all_gather/gpu.h"

namespace weave::gpu {

// out[tokens, n] = rows[tokens, k] * weight[n, k]^T + bias[n]; strides in elements.
struct GatheredProduct {
    const void* weight;
    const void* bias;  // or null; at a multiple of 4 bytes
    void* out;
    int64_t n;
    int64_t k;
    int64_t weight_stride;
};

// How it is cut.
struct GatherCut {
    int32_t tile_columns;  // 128, 160 or 256
    int32_t group_pairs;   // pairs of panels in a wave group
};

// SMs that it leaves free: a grid that waits for peers must leave room for the kernels that signal, there as here.
constexpr int32_t kGatherSpareCtas = 2;

// Enqueues it after open_gather; `given.outer` is 1. Returns a CUDA error code; 0 is success.
int run_gathered_product(const Gather& given, const GatheredProduct& product, const GatherCut& cut, DType dtype,
                         void* main);

}  // namespace weave::gpu
