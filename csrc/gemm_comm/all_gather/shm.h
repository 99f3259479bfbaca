// All-gather over shared memory of rows that a GEMM reads. Meaning and arguments:
// weaveopt/ops/gemm_comm/all_gather/op.py.
//
//   shard          each rank copies its own into the buffer of the epoch's parity
//   fence, flag    release, in signal(ready)
//   wait           every rank: acquire, in wait(ready) of one peer after the other
//   reader         every rank copies each peer's shard to its place as soon as that peer has signalled
//   again          two epochs later, as the table in fabric/shm.h says
#pragma once

#include <cstdint>

#include "fabric/shm_rows.h"

namespace weave {

// The gathered rows are [outer, world, block] bytes, and a rank's shard [outer, block] of its own number.
struct Shard {
    int64_t outer;
    int64_t block_bytes;
};

// A site bound to its group. A call allocates nothing.
class AllGatherGemm {
  public:
    AllGatherGemm(fabric::shm::Group& group, const fabric::shm::RowsSite& site, int64_t data_bytes,
                  int32_t max_threads);

    // Takes the group, gathers `shard` of all ranks into `whole` with up to `num_threads` threads, and gives the group
    // back. `tokens` is what peers compare.
    Status run(int64_t tokens, const Shard& layout, const void* shard, void* whole, int32_t num_threads);
    const Status& status() const { return call_.group().status(); }

  private:
    // The shard of `rank`, which is at `from`, to its place.
    void place(int32_t rank, const Shard& layout, const char* from, char* whole, int32_t num_threads) const;

    fabric::shm::RowsCall call_;
    int32_t max_threads_;
};

}  // namespace weave
