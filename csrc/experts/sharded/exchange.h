// Mixtures whose tokens are sharded, on GPUs of one host: the kernel that sends rows to the ranks of their experts, and
// the one that sums the returned results. Between them run the experts (csrc/experts), over the rows of all sources.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "fabric/arena.h"

namespace weave::moe {

constexpr int32_t kVecBytes = 16;

// What both kernels of a call have in common; equal on all ranks but for `tokens` and the view of the group.
struct Exchange {
    fabric::GroupView group;
    int64_t ids_offset;  // from the begin of every rank's arena
    int64_t rows_offset;
    int64_t combine_offset;
    uint32_t site;
    int32_t slot_tokens;  // room of each source: at least as many as any rank has
    int32_t tokens;       // of this rank
    int32_t choices;      // of a token
    int32_t num_experts;  // of a rank
    int32_t row_vecs;     // of kVecBytes, in a row
};

// On the device, counted up by every call.
struct Counters {
    unsigned long long pushed;    // rows of this rank's tokens that went to others
    unsigned long long returned;  // rows that others made of them
};

struct Dispatch {
    Exchange exchange;
    const char* x;           // [tokens] rows
    int64_t x_stride;        // bytes
    const int64_t* experts;  // [tokens][choices], contiguous: ids over all ranks
    Counters* traffic;       // nullptr: not counted
    int32_t parts;           // of a row, that warps bring by themselves
};

struct Combine {
    Exchange exchange;
    const int64_t* experts;
    const void* weights;  // [tokens][choices], contiguous
    DType weights_dtype;
    char* out;  // [tokens] rows, contiguous
};

// Both enqueue a kernel and return a CUDA error code; 0 is success. Every rank calls both, one after the other, for
// every call in which `slot_tokens` is not 0.
int run_dispatch(const Dispatch& asked, void* stream);
int run_combine(const Combine& asked, DType dtype, void* stream);

}  // namespace weave::moe
