// Which tile a cluster computes when, and where its pieces are in shared memory: plain arithmetic, for host and device.
//
// The two CTAs of a cluster compute up to 288 rows of one expert, half of them each, by 256 rows of its weight: so a
// tile of the routing table (csrc/experts/routing.h) has up to 288 rows. They are more than 256, as token counts
// are powers of two more often than not: of experts that have 256 rows on average most need one tile. Weights are the
// left operand, whose rows a multiply takes 64 at a time, and tokens the right one: of those it takes any multiple
// of 8.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace weave::moe_experts {

constexpr int32_t kPanelRows = 144;  // of a CTA, at most
constexpr int32_t kTileRows = 2 * kPanelRows;
constexpr int32_t kOctetRows = 8;
constexpr int32_t kOctets = kPanelRows / kOctetRows;
constexpr int32_t kBlockRows = 64;  // of the weight, in one copy and one multiply
constexpr int32_t kBlocks = 4;      // a tile has: two of each consumer, which are contiguous or are gates and ups
constexpr int32_t kWeightRows = kBlocks * kBlockRows;
constexpr int32_t kWideRows = 256;        // of a tile whose rows each CTA multiplies all (wide.cuh), at most
constexpr int32_t kWideBoxRows = 64;      // of them, in one copy
constexpr int32_t kWideWeightRows = 128;  // of such a tile, of a CTA
constexpr int32_t kDepth = 64;            // of a stage: rows of 128 bytes
constexpr int32_t kChunks = 8;            // of 16 bytes, in such a row
constexpr int32_t kChunkElements = 8;     // of 2 bytes
constexpr int32_t kGatherThreads = 128;   // bring the rows of a stage
constexpr int32_t kRowsAPass = kGatherThreads / kChunks;
constexpr int32_t kPasses = kPanelRows / kRowsAPass;
constexpr int32_t kLoadRows = 48;      // of what the first GEMM left, in one copy
constexpr int32_t kStagedOctets = 10;  // of results, that leave shared memory at once
constexpr int32_t kBlockBytes = kBlockRows * kDepth * 2;
constexpr int32_t kPanelBytes = kPanelRows * kDepth * 2;

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

// An item of either of the two GEMMs of one kernel (both.cuh).
struct EitherItem {
    bool second;
    Item item;
};

// Items of both GEMMs, which have the same tiles in the same groups: a group's of the second one come once those of
// `lag` further groups of the first one have come, so that what they read has been written by then, or nearly so; those
// of the last groups when nothing else is left. Each comes after all that it reads.
struct LaggedOrder {
    ItemOrder first, second;
    int32_t lag;

    WEAVE_HOST_DEVICE int32_t num_items() const { return first.num_items() + second.num_items(); }
    WEAVE_HOST_DEVICE EitherItem item(int32_t index) const {
        const int32_t a_group = first.group * first.columns, turn = a_group + second.group * second.columns;
        const int32_t all = first.num_items(), ahead = (lag < first.tiles ? lag : first.tiles) * a_group;
        int32_t before = index;  // items of the first GEMM
        bool is_second = false;
        if (index >= ahead) {
            const int32_t within = (index - ahead) % turn;
            is_second = within >= a_group;
            before = ahead + (index - ahead) / turn * a_group + (is_second ? a_group : within);
        }
        if (before >= all) return {true, second.item(index - all)};
        return is_second ? EitherItem{true, second.item(index - before)} : EitherItem{false, first.item(before)};
    }
};

// Groups of the first GEMM that have `items` of its items or more.
WEAVE_HOST_DEVICE constexpr int32_t groups_of(int32_t items, int32_t group, int32_t columns) {
    return (items + group * columns - 1) / (group * columns);
}

// What the routing table holds for that kernel, in numbers from its begin: how many items have been taken, and of each
// tile how many results of the first GEMM have been stored.
constexpr int32_t kTakenAt = 1;
WEAVE_HOST_DEVICE constexpr int32_t stored_at(int32_t num_tiles, int32_t tile) {
    return 4 * (num_tiles + 1) + tile;
}

// Positions among rows sorted by expert.
struct Rows {
    int32_t first;
    int32_t count;
};

// Of an expert's rows, from `begin` to `end`, those of the tile that begins at `first` in the table. There tiles have
// `tile_rows` and the last one what is left; here they are equally long, up to a multiple of 16, so that none is short.
WEAVE_HOST_DEVICE constexpr Rows even_rows(int32_t begin, int32_t first, int32_t end, int32_t tile_rows) {
    const int32_t rows = end - begin, tiles = (rows + tile_rows - 1) / tile_rows;
    const int32_t each = ((rows + tiles - 1) / tiles + 2 * kOctetRows - 1) / (2 * kOctetRows) * (2 * kOctetRows);
    const int32_t at = begin + (first - begin) / tile_rows * each;
    return {at, each < end - at ? each : end - at};
}

// Octets of a tile's rows that each CTA multiplies: half of them.
WEAVE_HOST_DEVICE constexpr int32_t octets_of(int32_t rows) {
    return (rows + 2 * kOctetRows - 1) / (2 * kOctetRows);
}

// CTA `rank`'s of a tile's rows; none, or fewer than it multiplies, where the tile ends before.
WEAVE_HOST_DEVICE constexpr Rows own_rows(Rows tile, int32_t rank) {
    const int32_t most = octets_of(tile.count) * kOctetRows, skipped = rank * most, left = tile.count - skipped;
    return {tile.first + skipped, left < 0 ? 0 : left < most ? left : most};
}

// A row of 128 bytes has its 16-byte chunks exchanged by the 128-byte swizzle, as wgmma reads it (gemm/wgmma.cuh).
// Results are stored this way too, until they leave shared memory.
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

// A row of one of several result buffers, as one number, so that it is decoded once for all the pieces that go there.
constexpr int32_t kBufferShift = 28;

struct Place {
    int32_t buffer;
    int32_t row;
};

WEAVE_HOST_DEVICE constexpr int32_t packed_place(int32_t number, int32_t rows_per_buffer) {
    return number / rows_per_buffer << kBufferShift | number % rows_per_buffer;
}
WEAVE_HOST_DEVICE constexpr Place unpacked_place(int32_t packed) {
    return {packed >> kBufferShift, packed & ((1 << kBufferShift) - 1)};
}

}  // namespace weave::moe_experts
