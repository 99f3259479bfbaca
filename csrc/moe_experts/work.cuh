// What a grid of the experts' GEMMs computes, of many rows (grouped.cuh) or of few (few_rows.cuh).
#pragma once

#include <cstdint>

#include "gemm/tensor_copy.cuh"
#include "moe_experts/activation.cuh"
#include "moe_experts/tiles.h"

namespace weave::moe_experts {

// Which GEMM, and what a tile's two boxes of the weight are: of 128 rows for many rows, of 64 for few.
enum class Product : int32_t {
    kGated = 0,  // first: gates and ups of the same columns
    kPlain = 1,  // first, without a gate: columns that follow one another
    kDown = 2,   // second: the same
};

struct Work {
    CUtensorMap weight[kBoxes];  // by x, row and expert
    CUtensorMap rows;            // second GEMM, many rows: what the first one left, in boxes of 128 rows
    const int32_t* table;        // routing_kernels.py
    const int32_t* order;
    const uint8_t* x;     // first GEMM; few rows, second GEMM: what the first one left
    const void* bias;     // of T, or null
    void* out;            // of T
    int64_t bias_stride;  // elements, from expert to expert
    int32_t bias_step;    // from column to column
    int32_t up_bias;      // from a gate to its up
    int32_t x_chunks;     // of 16 bytes, from row to row of x
    int32_t choices;
    int32_t depth;   // of the product
    int32_t blocks;  // stages that it takes
    int32_t width;   // columns of the result
    int32_t columns;
    int32_t group;
    Activation activation;
    float alpha;
    float limit;  // 0: none
};

}  // namespace weave::moe_experts
