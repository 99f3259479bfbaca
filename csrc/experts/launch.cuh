// The launch of the kernels, for one type.
#pragma once

#include "experts/grouped.cuh"
#include "experts/launch_clusters.cuh"

namespace weave::moe_experts {

template <typename T, bool kTransposed>
int launch_as(const Work& work, Product product, int32_t num_ctas, void* stream) {
    switch (product) {
        case Product::kGated:
            return launch_clusters<Shared>(grouped_gemm<T, Product::kGated, kTransposed>, work, num_ctas, stream);
        case Product::kPairs:
            // Where the depth lies side by side, gates and ups are found apart by their stride.
            if constexpr (kTransposed)
                return launch_clusters<Shared>(grouped_gemm<T, Product::kPairs, true>, work, num_ctas, stream);
            return cudaErrorInvalidValue;
        case Product::kPlain:
            return launch_clusters<Shared>(grouped_gemm<T, Product::kPlain, kTransposed>, work, num_ctas, stream);
        case Product::kDown:
            return launch_clusters<Shared>(grouped_gemm<T, Product::kDown, kTransposed>, work, num_ctas, stream);
        case Product::kHome:
            return launch_clusters<Shared>(grouped_gemm<T, Product::kHome, kTransposed>, work, num_ctas, stream);
    }
    return cudaErrorInvalidValue;
}

template <typename T>
int launch_product(const Work& work, Product product, bool transposed, int32_t num_ctas, void* stream) {
    return transposed ? launch_as<T, true>(work, product, num_ctas, stream)
                      : launch_as<T, false>(work, product, num_ctas, stream);
}

}  // namespace weave::moe_experts
