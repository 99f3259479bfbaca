// Tensor maps: how TMA finds boxes of a matrix.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/dtype.h"

namespace weave::gemm {

// Rows of `columns` elements, `stride` elements from one to the next, in boxes of 64 columns by `box_rows` with the
// 128-byte swizzle, or of 32 columns with that of 64 bytes. `data` and the stride in bytes are multiples of 16. Returns
// a CUDA runtime error code; 0 is success.
int make_map(CUtensorMap& map, const void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride,
             int32_t box_rows, int32_t box_columns = 64);

// The same of `matrices` of such rows, `matrix_stride` elements from one to the next: boxes are in one of them.
int make_stack_map(CUtensorMap& map, const void* data, DType dtype, int64_t matrices, int64_t rows, int64_t columns,
                   int64_t matrix_stride, int64_t stride, int32_t box_rows);

// Boxes of `box_octets` times 8 gates and the 8 ups of the same columns: of each of `matrices` gate `i` begins at
// `i * stride` and its up `between` elements after, for `columns` of them, a multiple of 8, of `depth` elements.
struct GatesAndUps {
    const void* data;
    int64_t matrices;
    int64_t columns;
    int64_t depth;
    int64_t matrix_stride;
    int64_t stride;
    int64_t between;
};
int make_gate_map(CUtensorMap& map, const GatesAndUps& weight, DType dtype, int32_t box_octets);

}  // namespace weave::gemm
