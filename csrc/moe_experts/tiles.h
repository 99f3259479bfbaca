// Which tile a cluster computes when, and where its pieces lie in shared memory: plain arithmetic, for host and device.
//
// The two CTAs of a cluster compute 256 rows of one expert, 128 each, by 256 rows of its weight: so a tile of the
// routing table (ops/moe_experts/routing_kernels.py) has 256 rows here.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace weave::moe_experts {

constexpr int32_t kPanelRows = 128;  // of a CTA
constexpr int32_t kTileRows = 2 * kPanelRows;
constexpr int32_t kBoxRows = 128;  // of the weight, in one copy
constexpr int32_t kBoxes = 2;      // a tile has: gate and up, or two that follow one another
constexpr int32_t kWeightRows = kBoxes * kBoxRows;
constexpr int32_t kDepth = 64;           // of a stage: rows of 128 bytes
constexpr int32_t kChunks = 8;           // of 16 bytes, in such a row
constexpr int32_t kChunkElements = 8;    // of 2 bytes
constexpr int32_t kGatherThreads = 128;  // bring the rows of a stage
constexpr int32_t kRowsAPass = kGatherThreads / kChunks;
constexpr int32_t kPasses = kPanelRows / kRowsAPass;
constexpr int32_t kStagedColumns = 128;  // of results, that leave shared memory at once
constexpr int32_t kStagedRows = 16;      // of a warp
constexpr int32_t kStagedChunks = kStagedColumns / kChunkElements;

struct Item {
    int32_t tile;    // of the table
    int32_t column;  // of tiles of the weight
};

// `group` tiles go through a column of the weights before the next column: what runs at the same time shares both.
struct ItemOrder {
    int32_t tiles;
    int32_t columns;
    int32_t group;

    WEAVE_HOST_DEVICE int32_t num_items() const { return tiles * columns; }
    WEAVE_HOST_DEVICE Item item(int32_t index) const {
        const int32_t whole = group * columns, first = index / whole * group, within = index % whole;
        const int32_t count = tiles - first < group ? tiles - first : group;
        return {first + within % count, within / count};
    }
};

// A row of a stage has its 16-byte chunks exchanged by the 128-byte swizzle, as wgmma reads it (gemm/wgmma.cuh).
WEAVE_HOST_DEVICE constexpr int32_t chunk_offset(int32_t row, int32_t chunk) {
    return row * kChunks * 16 + (chunk ^ row % 8) * 16;
}

// What a gathering thread brings: in each pass the same chunk of a row, 16 rows after that of the pass before.
WEAVE_HOST_DEVICE constexpr int32_t gathered_chunk(int32_t thread) {
    return thread % kChunks;
}
WEAVE_HOST_DEVICE constexpr int32_t gathered_row(int32_t thread, int32_t pass) {
    return thread / kChunks + pass * kRowsAPass;
}

// How many passes bring all rows that are multiplied: those of consumers with any row.
WEAVE_HOST_DEVICE constexpr int32_t passes_of(int32_t rows) {
    return rows > kPanelRows / 2 ? kPasses : rows > 0 ? kPasses / 2 : 0;
}

// Of results in a warp's part of shared memory, so that neither 8 rows of a chunk nor 8 chunks of a row share a bank.
WEAVE_HOST_DEVICE constexpr int32_t staged_offset(int32_t row, int32_t chunk) {
    return row * kStagedChunks * 16 + (chunk ^ row % 8) * 16;
}

}  // namespace weave::moe_experts
