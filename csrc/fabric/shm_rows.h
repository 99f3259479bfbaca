// Calls in which every rank puts rows into its partial buffer, and all ranks read them: one synchronization.
//
// Memory order: "partial result" of the table in fabric/shm.h. The rows of epoch e are in the buffer of its parity.
#pragma once

#include <cstdint>

#include "fabric/shm.h"

namespace weave::fabric::shm {

// What is constant over the calls of a site.
struct RowsSite {
    uint32_t tag = 0;
    int64_t partial_offset = 0;  // of two buffers of `partial_bytes` each
    int64_t partial_bytes = 0;
    double timeout_s = 120;
};

class RowsCall {
  public:
    // Throws std::invalid_argument if the buffers are not inside a segment of `data_bytes`.
    RowsCall(Group& group, const RowsSite& site, int64_t data_bytes);

    Group& group() const { return group_; }
    int32_t world() const { return group_.world(); }
    int32_t rank() const { return group_.rank(); }
    int32_t next_parity() const { return static_cast<int32_t>((group_.epoch() + 1) & 1); }

    // Takes the group. Afterwards this rank may write rows at own(), then must signal() or leave.
    Status enter(int64_t tokens);
    // Where the rows of the coming epoch are written.
    char* own() const { return group_.data(rank()) + site_.partial_offset + next_parity() * site_.partial_bytes; }

    // Begins the epoch: own rows are there.
    void signal(int64_t tokens);
    // Until the peer's rows of this epoch are there; poisons the group where they do not come.
    Status wait(int32_t peer, int64_t tokens);
    // Rows of `rank` in this epoch.
    const char* rows(int32_t rank) const {
        return group_.data(rank) + site_.partial_offset + (group_.epoch() & 1) * site_.partial_bytes;
    }

  private:
    Group& group_;
    const RowsSite site_;
};

}  // namespace weave::fabric::shm
