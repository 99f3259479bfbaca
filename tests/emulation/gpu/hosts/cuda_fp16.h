// Stands in for CUDA's header: names that kernels of other types mention.
#pragma once

#include "ranks.h"

struct __half {
    uint16_t bits;
    explicit operator float() const { throw std::runtime_error("fp16 is not emulated"); }
};

struct __half2 {
    __half x, y;
};

inline float2 __half22float2(const __half2&) {
    throw std::runtime_error("fp16 is not emulated");
}

inline __half2 __floats2half2_rn(float, float) {
    throw std::runtime_error("fp16 is not emulated");
}
