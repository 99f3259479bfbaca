// A launch of a grid of clusters with dynamic shared memory S.
#pragma once

#include <cuda_runtime.h>

#include "experts/work.cuh"
#include "gemm/mainloop.cuh"

namespace weave::moe_experts {

// Launched while the kernel ahead still runs, and waits for it on the device.
template <class S, class W>
int launch_clusters(void (*kernel)(W), const W& work, int32_t num_ctas, void* stream) {
    constexpr int32_t kBytes = sizeof(S) + gemm::kSharedAlignment;
    static_assert(kBytes <= 227 * 1024);
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {gemm::kClusterCtas, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = num_ctas;
    config.blockDim = gemm::kThreads;
    config.dynamicSmemBytes = kBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, work);
}

}  // namespace weave::moe_experts
