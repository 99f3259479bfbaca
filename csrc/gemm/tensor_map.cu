#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "gemm/tensor_map.h"

namespace weave::gemm {
namespace {

// The driver's function, without linking against the driver: hosts without a GPU have none.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
    static const auto found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result{};
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
    }();
    return found;
}

constexpr cuuint32_t kBoxColumns = 64;

// `strides` in bytes, one for each dimension but the first, along which boxes have 64 elements, or 32.
int encode(CUtensorMap& map, const void* data, DType dtype, cuuint32_t dimensions, const cuuint64_t* sizes,
           const cuuint64_t* strides, const cuuint32_t* box) {
    const auto encode_tiled = encoder();
    if (encode_tiled == nullptr) return cudaErrorNotSupported;
    const auto type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    const auto swizzle = box[0] == kBoxColumns ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
    const CUresult result = encode_tiled(&map, type, dimensions, const_cast<void*>(data), sizes, strides, box, steps,
                                         CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

int make_map(CUtensorMap& map, const void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride,
             int32_t box_rows, int32_t box_columns) {
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * size_of(dtype))};
    const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
    return encode(map, data, dtype, 2, sizes, strides, box);
}

int make_stack_map(CUtensorMap& map, const void* data, DType dtype, int64_t matrices, int64_t rows, int64_t columns,
                   int64_t matrix_stride, int64_t stride, int32_t box_rows) {
    const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                                 static_cast<cuuint64_t>(matrices)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(stride * size_of(dtype)),
                                   static_cast<cuuint64_t>(matrix_stride * size_of(dtype))};
    const cuuint32_t box[3] = {kBoxColumns, static_cast<cuuint32_t>(box_rows), 1};
    return encode(map, data, dtype, 3, sizes, strides, box);
}

int make_gate_map(CUtensorMap& map, const GatesAndUps& weight, DType dtype, int32_t box_octets) {
    constexpr int64_t kOctet = 8;
    const auto bytes = [dtype](int64_t elements) { return static_cast<cuuint64_t>(elements * size_of(dtype)); };
    const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(weight.depth), kOctet, 2,
                                 static_cast<cuuint64_t>(weight.columns / kOctet),
                                 static_cast<cuuint64_t>(weight.matrices)};
    const cuuint64_t strides[4] = {bytes(weight.stride), bytes(weight.between), bytes(kOctet * weight.stride),
                                   bytes(weight.matrix_stride)};
    const cuuint32_t box[5] = {kBoxColumns, kOctet, 2, static_cast<cuuint32_t>(box_octets), 1};
    return encode(map, weight.data, dtype, 5, sizes, strides, box);
}

}  // namespace weave::gemm
