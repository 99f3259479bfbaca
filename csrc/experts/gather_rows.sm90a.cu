#include <cuda_runtime.h>

#include <algorithm>

#include "experts/gather_rows.cuh"

namespace weave::moe_experts {
namespace {

__global__ void __launch_bounds__(kGatherCtaThreads) gather_expert_rows(const __grid_constant__ GatherWork work) {
    gather(work);
}

}  // namespace

int gather_rows(const RowsToGather& rows, const Routing& routing, void* stream) {
    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    const int64_t needed = (routing.num_rows + kGatherCtaThreads / 32 - 1) / (kGatherCtaThreads / 32);
    config.gridDim = static_cast<uint32_t>(std::min<int64_t>(needed, int64_t{num_sms} * kGatherCtasAnSm));
    config.blockDim = kGatherCtaThreads;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, gather_expert_rows, GatherWork{rows, routing.order, routing.table});
}

}  // namespace weave::moe_experts
