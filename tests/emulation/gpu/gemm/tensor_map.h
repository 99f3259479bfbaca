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

struct GatesAndUps {
    const void* data;
    int64_t matrices, columns, depth, matrix_stride, stride, between;
};

inline int make_gate_map(CUtensorMap& map, const GatesAndUps& weight, DType dtype, int32_t box_octets) {
    const int code = make_stack_map(map, weight.data, dtype, weight.matrices, weight.columns, weight.depth,
                                    weight.matrix_stride, weight.stride, box_octets * 16);
    map.between = weight.between;
    return weight.columns % 8 == 0 && weight.between % 8 == 0 ? code : 1;
}

}  // namespace weave::gemm
