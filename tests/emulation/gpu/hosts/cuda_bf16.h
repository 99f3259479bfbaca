// Stands in for CUDA's header: what rows of bf16 are made with.
#pragma once

#include "ranks.h"

struct __nv_bfloat16 {
    uint16_t bits;
    explicit operator float() const { return __uint_as_float(uint32_t{bits} << 16); }
};

struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

// To the nearest, ties to even; a NaN stays one.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const uint32_t bits = __float_as_uint(value);
    if (value != value) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
