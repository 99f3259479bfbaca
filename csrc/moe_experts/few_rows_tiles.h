// How tiles of few rows lie in shared memory, and which CTA of a cluster has which part of a product's depth: plain
// arithmetic, for host and device.
//
// Weights are the left operand here: 64 of their rows by 8, 16, 24 or 32 tokens is what one multiply makes. So a tile
// of the routing table (ops/moe_experts/routing_kernels.py) has at most 32 rows, and no more are multiplied than it
// has, rounded up to 8.
#pragma once

#include "moe_experts/tiles.h"

namespace weave::moe_experts {

constexpr int32_t kFewTileRows = 32;
constexpr int32_t kOctetRows = 8;
constexpr int32_t kOctets = kFewTileRows / kOctetRows;
constexpr int32_t kFewBoxRows = 64;  // of the weight
constexpr int32_t kSlices = 2;       // of 64 columns, in a stage: 256 bytes of a row are read at a time
constexpr int32_t kFewDepth = kSlices * kDepth;
constexpr int32_t kFewStages = 5;
constexpr int32_t kFewConsumers = 128;  // threads that multiply
constexpr int32_t kFewThreads = kFewConsumers + 2 * 32;
constexpr int32_t kMostSplits = 8;  // CTAs of a cluster, on every GPU that has clusters

// Bytes: a box of the weight, and the rows of a tile, 64 columns of each.
constexpr int32_t kFewBoxBytes = kFewBoxRows * kDepth * 2;
constexpr int32_t kFewSliceBytes = kFewTileRows * kDepth * 2;

// Columns of the result that a tile has: of gates and ups one each makes one.
WEAVE_HOST_DEVICE constexpr int32_t few_tile_columns(bool gated) {
    return gated ? kFewBoxRows : kBoxes * kFewBoxRows;
}

struct Range {
    int32_t begin, end;
};

// Of `blocks` stages, CTA `rank` of `splits` has these: as many as any other, or one more. None, where there are fewer.
WEAVE_HOST_DEVICE constexpr Range share_of(int32_t blocks, int32_t rank, int32_t splits) {
    return {blocks * rank / splits, blocks * (rank + 1) / splits};
}

// A lane of the warp that gathers brings the same chunk of a row in each pass, 4 rows after that of the pass before.
constexpr int32_t kRowsAWarpPass = 32 / kChunks;
constexpr int32_t kFewPasses = kFewTileRows / kRowsAWarpPass;

}  // namespace weave::moe_experts
