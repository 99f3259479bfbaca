// The launch of the kernels, for one type.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "moe_experts/few_rows.cuh"
#include "moe_experts/grouped.cuh"

namespace weave::moe_experts {

// In clusters of `cluster_ctas`; launched while the kernel ahead still runs, and waits for it on the device.
class Launch {
  public:
    Launch(int32_t cluster_ctas, int32_t num_threads, int32_t num_bytes, void* stream) {
        attributes_[0].id = cudaLaunchAttributeClusterDimension;
        attributes_[0].val.clusterDim = {static_cast<uint32_t>(cluster_ctas), 1, 1};
        attributes_[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes_[1].val.programmaticStreamSerializationAllowed = 1;
        config_.blockDim = num_threads;
        config_.dynamicSmemBytes = num_bytes;
        config_.stream = static_cast<cudaStream_t>(stream);
        config_.attrs = attributes_;
    }
    template <class Kernel>
    cudaError_t allow_memory(Kernel kernel) const {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(config_.dynamicSmemBytes));
    }
    // How many clusters the GPU holds at a time: less than its SMs by the size of a cluster, as a cluster lies in a
    // GPC.
    template <class Kernel>
    cudaError_t most_clusters(Kernel kernel, int32_t num_ctas, int* found) {
        config_.gridDim = num_ctas;
        config_.numAttrs = 1;  // the cluster
        return cudaOccupancyMaxActiveClusters(found, kernel, &config_);
    }
    template <class Kernel>
    cudaError_t run(Kernel kernel, int32_t num_ctas, const Work& work) {
        config_.gridDim = num_ctas;
        config_.numAttrs = 2;
        return cudaLaunchKernelEx(&config_, kernel, work);
    }

  private:
    cudaLaunchAttribute attributes_[2]{};
    cudaLaunchConfig_t config_{};
};

template <class Kernel>
int launch(Kernel kernel, const Work& work, int32_t num_ctas, void* stream) {
    constexpr int32_t kBytes = sizeof(Shared) + gemm::kSharedAlignment;
    static_assert(kBytes <= 227 * 1024);
    Launch how(gemm::kClusterCtas, gemm::kThreads, kBytes, stream);
    const cudaError_t error = how.allow_memory(kernel);
    return error != cudaSuccess ? error : how.run(kernel, num_ctas, work);
}

// As many clusters as run at a time.
template <class Kernel>
int launch_few(Kernel kernel, const Work& work, int32_t splits, void* stream) {
    constexpr int32_t kBytes = sizeof(FewShared) + gemm::kSharedAlignment;
    static_assert(kBytes <= 227 * 1024);
    int device = 0, num_sms = 0, num_clusters = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    Launch how(splits, kFewThreads, kBytes, stream);
    if (error == cudaSuccess) error = how.allow_memory(kernel);
    if (error == cudaSuccess) error = how.most_clusters(kernel, num_sms / splits * splits, &num_clusters);
    if (error != cudaSuccess) return error;
    return how.run(kernel, std::max(num_clusters, 1) * splits, work);
}

template <typename T>
int launch_product(const Work& work, Product product, int32_t num_ctas, void* stream) {
    switch (product) {
        case Product::kGated:
            return launch(grouped_gemm<T, Product::kGated>, work, num_ctas, stream);
        case Product::kPlain:
            return launch(grouped_gemm<T, Product::kPlain>, work, num_ctas, stream);
        case Product::kDown:
            return launch(grouped_gemm<T, Product::kDown>, work, num_ctas, stream);
    }
    return cudaErrorInvalidValue;
}

template <typename T>
int launch_few_product(const Work& work, Product product, int32_t splits, void* stream) {
    switch (product) {
        case Product::kGated:
            return launch_few(few_rows_gemm<T, Product::kGated>, work, splits, stream);
        case Product::kPlain:
            return launch_few(few_rows_gemm<T, Product::kPlain>, work, splits, stream);
        case Product::kDown:
            return launch_few(few_rows_gemm<T, Product::kDown>, work, splits, stream);
    }
    return cudaErrorInvalidValue;
}

}  // namespace weave::moe_experts
