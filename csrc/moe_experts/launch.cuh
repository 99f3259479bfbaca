// The launch of the kernels, for one type.
#pragma once

#include <cuda_runtime.h>

#include "moe_experts/grouped.cuh"

namespace weave::moe_experts {

// Launched while the kernel ahead still runs, and waits for it on the device.
template <class Kernel>
int launch(Kernel kernel, const Work& work, int32_t num_ctas, void* stream) {
    constexpr int32_t kBytes = sizeof(Shared) + gemm::kSharedAlignment;
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

template <typename T, bool kTransposed>
int launch_as(const Work& work, Product product, int32_t num_ctas, void* stream) {
    switch (product) {
        case Product::kGated:
            return launch(grouped_gemm<T, Product::kGated, kTransposed>, work, num_ctas, stream);
        case Product::kPairs:
            // Where the depth lies side by side, gates and ups are found apart by their stride.
            if constexpr (kTransposed) return launch(grouped_gemm<T, Product::kPairs, true>, work, num_ctas, stream);
            return cudaErrorInvalidValue;
        case Product::kPlain:
            return launch(grouped_gemm<T, Product::kPlain, kTransposed>, work, num_ctas, stream);
        case Product::kDown:
            return launch(grouped_gemm<T, Product::kDown, kTransposed>, work, num_ctas, stream);
        case Product::kHome:
            return launch(grouped_gemm<T, Product::kHome, kTransposed>, work, num_ctas, stream);
    }
    return cudaErrorInvalidValue;
}

template <typename T>
int launch_product(const Work& work, Product product, bool transposed, int32_t num_ctas, void* stream) {
    return transposed ? launch_as<T, true>(work, product, num_ctas, stream)
                      : launch_as<T, false>(work, product, num_ctas, stream);
}

}  // namespace weave::moe_experts
