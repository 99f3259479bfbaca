// The launch of the kernels that send rows to their experts and sum the returned results.
#include <cuda_runtime.h>

#include <algorithm>

#include "experts/sharded/exchange.cuh"
#include "fabric/kernel_code.cuh"

namespace weave::moe {
namespace {

__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch(const __grid_constant__ Dispatch work) {
    dispatch_rows(work);
}

template <typename T>
__global__ void __launch_bounds__(kCombineThreads, 2) combine(const __grid_constant__ Combine work) {
    combine_rows<T>(work);
}

int32_t count_sms() {
    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    return num_sms;
}

// Launched while the kernel ahead still runs, where the device can do that: begin_call() waits for it.
template <auto kKernel, class Work>
int launch(const Work& work, int32_t num_ctas, int32_t num_threads, void* stream) {
    int device = 0;
    cudaGetDevice(&device);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<uint32_t>(num_ctas);
    config.blockDim = static_cast<uint32_t>(num_threads);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = fabric::code_of<kKernel>(device) == fabric::KernelCode::kSm90 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kKernel, work);
}

template <typename T>
int launch_combine(const Combine& work, int32_t num_ctas, void* stream) {
    return launch<combine<T>>(work, num_ctas, kCombineThreads, stream);
}

int64_t ceiling(int64_t value, int64_t of) {
    return (value + of - 1) / of;
}

}  // namespace

int run_dispatch(const Dispatch& asked, void* stream) {
    const Exchange& exchange = asked.exchange;
    if (exchange.slot_tokens == 0) return cudaSuccess;
    if (exchange.tokens < 0 || exchange.tokens > exchange.slot_tokens) return cudaErrorInvalidValue;
    // A CTA waits for its like on every peer, so all of them have to be resident at once, which is one on each SM.
    // Nothing here may depend on what differs between ranks.
    const int64_t most = std::min(count_sms(), fabric::kMaxCtas), warps = kDispatchThreads / 32;
    Dispatch work = asked;
    const int64_t whole = ceiling(exchange.row_vecs, 32 * kVecsInFlight);
    work.parts = static_cast<int32_t>(std::clamp<int64_t>(most * warps / exchange.slot_tokens, 1, whole));
    const int64_t items = int64_t{exchange.slot_tokens} * work.parts;
    return launch<dispatch>(work, static_cast<int32_t>(std::min(most, ceiling(items, warps))), kDispatchThreads,
                            stream);
}

int run_combine(const Combine& asked, DType dtype, void* stream) {
    const Exchange& exchange = asked.exchange;
    if (exchange.slot_tokens == 0) return cudaSuccess;
    const int64_t vecs = int64_t{exchange.tokens} * exchange.row_vecs;
    const int64_t num_ctas = std::clamp<int64_t>(ceiling(vecs, kCombineThreads), 1, 2 * count_sms());
    if (dtype == DType::kBFloat16) return launch_combine<__nv_bfloat16>(asked, static_cast<int32_t>(num_ctas), stream);
    if (dtype == DType::kFloat16) return launch_combine<__half>(asked, static_cast<int32_t>(num_ctas), stream);
    return cudaErrorInvalidValue;
}

}  // namespace weave::moe
