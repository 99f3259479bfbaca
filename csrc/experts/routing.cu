// The launch of the kernels that sort rows by expert.
#include <cuda_runtime.h>

#include "experts/routing.cuh"
#include "experts/routing.h"
#include "fabric/kernel_code.cuh"

namespace weave::moe_experts {
namespace {

template <int kBins>
__global__ void __launch_bounds__(kRoutingThreads, 1) count_rows_by_expert(const __grid_constant__ SortWork work) {
    __shared__ CountShared<kBins> shared;
    count_rows(work, shared);
}

template <int kBins>
__global__ void __launch_bounds__(kRoutingThreads, 1) place_rows_by_expert(const __grid_constant__ SortWork work) {
    __shared__ PlaceShared<kBins> shared;
    place_rows(work, shared);
}

// What is read ahead of the wait has to be there: only place_rows after count_rows is launched early.
template <int kBins>
int enqueue(const RowsToSort& asked, bool early, cudaStream_t stream) {
    const Chunks chunks = chunks_of(asked.num_rows, asked.num_experts);
    const SortWork work{asked, chunks.rows};
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<uint32_t>(chunks.count);
    config.blockDim = kRoutingThreads;
    config.stream = stream;
    config.attrs = &attribute;
    if (chunks.count > 1) {
        const cudaError_t error = cudaLaunchKernelEx(&config, count_rows_by_expert<kBins>, work);
        if (error != cudaSuccess) return error;
        int device = 0;
        cudaGetDevice(&device);
        const bool waits = fabric::code_of<place_rows_by_expert<kBins>>(device) == fabric::KernelCode::kSm90;
        config.numAttrs = early && waits ? 1 : 0;
    }
    return cudaLaunchKernelEx(&config, place_rows_by_expert<kBins>, work);
}

}  // namespace

int sort_rows(const RowsToSort& asked, bool early, void* stream) {
    const auto in = static_cast<cudaStream_t>(stream);
    if (asked.num_rows < 0 || asked.num_rows > INT32_MAX || asked.tile_rows < 1) return cudaErrorInvalidValue;
    if (asked.num_experts < 1 || asked.num_experts > kMostExperts) return cudaErrorInvalidValue;
    switch (bins_of(asked.num_experts)) {
        case 64:
            return enqueue<64>(asked, early, in);
        case 128:
            return enqueue<128>(asked, early, in);
        case 256:
            return enqueue<256>(asked, early, in);
        default:
            return enqueue<kMostExperts>(asked, early, in);
    }
}

}  // namespace weave::moe_experts
