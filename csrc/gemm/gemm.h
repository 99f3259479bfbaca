// A GEMM by itself on Hopper (compute capability 9.0): out[m, n] = a[m, k] * weight[n, k]^T + bias[n], in bf16 or fp16,
// with fp32 sums that are rounded once.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace weave::gemm {

// Strides in elements; all matrices have rows of contiguous elements that begin at multiples of 16 bytes.
struct Problem {
    const void* a;
    const void* weight;
    const void* bias;  // or null; at a multiple of 4 bytes
    void* out;
    int64_t m;
    int64_t n;
    int64_t k;
    int64_t a_stride;
    int64_t weight_stride;
    int64_t out_stride;
};

// Whether `device` can run it: a line that says why not, or an empty one.
const char* unsupported(DType dtype, int64_t n, int64_t k, int32_t device);

// Enqueues it. Returns a CUDA error code; 0 is success. `tile_columns` is 128, 160 or 256,
// `group_pairs` as in order.h.
int run(const Problem& problem, DType dtype, int32_t tile_columns, int32_t group_pairs, void* stream);

}  // namespace weave::gemm
