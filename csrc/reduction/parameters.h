// The parameters of a reduction's calls as Python keeps them from one call to the next: addresses that hardly change.
#pragma once

#include <cstdint>

#include "reduction/gpu.h"

namespace weave {

// 0: there is none. Bit i of `fp32`: the i-th of them is fp32, else of the activations' type.
struct ReductionParameters {
    uintptr_t reduced_bias;
    uintptr_t post_weight;
    uintptr_t post_bias;
    uintptr_t weight;
    uintptr_t bias;
    uintptr_t scale_value;  // on GPUs only, as the next one
    uintptr_t quant_scale;
    uint32_t fp32;
};

namespace gpu {

inline void set_parameters(Call& call, const ReductionParameters& given) {
    const auto parameter = [&](uintptr_t address, int bit) {
        return Parameter{reinterpret_cast<const void*>(address), static_cast<int32_t>(given.fp32 >> bit & 1)};
    };
    call.reduced_bias = parameter(given.reduced_bias, 0);
    call.post.weight = parameter(given.post_weight, 1);
    call.post.bias = parameter(given.post_bias, 2);
    call.norm.weight = parameter(given.weight, 3);
    call.norm.bias = parameter(given.bias, 4);
    call.scale_value = parameter(given.scale_value, 5);
    call.quant_scale = parameter(given.quant_scale, 6);
}

}  // namespace gpu
}  // namespace weave
