// Which tile of the product comes when, and whose rows it holds: plain arithmetic, for host and device.
//
// The rows of the product are divided among owners (the ranks of a group; a GEMM that does not communicate has one
// owner). An owner's rows are cut into panels of 128; two panels that follow one another are a pair, which the two CTAs
// of a cluster compute together. Tiles of a group of pairs come column by column, so that a group's rows are finished
// together: a group is what FlashOverlap calls a wave group (papers/flashoverlap.txt, section 4).
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "fabric/arena.h"

namespace weave::gemm {

constexpr int32_t kPanelRows = 128;
constexpr int32_t kPairRows = 2 * kPanelRows;
// CTAs that compute a pair together.
constexpr int kClusterCtas = 2;

constexpr int32_t ceiling(int64_t a, int64_t b) {
    return static_cast<int32_t>((a + b - 1) / b);
}

// Whose pairs come first.
enum class OwnerOrder : int32_t {
    kInterleaved = 0,  // one of each owner in turn: every owner's rows finish from the beginning on
    kOwnFirst = 1,     // owner by owner, from this rank: what is here already goes first
};

struct Tile {
    int32_t owner;
    int32_t row;     // of the owner's rows, the cluster's first
    int32_t column;  // of tiles
};

struct TileOrder {
    int32_t begin[fabric::kMaxWorld + 1];  // of each owner's rows
    int32_t num_owners;
    int32_t rank;         // among the owners
    int32_t pairs;        // of the owner with the most rows
    int32_t columns;      // tiles in a row of tiles
    int32_t group_pairs;  // in a group
    OwnerOrder owner_order;

    WEAVE_HOST_DEVICE int32_t rows_of(int32_t owner) const { return begin[owner + 1] - begin[owner]; }
    // Some may have no rows: of owners with fewer pairs than others.
    WEAVE_HOST_DEVICE int32_t num_tiles() const { return pairs * num_owners * columns; }
    WEAVE_HOST_DEVICE Tile tile(int32_t index) const {
        const int32_t all_pairs = pairs * num_owners, group = index / (group_pairs * columns);
        const int32_t first = group * group_pairs, within = index - first * columns;
        const int32_t count = all_pairs - first < group_pairs ? all_pairs - first : group_pairs;
        const int32_t pair = first + within % count;
        Tile found;
        found.column = within / count;
        if (owner_order == OwnerOrder::kInterleaved) {
            found.owner = pair % num_owners;
            found.row = pair / num_owners * kPairRows;
        } else {
            found.owner = (rank + pair / pairs) % num_owners;
            found.row = pair % pairs * kPairRows;
        }
        return found;
    }
    WEAVE_HOST_DEVICE bool has_rows(const Tile& tile) const { return tile.row < rows_of(tile.owner); }
};

}  // namespace weave::gemm
