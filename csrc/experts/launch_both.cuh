// The launch of the kernels of both.cuh, for one type.
#pragma once

#include "experts/both.cuh"
#include "experts/launch_clusters.cuh"

namespace weave::moe_experts {

template <typename T, bool kTransposed>
int launch_both_as(const BothWork& work, Product first, int32_t num_ctas, void* stream) {
    switch (first) {
        case Product::kGated:
            return launch_clusters<BothShared>(both_gemms<T, Product::kGated, kTransposed>, work, num_ctas, stream);
        case Product::kPairs:
            if constexpr (kTransposed)
                return launch_clusters<BothShared>(both_gemms<T, Product::kPairs, true>, work, num_ctas, stream);
            return cudaErrorInvalidValue;
        case Product::kPlain:
            return launch_clusters<BothShared>(both_gemms<T, Product::kPlain, kTransposed>, work, num_ctas, stream);
        case Product::kDown:
        case Product::kToRanks:
            return cudaErrorInvalidValue;
    }
    return cudaErrorInvalidValue;
}

template <typename T>
int launch_both(const BothWork& work, Product first, bool transposed, int32_t num_ctas, void* stream) {
    return transposed ? launch_both_as<T, true>(work, first, num_ctas, stream)
                      : launch_both_as<T, false>(work, first, num_ctas, stream);
}

}  // namespace weave::moe_experts
