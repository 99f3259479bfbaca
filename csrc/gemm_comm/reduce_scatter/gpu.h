// gemm_reduce_scatter on GPUs, where library GEMMs have written the partial result into the arena: each rank sums its
// part of all ranks' partial results. (Where one kernel computes the GEMM too: gemm_comm/pushed_tiles.h.) Meaning
// and arguments: weaveopt/ops/gemm_comm/reduce_scatter/op.py.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "fabric/arena.h"

namespace weave::gpu {

// One call, by value. A partial result is [outer, world, block], and the part of a rank [outer, block] of its number.
struct PartSum {
    fabric::GroupView group;
    int64_t partial_offset;  // in every arena, from its first byte
    int64_t outer;
    int64_t block;  // elements that are contiguous
    void* out;      // [outer, block]
    int32_t tokens;
    uint32_t site;  // equal on all ranks if they run the same
    float scale;
};

// Enqueues it. Returns a CUDA error code; 0 is success. Runs nothing for an empty part.
int run_part_sum(const PartSum& given, DType dtype, void* stream);

}  // namespace weave::gpu
