// The launch of the kernels of wide.cuh, for one type.
#pragma once

#include "experts/launch_clusters.cuh"
#include "experts/wide.cuh"

namespace weave::moe_experts {

template <typename T, Product kProduct>
int launch_wide_gemm(const Work& work, int32_t num_ctas, void* stream) {
    return launch_clusters<WideShared>(wide_grouped_gemm<T, kProduct>, work, num_ctas, stream);
}

template <typename T, Product kProduct>
int launch_wide_gemm(const RangedWork& work, int32_t num_ctas, void* stream) {
    return launch_clusters<WideShared>(ranged_wide_grouped_gemm<T, kProduct>, work, num_ctas, stream);
}

template <typename T, class W>
int launch_wide(const W& work, Product product, int32_t num_ctas, void* stream) {
    switch (product) {
        case Product::kGated:
            return launch_wide_gemm<T, Product::kGated>(work, num_ctas, stream);
        case Product::kPlain:
            return launch_wide_gemm<T, Product::kPlain>(work, num_ctas, stream);
        case Product::kDown:
            return launch_wide_gemm<T, Product::kDown>(work, num_ctas, stream);
        case Product::kPairs:    // of transposed weights
        case Product::kToRanks:  // of sharded tokens
            return cudaErrorInvalidValue;
    }
    return cudaErrorInvalidValue;
}

}  // namespace weave::moe_experts
