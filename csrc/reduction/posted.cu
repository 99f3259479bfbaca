// The posted kernel of all_reduce_norm: its launch. What a CTA does, and why: posted.cuh.
#include <algorithm>

#include "fabric/kernel_code.cuh"
#include "reduction/posted.cuh"

namespace weave::gpu {
namespace {

using fabric::KernelCode;

// Of partial rows: a signal costs a fence of a few microseconds, which a unit's copy should exceed.
constexpr int32_t kUnitBytes = 16 << 10;

template <typename T, int kVecs, bool kPlain>
__global__ void __launch_bounds__(kPostedThreads, 2)
    posted(const __grid_constant__ Call call, const __grid_constant__ PostedLayout layout) {
    __shared__ float parts[2][kPostedThreads / 32];
    posted_cta<kPostedThreads, T, kVecs, kPlain>(call, layout, parts);
}

template <typename T, int kVecs, bool kPlain>
int enqueue(const Call& call, const Launch& launch) {
    const auto kernel = posted<T, kVecs, kPlain>;
    int device = 0, num_sms = 0, per_sm = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    PostedLayout layout{output_layout(row_kind(call, launch.dtype), call.tokens), 1};
    layout.rows_a_unit = std::max(1, kUnitBytes / layout.output.row_bytes);
    const int64_t staging = staging_bytes(layout.output.row_bytes, call.share, call.group.world);
    if (staging > call.buffers.staging_bytes || layout.output.num_bytes > call.buffers.output_bytes)
        return cudaErrorInvalidValue;
    // CTAs wait for each other through peers: all of them must be resident at once.
    const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, kPostedThreads, 0);
    if (error != cudaSuccess) return error;
    const int32_t units = (call.share + layout.rows_a_unit - 1) / layout.rows_a_unit;
    int32_t num_ctas = std::min({per_sm * num_sms, fabric::kMaxCtas, units});
    if (num_ctas < 1) return cudaErrorLaunchOutOfResources;
    if (launch.num_ctas > 0) num_ctas = std::min(num_ctas, launch.num_ctas);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = num_ctas;
    config.blockDim = kPostedThreads;
    config.stream = static_cast<cudaStream_t>(launch.stream);
    config.attrs = &attribute;
    config.numAttrs = fabric::code_of<posted<T, kVecs, kPlain>>(device) == KernelCode::kSm90 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, call, layout);
}

template <typename T, int kVecs>
int with_norm(const Call& call, const Launch& launch) {
    return is_plain(call) ? enqueue<T, kVecs, true>(call, launch) : enqueue<T, kVecs, false>(call, launch);
}

template <typename T>
int with_vecs(const Call& call, const Launch& launch) {
    const int32_t vecs = (call.hidden / kElements<T> + kPostedThreads - 1) / kPostedThreads;
    if (vecs <= 4) return with_norm<T, 4>(call, launch);
    if (vecs <= kMostPostedVecs) return with_norm<T, kMostPostedVecs>(call, launch);
    return cudaErrorInvalidValue;
}

}  // namespace

const char* posted_unsupported(DType dtype, int64_t hidden) {
    return hidden * size_of(dtype) / 16 > kMostPostedVecs * kPostedThreads ? "rows are too long for the posted kernel"
                                                                           : "";
}

int run_posted(const Call& call, const Launch& launch) {
    switch (launch.dtype) {
        case DType::kFloat32:
            return with_vecs<float>(call, launch);
        case DType::kBFloat16:
            return with_vecs<__nv_bfloat16>(call, launch);
        case DType::kFloat16:
            return with_vecs<__half>(call, launch);
    }
    return cudaErrorInvalidValue;
}

}  // namespace weave::gpu
