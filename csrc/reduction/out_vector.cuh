// A finished row as it is written: in the activations' type, in fp32, or in e4m3.
#pragma once

#include <cuda_fp8.h>

#include "fabric/ll_packet.cuh"
#include "fabric/vector.cuh"
#include "reduction/gpu.h"

namespace weave::gpu {

using fabric::kElements;
using fabric::Vec16;

// To T and back, in pairs: conversions one by one run at a quarter of the rate.
template <typename T>
__device__ __forceinline__ void round_to(float (&x)[kElements<T>]) {
    fabric::widen(fabric::narrow(x, static_cast<const T*>(nullptr)), x, static_cast<const T*>(nullptr));
}

// One thread's normalized vector as bytes: 16 for the activations' type, 32 for fp32 from 2-byte activations, 8 for
// e4m3.
struct OutVector {
    Vec16 part[2];
};

__device__ __forceinline__ uint32_t fp8_word(float a, float b, float c, float d) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

// `inverse` of the scale, e4m3 only; then x is rounded to T first. No word of it is empty in the sense of LL packets.
template <typename T, bool kPlain = false>
__device__ __forceinline__ OutVector out_vector(float (&x)[kElements<T>], OutKind kind, float inverse) {
    constexpr int E = kElements<T>;
    OutVector out{};
    if (kPlain || kind == OutKind::kSame) {
        out.part[0] = fabric::narrow(x, static_cast<const T*>(nullptr));
    } else if (kind == OutKind::kFloat32) {
#pragma unroll
        for (int i = 0; i < E; ++i)
            out.part[i / 4].word[i % 4] = __float_as_uint(x[i]);
    } else {
        round_to<T>(x);
#pragma unroll
        for (int i = 0; i < E; i += 4)
            out.part[0].word[i / 4] =
                fp8_word(x[i] * inverse, x[i + 1] * inverse, x[i + 2] * inverse, x[i + 3] * inverse);
    }
    out.part[0] = fabric::without_empty(out.part[0]);
    if (!kPlain) out.part[1] = fabric::without_empty(out.part[1]);
    return out;
}

// Bytes of it.
template <typename T, bool kPlain = false>
__device__ __forceinline__ int32_t out_vector_bytes(OutKind kind) {
    return kPlain || kind == OutKind::kSame ? 16 : kElements<T> * (kind == OutKind::kFloat32 ? 4 : 1);
}

// The pieces of 4, 8 or 16 bytes that `bytes` of it are moved in: use(piece, where it begins). The one ladder of
// widths.
template <class Use>
__device__ __forceinline__ void for_each_piece(OutVector& out, int32_t bytes, const Use& use) {
    if (bytes >= 16) {
        use(out.part[0], 0);
        if (bytes == 32) use(out.part[1], 16);
    } else if (bytes == 8) {
        fabric::Vec8 half{{out.part[0].word[0], out.part[0].word[1]}};
        use(half, 0);
        out.part[0].word[0] = half.word[0];
        out.part[0].word[1] = half.word[1];
    } else {
        fabric::Vec4 word{{out.part[0].word[0]}};
        use(word, 0);
        out.part[0].word[0] = word.word[0];
    }
}

__device__ __forceinline__ void store_out(char* to, OutVector out, int32_t bytes) {
    for_each_piece(out, bytes, [&](const auto& piece, int32_t at) { fabric::store(to + at, piece); });
}

}  // namespace weave::gpu
