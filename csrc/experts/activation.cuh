// What stands between an expert's two GEMMs, on a thread's sums in registers, in fp32.
#pragma once

#include <cstdint>

namespace weave::moe_experts {

// By the words of ops/experts/call.py, in their order.
enum class Activation : int32_t {
    kSilu = 0,
    kGelu = 1,
    kGeluTanh = 2,
    kRelu = 3,
    kReluSquared = 4,
    kClampedSwish = 5,  // of gate and up together
};

// x / (1 + exp(-z)). exp(-z) may become infinite: the quotient is zero then.
__device__ __forceinline__ float times_sigmoid(float x, float z) {
    return __fdividef(x, 1.0f + __expf(-z));
}

// NaN stays NaN: comparisons with it are false.
__device__ __forceinline__ float cut_above(float x, float limit) {
    return x > limit ? limit : x;
}
__device__ __forceinline__ float cut_below(float x, float limit) {
    return x < limit ? limit : x;
}

template <Activation kWhich>
__device__ __forceinline__ float activated(float x) {
    if constexpr (kWhich == Activation::kSilu) return times_sigmoid(x, x);
    if constexpr (kWhich == Activation::kGelu) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    // 0.5 * (1 + tanh(z)) is sigmoid(2 * z).
    if constexpr (kWhich == Activation::kGeluTanh)
        return times_sigmoid(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
    const float positive = cut_below(x, 0.0f);
    return kWhich == Activation::kRelu ? positive : positive * positive;
}

template <Activation kWhich, int kCount>
__device__ __forceinline__ void activate_each(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        x[i] = activated<kWhich>(x[i]);
}

// The first half of `x` is of gates, the second of the same columns' ups: results replace gates.
template <Activation kWhich, int kCount>
__device__ __forceinline__ void activate_gates(float (&x)[kCount], float alpha) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
        const float gate = x[i], up = x[kCount / 2 + i];
        if constexpr (kWhich == Activation::kClampedSwish) {
            x[i] = (up + 1.0f) * times_sigmoid(gate, alpha * gate);
        } else {
            x[i] = activated<kWhich>(gate) * up;
        }
    }
}

// Gates from above, ups on both sides.
template <int kCount>
__device__ __forceinline__ void cut_gates(float (&x)[kCount], float limit) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
        x[i] = cut_above(x[i], limit);
        x[kCount / 2 + i] = cut_below(cut_above(x[kCount / 2 + i], limit), -limit);
    }
}

template <Activation kWhich, bool kGated, int kCount>
__device__ __forceinline__ void activate_as(float (&x)[kCount], float alpha) {
    if constexpr (kGated) {
        activate_gates<kWhich>(x, alpha);
    } else if constexpr (kWhich != Activation::kClampedSwish) {
        activate_each<kWhich>(x);
    }
}

// All threads of a warp group have the same `which`.
template <bool kGated, int kCount>
__device__ __forceinline__ void activate(Activation which, float (&x)[kCount], float alpha) {
    switch (which) {
        case Activation::kSilu:
            return activate_as<Activation::kSilu, kGated>(x, alpha);
        case Activation::kGelu:
            return activate_as<Activation::kGelu, kGated>(x, alpha);
        case Activation::kGeluTanh:
            return activate_as<Activation::kGeluTanh, kGated>(x, alpha);
        case Activation::kRelu:
            return activate_as<Activation::kRelu, kGated>(x, alpha);
        case Activation::kReluSquared:
            return activate_as<Activation::kReluSquared, kGated>(x, alpha);
        case Activation::kClampedSwish:
            return activate_as<Activation::kClampedSwish, kGated>(x, alpha);
    }
}

}  // namespace weave::moe_experts
