// The arithmetic of reductions on token rows, without any synchronization: sum over ranks, bias, scale, norm,
// residual, rounding, norm. Compiled once per instruction set; choose_rows() picks at run time.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace weave {

enum class NormKind : int32_t { kNone = 0, kRms = 1, kLayer = 2 };

struct NormSpec {
    NormKind kind = NormKind::kNone;
    float eps = 0;
    float weight_offset = 0;          // Gemma: weights are stored as w and mean 1 + w
    bool cast_before_weight = false;  // Llama: round to the activation type, then multiply by the weight
};

struct Norm {
    NormSpec spec;
    const float* weight;  // offset added; nullptr: none
    const float* bias;    // nullptr: none
};

// One call's arrays. Rows are `hidden` elements, contiguous; row t of every array belongs to token t.
struct Rows {
    int64_t hidden;
    int32_t world;
    DType dtype;                  // of partials, residual and sum
    DType out_dtype;              // of normalized
    const void* const* partials;  // by rank, summed in this order
    const float* total;           // their sums, where they were summed elsewhere; nullptr: partials are summed
    const float* reduced_bias;    // nullptr: none
    float scale;
    Norm post;
    const void* residual;  // nullptr: none
    void* sum;             // nullptr: not wanted
    Norm norm;
    void* normalized;  // nullptr: not wanted
};

// Computes rows [begin, end). `scratch` holds padded(hidden) floats of this thread.
using ReduceRows = void (*)(const Rows& rows, int64_t begin, int64_t end, float* scratch);
// out[i] = in[i] + offset in fp32.
using WidenRow = void (*)(DType dtype, const void* in, float offset, float* out, int64_t count);

// out[i] = a[i] + b[i] in fp32; `out` may be `a` or `b`, where that is fp32.
using AddRow = void (*)(DType a_dtype, const void* a, DType b_dtype, const void* b, float* out, int64_t count);

// out[i] = the sum over rows, in their order, of weights[row] * rows[row][i]: in fp32, each product rounded to it, and
// rounded once. No rows: zeros.
using WeighRows = void (*)(DType dtype, const void* const* rows, const float* weights, int64_t num_rows, void* out,
                           int64_t count);

struct RowFunctions {
    const char* isa;
    ReduceRows reduce;
    WidenRow widen;
    AddRow add;
    WeighRows weigh;
};

// Rows of scratch are padded to whole vectors of the widest instruction set.
inline int64_t padded(int64_t hidden) {
    return (hidden + 15) / 16 * 16;
}

extern const RowFunctions kRowsBaseline;
#if defined(__x86_64__)
extern const RowFunctions kRowsAvx2;
extern const RowFunctions kRowsAvx512;
#endif

// What this processor can run, widest first. Never empty.
std::vector<const RowFunctions*> usable_rows();

// The widest; all ranks of a host choose the same, so their results agree bitwise.
const RowFunctions& choose_rows();

}  // namespace weave
