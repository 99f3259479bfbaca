// The launch of the kernels, for one type.
#pragma once

#include <type_traits>

#include "experts/grouped.cuh"
#include "experts/launch_clusters.cuh"

namespace weave::moe_experts {

template <typename T, Product kProduct, bool kTransposed>
int launch_grouped(const Work& work, int32_t num_ctas, void* stream) {
    return launch_clusters<Shared>(grouped_gemm<T, kProduct, kTransposed>, work, num_ctas, stream);
}

template <typename T, Product kProduct, bool kTransposed>
int launch_grouped(const RangedWork& work, int32_t num_ctas, void* stream) {
    return launch_clusters<Shared>(ranged_grouped_gemm<T, kProduct, kTransposed>, work, num_ctas, stream);
}

template <typename T, bool kTransposed, class W>
int launch_as(const W& work, Product product, int32_t num_ctas, void* stream) {
    switch (product) {
        case Product::kGated:
            return launch_grouped<T, Product::kGated, kTransposed>(work, num_ctas, stream);
        case Product::kPairs:
            // Where the depth is contiguous, gates and ups are found apart by their stride.
            if constexpr (kTransposed) return launch_grouped<T, Product::kPairs, true>(work, num_ctas, stream);
            return cudaErrorInvalidValue;
        case Product::kPlain:
            return launch_grouped<T, Product::kPlain, kTransposed>(work, num_ctas, stream);
        case Product::kDown:
            return launch_grouped<T, Product::kDown, kTransposed>(work, num_ctas, stream);
        case Product::kToRanks:
            if constexpr (std::is_same_v<W, Work>)
                return launch_grouped<T, Product::kToRanks, kTransposed>(work, num_ctas, stream);
            return cudaErrorInvalidValue;
    }
    return cudaErrorInvalidValue;
}

template <typename T, class W>
int launch_product(const W& work, Product product, bool transposed, int32_t num_ctas, void* stream) {
    return transposed ? launch_as<T, true>(work, product, num_ctas, stream)
                      : launch_as<T, false>(work, product, num_ctas, stream);
}

}  // namespace weave::moe_experts
