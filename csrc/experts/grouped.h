// The GEMMs of a mixture's experts on Hopper (compute capability 9.0), bf16 or fp16, sums in fp32:
//
//   inner[p] = act(x[order[p] / choices] * gate_up[expert of p]^T + bias)
//   results[order[p]] = inner[p] * down[expert of p]^T + bias
//
// for positions p of rows sorted by expert, in tiles by the table of ops/experts/routing_kernels.py: of up to 288
// rows, of up to 256 where a GEMM is `wide`.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace weave::moe_experts {

// Consecutive experts whose weights are one tensor.
struct ExpertRange {
    const void* data;
    int64_t experts;
};
constexpr int32_t kMostRanges = 8;

// Of all experts, [experts, rows, depth], in one range or several, none of them empty; strides in elements. That of
// rows or that of the depth is 1.
struct Weight {
    ExpertRange ranges[kMostRanges];
    int32_t num_ranges;
    int64_t rows;
    int64_t expert_stride;
    int64_t row_stride;
    int64_t depth_stride;
    const void* bias;  // [experts, rows], contiguous; or null
};

// What the routing kernels left.
struct Routing {
    const int32_t* order;
    int32_t* table;     // written by run_both alone
    int64_t num_rows;   // positions at most: tokens * choices
    int32_t group;      // tiles that go through a column of weights before the next
    int32_t tile_rows;  // of the table's tiles
};

struct Gate {
    bool gated;
    bool interleaved;    // rows of the weight: gate 0, up 0, gate 1, ...; else all gates, then all ups
    int32_t activation;  // activation.cuh
    float alpha;
    float limit;  // 0: none
};

// Where a second GEMM's rows go if not into one tensor: to the rank that they came from.
constexpr int32_t kMostResultBuffers = 8;
struct ResultBuffers {
    void* base[kMostResultBuffers];  // rows of its own: those numbered from `rows` times its place on, in this order
    int64_t rows;                    // of each
};

// Why `device` cannot run them; empty where it can. `addresses` is the or of all addresses and strides in bytes.
const char* unsupported(DType dtype, int64_t hidden, int64_t inner, uint64_t addresses, int32_t device);

// Weights in several ranges take the kernels of one GEMM each, and have no rows for other ranks: run_both and
// run_down_to_ranks refuse them.

// Whether the kernel of wide.cuh computes a GEMM whose weight is this one: one whose depth is contiguous.
bool can_be_wide(const Weight& weight);

// `x` [tokens, hidden] with `x_stride` elements from row to row, `inner` [num_rows, inner_width] contiguous. With
// `gathered` [num_rows, hidden], contiguous, rows are gathered there first and the GEMM is wide. All of these enqueue
// kernels and return a CUDA error code; 0 is success.
int run_gate_up(const void* x, int64_t x_stride, int64_t hidden, int32_t choices, const Weight& weight,
                const Routing& routing, const Gate& gate, void* inner, DType dtype, void* gathered, void* stream);

// `results` [num_rows, hidden] contiguous: rows of choices that no expert of the weight has are not written.
int run_down(const void* inner, int64_t inner_width, const Weight& weight, const Routing& routing, void* results,
             DType dtype, bool wide, void* stream);

// Both in one kernel (both.cuh), of weights that are alike. An item of the second GEMM comes `lag` items of the first
// one for each cluster of the grid, or somewhat more, after the last one that it reads. Takes what the routing kernels
// left once: it counts in the table.
int run_both(const void* x, int64_t x_stride, int64_t hidden, int32_t choices, const Weight& gate_up,
             const Weight& down, const Routing& routing, const Gate& gate, void* inner, void* results, DType dtype,
             int32_t lag, void* stream);

// The same as run_down, into the memory of several ranks: row order[p] of all is row `order[p] % buffers.rows` of
// result buffer `order[p] / buffers.rows`.
int run_down_to_ranks(const void* inner, int64_t inner_width, const Weight& weight, const Routing& routing,
                      const ResultBuffers& buffers, DType dtype, void* stream);

}  // namespace weave::moe_experts
