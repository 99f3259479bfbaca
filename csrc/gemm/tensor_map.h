// Tensor maps: how TMA finds boxes of a matrix.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/dtype.h"

namespace weave::gemm {

// Rows of `columns` elements, `stride` elements from one to the next, in boxes of 64 columns by `box_rows` with the
// 128-byte swizzle. `data` and the stride in bytes are multiples of 16. Returns a CUDA runtime error code; 0 is
// success.
int make_map(CUtensorMap& map, const void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride,
             int32_t box_rows);

// The same of `matrices` of such rows, `matrix_stride` elements from one to the next: boxes lie in one of them.
int make_stack_map(CUtensorMap& map, const void* data, DType dtype, int64_t matrices, int64_t rows, int64_t columns,
                   int64_t matrix_stride, int64_t stride, int32_t box_rows);

}  // namespace weave::gemm
