// How many tokens the rank has that has most. Ranks that hold batches of their own exchange it before a call on
// GPUs: how many a rank has is known on its host alone, and their hosts share memory, so no rank waits for a device.
//
// Memory order:
//
//   count, by parity of the epoch
//     store   the owner, plain, in its own segment
//     fence   release, in signal(ready)
//     flag    ready of the owner
//     wait    every peer: acquire, in wait(ready)
//     reader  every peer, before it leaves the call
//     again   two epochs later: by then this rank has every peer's `ready` of the epoch between, which a peer signals
//             after it has left this one
//
// No other operation has this buffer, so a call needs no barrier whatever ran before it.
#pragma once

#include <cstdint>

#include "fabric/buffer_need.h"
#include "fabric/shm.h"

namespace weave::moe {

class TokenCounts {
  public:
    // `offset`: of the buffer in every segment. Throws std::invalid_argument if it is not inside one of `data_bytes`.
    TokenCounts(fabric::shm::Group& group, int64_t offset, int64_t data_bytes, uint32_t site, double timeout_s);

    static fabric::BufferNeed need();

    // Every rank calls it with its own number; `most` is the largest, the same on all. It is a call of the group.
    Status largest(int64_t tokens, int64_t& most);

  private:
    int64_t& count(int32_t rank, uint32_t epoch) const;

    fabric::shm::Group& group_;
    const int64_t offset_;
    const uint64_t tag_;
    const double timeout_s_;
};

}  // namespace weave::moe
