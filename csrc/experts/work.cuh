// What a grid of the experts' GEMMs computes.
#pragma once

#include <cstdint>

#include "experts/activation.cuh"
#include "experts/grouped.h"
#include "experts/tiles.h"
#include "gemm/tensor_copy.cuh"

namespace weave::moe_experts {

// Which GEMM, and what the four blocks of 64 rows of the weight are that a tile has.
enum class Product : int32_t {
    kGated = 0,    // first: gates, ups of the same columns, and both again
    kPairs = 1,    // first: gate, up, gate, up by rows
    kPlain = 2,    // first, without a gate
    kDown = 3,     // second
    kToRanks = 4,  // second, whose rows go to the ranks that they came from
};

WEAVE_HOST_DEVICE constexpr bool is_second(Product product) {
    return product == Product::kDown || product == Product::kToRanks;
}

WEAVE_HOST_DEVICE constexpr bool is_gated(Product product) {
    return product == Product::kGated || product == Product::kPairs;
}

// Columns of the result that a tile of the weight makes.
WEAVE_HOST_DEVICE constexpr int32_t tile_columns(bool gated) {
    return gated ? kWeightRows / 2 : kWeightRows;
}

struct Work {
    CUtensorMap weight[2];  // by depth, row and expert; of weights whose rows are contiguous by row, depth and
                            // expert. kGated: of gates and of ups, in wide.cuh of both together; else the first one
    CUtensorMap rows;       // second GEMM: what the first one left, in boxes of 48 rows; wide.cuh: of 64, and in the
                            // first GEMM what gather_rows() left
    const int32_t* table;   // routing.h
    const int32_t* order;
    const uint8_t* x;     // first GEMM
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
    int32_t tile_rows;  // of the table's tiles
    Activation activation;
    float alpha;
    float limit;            // 0: none
    ResultBuffers buffers;  // kToRanks
};

// The same of weights in several ranges of experts.
struct RangedWork : Work {
    CUtensorMap ranges[kMostRanges][2];  // as `weight` of each range
    int32_t first[kMostRanges];          // expert of each range; beyond all experts where there is none
};

// Where an expert's weight is found: by which map, and at which place along its experts.
struct WeightPlace {
    const CUtensorMap* map;
    int32_t expert;
};

__device__ __forceinline__ WeightPlace place_of(const Work& work, int32_t which, int32_t expert) {
    return {&work.weight[which], expert};
}

__device__ __forceinline__ WeightPlace place_of(const RangedWork& work, int32_t which, int32_t expert) {
    int32_t range = 0;
#pragma unroll
    for (int i = 1; i < kMostRanges; ++i)
        range += expert >= work.first[i] ? 1 : 0;
    return {&work.ranges[range][which], expert - work.first[range]};
}

}  // namespace weave::moe_experts
