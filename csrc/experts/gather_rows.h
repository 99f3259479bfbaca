// Rows of x in the order of positions, for the GEMM of wide.cuh: TMA brings rows that are contiguous, and a
// copy for each row takes it some 40 cycles.
#pragma once

#include <cstdint>

#include "experts/grouped.h"

namespace weave::moe_experts {

struct RowsToGather {
    const uint8_t* x;
    int32_t x_chunks;  // of 16 bytes, from row to row
    int32_t chunks;    // of a row
    int32_t choices;   // of a token: row order[p] / choices goes to position p
    void* gathered;    // [num_rows, chunks], contiguous; after the last expert's rows nothing is written
};

// Enqueues a kernel; a CUDA error code, 0 is success.
int gather_rows(const RowsToGather& rows, const Routing& routing, void* stream);

}  // namespace weave::moe_experts
