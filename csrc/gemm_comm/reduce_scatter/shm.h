// Reduce-scatter over shared memory of a partial result that a GEMM wrote there. Meaning and arguments:
// weaveopt/ops/gemm_comm/reduce_scatter/op.py.
//
//   partial rows   each rank's GEMM writes its own, in the buffer of the epoch's parity
//   fence, flag    release, in signal(ready)
//   wait           every rank: acquire, in wait(ready) of every peer
//   reader         the owner of a part sums that part of all ranks' rows, in the order of the ranks, into its own
//   memory again          two epochs later, as the table in fabric/shm.h says
#pragma once

#include <cstdint>
#include <vector>

#include "fabric/shm_rows.h"
#include "rows/rows.h"

namespace weave {

// Which elements of a partial result belong to whom: it is [outer, world, inner, row], and a rank's part [outer, inner,
// row] of its own number.
struct Parts {
    int64_t outer;
    int64_t inner;
    int64_t row;
};

// A site bound to its group.
class GemmReduceScatter {
  public:
    GemmReduceScatter(fabric::shm::Group& group, const fabric::shm::RowsSite& site, int64_t data_bytes, DType dtype,
                      int32_t max_threads);

    fabric::shm::RowsCall& call() { return call_; }
    // After call().enter() and with the partial result in place: writes this rank's part of `scale * sum over ranks`,
    // with up to `num_threads` threads, and gives the group back. `tokens` is what peers compare.
    Status run(int64_t tokens, const Parts& parts, float scale, void* out, int32_t num_threads);

  private:
    void reduce(const Parts& parts, float scale, char* out, int32_t num_threads);

    fabric::shm::RowsCall call_;
    const RowFunctions& functions_;
    DType dtype_;
    int32_t max_threads_;
    std::vector<float> scratch_;  // one row a thread, as long as the longest that came
};

}  // namespace weave
