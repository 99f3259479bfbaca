// Where the rows of a mixture are while they are away from their rank. Sizes and offsets only: no memory, no ranks.
//
// Every rank has two buffers. What a rank pushes into another one's memory has a place that no third rank writes, so
// no place is ever claimed or contended for (the write-conflict-free layout of FlashDMoE, section 3.2).
//
//   dispatch   [world - 1] slots, one a source. A slot is a header, then routes [max_tokens * choices], then rows
//              [max_tokens]: one row for each of the source's tokens that has a choice here, however many it has
//   combine    rows [max_tokens][choices]: of each own token, what the expert of each of its choices made
//
// On GPUs, where rows are not counted before a GEMM begins, what is pushed is at its token's own number instead:
//
//   dispatch   ids [world][tokens][choices], one source after the other: each choice's expert among the owner's, or -1;
//              then rows [world][tokens], of which those without a choice here are not written
//   combine    the same
#pragma once

#include <cstdint>
#include <vector>

#include "fabric/buffer_need.h"

namespace weave::moe {

struct SlotHeader {
    int64_t num_tokens;  // of the source, also where it has more than were planned for and pushes nothing
    int64_t num_rows;
    int64_t num_routes;
};

// One choice of one token, as the rank of its expert sees it.
struct Route {
    int32_t row;     // in the slot
    int32_t expert;  // among the rank's own
    int32_t place;   // token * choices + choice at the source: where the result goes
    int32_t unused = 0;
};
static_assert(sizeof(Route) == 16);

class Layout {
  public:
    // Throws std::invalid_argument for sizes that int32 places cannot distinguish.
    Layout(int32_t world, int64_t max_tokens, int64_t choices, int64_t row_bytes);

    // Of the slot that holds what `source` pushed to `owner`.
    int64_t slot(int32_t owner, int32_t source) const { return ((source - owner + world_) % world_ - 1) * slot_bytes_; }
    int64_t routes() const { return routes_offset_; }
    int64_t rows() const { return rows_offset_; }
    int64_t dispatch_bytes() const { return (world_ - 1) * slot_bytes_; }
    int64_t combine_bytes() const { return combine_bytes_; }
    // Both have a fixed place in the arena: a peer that is a call ahead pushes while this rank is still in the call
    // before.
    std::vector<fabric::BufferNeed> needs() const;

  private:
    int32_t world_;
    int64_t routes_offset_;
    int64_t rows_offset_;
    int64_t slot_bytes_;
    int64_t combine_bytes_;
};

class GpuLayout {
  public:
    static constexpr int64_t kAlignment = 256;
    static constexpr int64_t kIdBytes = 8;

    // Throws std::invalid_argument for sizes that the kernels cannot count.
    GpuLayout(int32_t world, int64_t max_tokens, int64_t choices, int64_t row_bytes);

    // From where the dispatch buffer begins; ids do at its begin.
    int64_t rows() const { return rows_offset_; }
    int64_t dispatch_bytes() const { return dispatch_bytes_; }
    int64_t combine_bytes() const { return combine_bytes_; }
    std::vector<fabric::BufferNeed> needs() const;

  private:
    int64_t rows_offset_;
    int64_t dispatch_bytes_;
    int64_t combine_bytes_;
};

}  // namespace weave::moe
