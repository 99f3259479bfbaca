#include <cuda_runtime.h>

#include <algorithm>

#include "gemm/gemm.cuh"
#include "gemm/gemm.h"
#include "gemm/tensor_map.h"

namespace weave::gemm {

const char* unsupported(DType dtype, int64_t n, int64_t k, int32_t device) {
    if (dtype == DType::kFloat32) return "the GEMM is of bf16 or fp16";
    if (n % 8 != 0 || k % 8 != 0) return "rows need a multiple of 8 elements";
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return major == 9 && minor == 0 ? "" : "the GEMM is for compute capability 9.0 alone";
}

int run(const Problem& problem, DType dtype, int32_t tile_columns, int32_t group_pairs, void* stream) {
    if (problem.m == 0 || problem.n == 0) return cudaSuccess;
    Work work{};
    TileOrder& order = work.order;
    order.begin[1] = static_cast<int32_t>(problem.m);
    order.num_owners = 1;
    order.pairs = ceiling(problem.m, kPairRows);
    order.columns = ceiling(problem.n, tile_columns);
    order.group_pairs = std::max(group_pairs, 1);
    work.bias = problem.bias;
    work.num_columns = static_cast<int32_t>(problem.n);
    work.k_blocks = ceiling(problem.k, kBlockK);
    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    work.num_clusters = std::min(num_sms / kClusterCtas, order.num_tiles());
    int error = make_map(work.a, problem.a, dtype, problem.m, problem.k, problem.a_stride, kPanelRows);
    if (error == 0)
        error = make_map(work.b, problem.weight, dtype, problem.n, problem.k, problem.weight_stride,
                         tile_columns / kClusterCtas);
    if (error == 0)
        error = make_map(work.c[0], problem.out, dtype, problem.m, problem.n, problem.out_stride, kConsumerRows,
                         store_columns(tile_columns));
    if (error != 0) return error;
    const int32_t num_ctas = work.num_clusters * kClusterCtas;
    if (dtype == DType::kBFloat16) return enqueue_gemm<__nv_bfloat16>(work, tile_columns, num_ctas, stream);
    if (dtype == DType::kFloat16) return enqueue_gemm<__half>(work, tile_columns, num_ctas, stream);
    return cudaErrorInvalidValue;
}

}  // namespace weave::gemm
