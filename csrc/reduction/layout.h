// Where rows are in the buffers of the GPU kernels, and how large those are. Plans and launches use the same formulas.
#pragma once

#include <cstdint>
#include <vector>

#include "fabric/buffer_need.h"
#include "reduction/gpu.h"

namespace weave::gpu {

// What a row's scale takes after the row, so that the next row begins at a multiple of 16 bytes.
constexpr int32_t kScaleBytes = 16;
// Of buffers, and of the two parts of the output buffer.
constexpr int64_t kBufferAlignment = 256;

// What rows are.
struct RowKind {
    int64_t hidden;
    DType dtype;
    OutKind out_kind;
    bool row_scales;  // a finished row carries its scale
    bool sum_whole;   // rows of the sum are returned too
};

inline RowKind row_kind(const Call& call, DType dtype) {
    return {call.hidden, dtype, call.out_kind, call.quant == QuantKind::kPerToken, call.sum_whole != 0};
}

// The output buffer of the bulk and the direct kernel: finished rows of all tokens, then rows of the sum.
struct OutputLayout {
    int32_t row_bytes;      // of a partial row and a row of the sum
    int32_t out_bytes;      // of a finished row
    int32_t out_row_bytes;  // the same with its scale
    int64_t sum_offset;     // where rows of the sum begin
    int64_t num_bytes;
};
OutputLayout output_layout(const RowKind& rows, int64_t tokens);

// A mailbox: slots of partial rows, of finished rows and of rows of the sum, one of each for every peer.
struct LLPacketLayout {
    uint32_t slot_rows;               // rows that one slot has room for
    uint32_t row_bytes;               // of a partial row and of a row of the sum
    uint32_t out_row_bytes;           // of a finished row, its scale included
    uint32_t out_offset, sum_offset;  // where the slots of finished rows and of sums begin
    int64_t num_bytes;
};
LLPacketLayout ll_packet_layout(const RowKind& rows, int64_t tokens, int32_t world, bool one_shot);

// Of the largest share of the token rows.
inline int64_t share_of(int64_t tokens, int32_t world) {
    return (tokens + world - 1) / world;
}

// Bytes of partial rows that peers send to one owner.
inline int64_t staging_bytes(int64_t row_bytes, int64_t share, int32_t world) {
    return (world - 1) * share * row_bytes;
}

// What calls of up to `tokens` tokens need of every arena, with row scales and the sum returned whole if need be:
// "mailboxes" (all of them, one after the other), "staging", "output", "partial" (where a GEMM writes what the direct
// kernel reads).
std::vector<fabric::BufferNeed> buffer_needs(GpuKernel kernel, int64_t tokens, int64_t hidden, DType dtype,
                                             OutKind out_kind, int32_t world);

}  // namespace weave::gpu
