// Stands in for csrc/gemm/tensor_map.h.
#pragma once

#include "base/dtype.h"
#include "gemm/tensor_copy.cuh"

namespace weave::gemm {

inline int make_stack_map(CUtensorMap& map, const void* data, DType, int64_t matrices, int64_t rows, int64_t columns,
                          int64_t matrix_stride, int64_t stride, int32_t box_rows) {
    const bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0 && matrix_stride % 8 == 0;
    map = {static_cast<const uint16_t*>(data), columns, rows, matrices, stride, matrix_stride, box_rows};
    return aligned ? 0 : 1;
}

inline int make_map(CUtensorMap& map, const void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride,
                    int32_t box_rows) {
    return make_stack_map(map, data, dtype, 1, rows, columns, 0, stride, box_rows);
}

}  // namespace weave::gemm
