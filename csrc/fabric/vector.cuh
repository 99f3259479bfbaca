// What a thread moves at once: 4, 8 or 16 bytes, and 16 bytes of T as floats.
//
//   load, store                   memory without concurrent writers
//   load_relaxed, store_relaxed   at system scope; each 4-byte word arrives whole: words that carry their own arrival
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace weave::fabric {

template <int kWords>
struct alignas(4 * kWords) Vec {
    uint32_t word[kWords];
};
using Vec4 = Vec<1>;
using Vec8 = Vec<2>;
using Vec16 = Vec<4>;

__device__ __forceinline__ Vec16 load(const void* from) {
    Vec16 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store(void* to, const Vec16& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
                 "r"(v.word[3])
                 : "memory");
}

__device__ __forceinline__ void store(void* to, const Vec8& v) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]) : "memory");
}

__device__ __forceinline__ void store(void* to, const Vec4& v) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(v.word[0]) : "memory");
}

__device__ __forceinline__ void load_relaxed(Vec16& v, const void* from) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from)
                 : "memory");
}

__device__ __forceinline__ void load_relaxed(Vec8& v, const void* from) {
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.word[0]), "=r"(v.word[1])
                 : "l"(from)
                 : "memory");
}

__device__ __forceinline__ void load_relaxed(Vec4& v, const void* from) {
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v.word[0]) : "l"(from) : "memory");
}

__device__ __forceinline__ void store_relaxed(void* to, const Vec16& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

__device__ __forceinline__ void store_relaxed(void* to, const Vec8& v) {
    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]) : "memory");
}

__device__ __forceinline__ void store_relaxed(void* to, const Vec4& v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v.word[0]) : "memory");
}

// The same address. The compiler makes it at this place and keeps it, where else it might make it anew, and under each
// of several conditions, when it is used.
template <typename T>
__device__ __forceinline__ T* computed_here(T* at) {
    asm volatile("" : "+l"(at));
    return at;
}

template <typename T>
constexpr int kElements = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ void widen(const Vec16& v, float (&out)[4], const float*) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[i] = __uint_as_float(v.word[i]);
}

__device__ __forceinline__ void widen(const Vec16& v, float (&out)[8], const __nv_bfloat16*) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[2 * i] = __uint_as_float(v.word[i] << 16);
        out[2 * i + 1] = __uint_as_float(v.word[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ void widen(const Vec16& v, float (&out)[8], const __half*) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&v.word[i]));
        out[2 * i] = pair.x;
        out[2 * i + 1] = pair.y;
    }
}

__device__ __forceinline__ Vec16 narrow(const float (&x)[4], const float*) {
    return {{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])}};
}

__device__ __forceinline__ Vec16 narrow(const float (&x)[8], const __nv_bfloat16*) {
    Vec16 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        v.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return v;
}

__device__ __forceinline__ Vec16 narrow(const float (&x)[8], const __half*) {
    Vec16 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        v.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return v;
}

}  // namespace weave::fabric
