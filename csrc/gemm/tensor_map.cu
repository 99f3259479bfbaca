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

}  // namespace

int make_map(CUtensorMap& map, const void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride,
             int32_t box_rows) {
    constexpr cuuint32_t kBoxColumns = 64;
    const auto encode = encoder();
    if (encode == nullptr) return cudaErrorNotSupported;
    const auto type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * size_of(dtype))};
    const cuuint32_t box[2] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
    const cuuint32_t steps[2] = {1, 1};
    const CUresult result =
        encode(&map, type, 2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace weave::gemm
