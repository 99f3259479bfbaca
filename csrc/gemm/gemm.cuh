// The kernel of gemm.h, and the launch of kernels that compute tiles.
#pragma once

#include "gemm/mainloop.cuh"

namespace weave::gemm {

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 1) compute(const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    auto& shared = shared_memory<kColumns>();
    init_pipeline(shared);
    await_cluster();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < 4) {
        leave_registers<kLoaderRegisters>();
        if (lane == 0 && warp == 0) load_tiles(work, shared, WholeA{work});
        if (lane == 0 && warp == 1) store_tiles(work, shared, [](const Tile&, int32_t) {});
    } else {
        take_registers<kConsumerRegisters>();
        compute_tiles<T>(work, shared, warp / 4 - 1);
    }
    __syncwarp();
    await_cluster();
#endif
}

template <int kColumns, class Kernel, class Argument>
int enqueue(Kernel kernel, const Argument& argument, int32_t num_ctas, void* stream) {
    constexpr int32_t kBytes = sizeof(Shared<kColumns>) + kSharedAlignment;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {kClusterCtas, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = num_ctas;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = kBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, argument);
}

// In gemm.dtypes.sm90a.cu.
template <typename T>
int enqueue_gemm(const Work& work, int32_t tile_columns, int32_t num_ctas, void* stream);

}  // namespace weave::gemm
