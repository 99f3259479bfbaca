// What becomes of a row once it is summed over ranks: bias, scale, norm, residual, rounding, norm, quantization. The
// row stays in the registers of the threads that share it, from the reduction to the last store.
#pragma once

#include "fabric/ll_packet.cuh"
#include "fabric/vector.cuh"
#include "reduction/gpu.h"
#include "reduction/out_vector.cuh"

namespace weave::gpu {

using fabric::kElements;
using fabric::Vec16;

constexpr float kLargestFp8 = 448.0f;

// What most calls are: the sum, a residual and an RMS norm with a weight in the activations' type. Code for such calls
// alone (`kPlain` below) is shorter, and so faster: a row's threads run through it once, at the pace at which it is
// fetched.
inline bool is_plain(const Call& call) {
    const GpuNorm& norm = call.norm;
    return norm.spec.kind == NormKind::kRms && norm.weight.data != nullptr && !norm.weight.is_fp32 &&
           norm.bias.data == nullptr && call.post.spec.kind == NormKind::kNone && call.reduced_bias.data == nullptr &&
           call.scale == 1.0f && call.scale_value.data == nullptr && call.out_kind == OutKind::kSame &&
           call.quant == QuantKind::kNone && call.residual != nullptr && call.normalized != nullptr && !call.sum_whole;
}

// The vectors of a row that a thread holds: first, first + stride, ...; those from `count` on do not exist.
struct Lanes {
    int32_t first;
    int32_t stride;
    int32_t count;
    __device__ __forceinline__ int32_t at(int32_t j) const { return first + j * stride; }
    __device__ __forceinline__ bool has(int32_t j) const { return at(j) < count; }
};

template <typename T>
__device__ __forceinline__ void load_parameter(const Parameter& parameter, int32_t vec, float (&out)[kElements<T>]) {
    constexpr int E = kElements<T>;
    if (parameter.is_fp32) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(parameter.data) + vec * E);
#pragma unroll
        for (int i = 0; i < E / 4; ++i) {
            const float4 part = __ldg(from + i);
            out[4 * i] = part.x;
            out[4 * i + 1] = part.y;
            out[4 * i + 2] = part.z;
            out[4 * i + 3] = part.w;
        }
    } else {
        const uint4 raw = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(parameter.data) + vec * E));
        fabric::widen(Vec16{{raw.x, raw.y, raw.z, raw.w}}, out, static_cast<const T*>(nullptr));
    }
}

template <typename T>
__device__ __forceinline__ float load_value(const Parameter& parameter) {
    if (parameter.is_fp32) return *static_cast<const float*>(parameter.data);
    return static_cast<float>(*static_cast<const T*>(parameter.data));
}

// A norm's weight. One in the activations' type is loaded while something else is waited for: by
// default the sum over the row's threads.
template <typename T, int kVecs, bool kPlain = false>
class LateWeight {
  public:
    __device__ __forceinline__ LateWeight() {}
    __device__ __forceinline__ void prepare(const GpuNorm& norm, const Lanes& lanes) {
        if (!kPlain && (norm.weight.data == nullptr || norm.weight.is_fp32)) return;
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
            if (lanes.has(j)) raw_[j] = __ldg(static_cast<const uint4*>(norm.weight.data) + lanes.at(j));
    }
    __device__ __forceinline__ void get(const GpuNorm& norm, const Lanes& lanes, int j,
                                        float (&out)[kElements<T>]) const {
        if (!kPlain && norm.weight.is_fp32) {
            load_parameter<T>(norm.weight, lanes.at(j), out);
        } else {
            fabric::widen(Vec16{{raw_[j].x, raw_[j].y, raw_[j].z, raw_[j].w}}, out, static_cast<const T*>(nullptr));
        }
    }

  private:
    uint4 raw_[kVecs];
};

// The same, loaded before: while the row's parts travel.
template <typename T, int kVecs, bool kPlain = false>
class EarlyWeight : public LateWeight<T, kVecs, kPlain> {
  public:
    __device__ __forceinline__ EarlyWeight(const GpuNorm& norm, const Lanes& lanes) {
        LateWeight<T, kVecs, kPlain>::prepare(norm, lanes);
    }
    __device__ __forceinline__ void prepare(const GpuNorm&, const Lanes&) {}
};

// The norm of a row in place. `team` sums over all threads that share the row.
template <typename T, bool kPlain = false, int kVecs, class Team, class Weight>
__device__ __forceinline__ void normalize(float (&x)[kVecs][kElements<T>], const GpuNorm& norm, int64_t hidden,
                                          const Lanes& lanes, Team& team, Weight& weight) {
    constexpr int E = kElements<T>;
    weight.prepare(norm, lanes);
    const float inverse = 1.0f / static_cast<float>(hidden);
    if (!kPlain && norm.spec.kind == NormKind::kLayer) {
        float total = 0;
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
#pragma unroll
            for (int i = 0; i < E; ++i)
                total += x[j][i];
        const float mean = team.sum(total) * inverse;
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
            if (lanes.has(j))
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] -= mean;
    }
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kVecs; ++j)
#pragma unroll
        for (int i = 0; i < E; ++i)
            squares += x[j][i] * x[j][i];
    const float factor = rsqrtf(team.sum(squares) * inverse + norm.spec.eps);
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
        if (!lanes.has(j)) continue;
#pragma unroll
        for (int i = 0; i < E; ++i)
            x[j][i] *= factor;
        if (norm.spec.cast_before_weight) round_to<T>(x[j]);
        float parameter[E];
        if (kPlain || norm.weight.data != nullptr) {
            weight.get(norm, lanes, j, parameter);
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] *= parameter[i] + norm.spec.weight_offset;
        }
        if (!kPlain && norm.bias.data != nullptr) {
            load_parameter<T>(norm.bias, lanes.at(j), parameter);
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] += parameter[i];
        }
    }
}

// From the sum over ranks on to the normalized row, left in `x`. `residual(j)` gives the row's own vectors if
// `adds_residual`. `take_sum(j, v)` gets the rounded sum: at once, so that it takes no registers during the norm.
template <typename T, bool kPlain = false, int kVecs, class Team, class Weight, class Residual, class TakeSum>
__device__ __forceinline__ void finish(float (&x)[kVecs][kElements<T>], const Call& call, const Lanes& lanes,
                                       bool adds_residual, const Residual& residual, Team& team, Weight& weight,
                                       const TakeSum& take_sum) {
    constexpr int E = kElements<T>;
    if (!kPlain && call.reduced_bias.data != nullptr) {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            float bias[E];
            load_parameter<T>(call.reduced_bias, lanes.at(j), bias);
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] += bias[i];
        }
    }
    float scale = call.scale;
    if (!kPlain && call.scale_value.data != nullptr) scale *= load_value<T>(call.scale_value);
    if (!kPlain && scale != 1.0f) {
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] *= scale;
    }
    if (!kPlain && call.post.spec.kind != NormKind::kNone) {
        LateWeight<T, kVecs> post_weight;
        normalize<T>(x, call.post, call.hidden, lanes, team, post_weight);
    }
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
        if (!lanes.has(j)) continue;
        if (adds_residual) {
            float other[E];
            fabric::widen(residual(j), other, static_cast<const T*>(nullptr));
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] += other[i];
        }
        Vec16 sum = fabric::narrow(x[j], static_cast<const T*>(nullptr));
        if (!kPlain && call.sum_whole) sum = fabric::without_empty(sum);
        fabric::widen(sum, x[j], static_cast<const T*>(nullptr));
        take_sum(j, sum);
    }
    if (kPlain || call.norm.spec.kind != NormKind::kNone)
        normalize<T, kPlain>(x, call.norm, call.hidden, lanes, team, weight);
}

// The scale of a row, and its inverse: e4m3 only.
template <typename T, bool kPlain = false, int kVecs, class Team>
__device__ __forceinline__ float inverse_scale(float (&x)[kVecs][kElements<T>], const Call& call, const Lanes& lanes,
                                               float& scale, Team& team) {
    scale = 1.0f;
    if (kPlain || call.quant == QuantKind::kNone) return 1.0f;
    if (call.quant == QuantKind::kStatic) {
        scale = load_value<T>(call.quant_scale);
        return 1.0f / scale;
    }
    float largest = 0;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
        if (!lanes.has(j)) continue;
        round_to<T>(x[j]);
#pragma unroll
        for (int i = 0; i < kElements<T>; ++i)
            largest = fmaxf(largest, fabsf(x[j][i]));
    }
    constexpr float kLeast = 1e-12f;
    scale = fmaxf(team.max(largest), kLeast) / kLargestFp8;
    return 1.0f / scale;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

}  // namespace weave::gpu
