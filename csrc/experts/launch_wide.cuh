// The launch of the kernels of wide.cuh, for one type.
#pragma once

#include "experts/launch_clusters.cuh"
#include "experts/wide.cuh"

namespace weave::moe_experts {

template <typename T>
int launch_wide(const Work& work, Product product, int32_t num_ctas, void* stream) {
    switch (product) {
        case Product::kGated:
            return launch_clusters<WideShared>(wide_grouped_gemm<T, Product::kGated>, work, num_ctas, stream);
        case Product::kPlain:
            return launch_clusters<WideShared>(wide_grouped_gemm<T, Product::kPlain>, work, num_ctas, stream);
        case Product::kDown:
            return launch_clusters<WideShared>(wide_grouped_gemm<T, Product::kDown>, work, num_ctas, stream);
        case Product::kPairs:  // of transposed weights
        case Product::kHome:   // of sharded tokens
            return cudaErrorInvalidValue;
    }
    return cudaErrorInvalidValue;
}

}  // namespace weave::moe_experts
