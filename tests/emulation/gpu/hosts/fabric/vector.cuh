// Stands in for csrc/fabric/vector.cuh, whose loads and stores are single instructions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace weave::fabric {

template <int kWords>
struct alignas(4 * kWords) Vec {
    uint32_t word[kWords];
};
using Vec4 = Vec<1>;
using Vec8 = Vec<2>;
using Vec16 = Vec<4>;

inline void expect_readable(const void* from) {
    if (emulated::world->reads_own_only && emulated::is_of_another(from))
        throw std::runtime_error("a load from another rank's arena");
}

inline Vec16 load(const void* from) {
    expect_readable(from);
    Vec16 v;
    memcpy(&v, from, sizeof v);
    return v;
}

// Into the arena of another rank each 8 bytes go by themselves. The thread's fence before is no longer behind all.
template <int kWords>
void store(void* to, const Vec<kWords>& v) {
    if (!emulated::is_of_another(to)) {
        memcpy(to, &v, sizeof v);
        return;
    }
    static_assert(kWords % 2 == 0 || kWords == 1);
    emulated::running().has_fenced = false;
    for (int i = 0; i + 1 < kWords; i += 2)
        emulated::send({static_cast<uint64_t*>(to) + i / 2, nullptr, uint64_t{v.word[i + 1]} << 32 | v.word[i]});
}

template <int kWords>
void load_relaxed(Vec<kWords>& v, const void* from) {
    expect_readable(from);
    memcpy(&v, from, sizeof v);
}

template <int kWords>
void store_relaxed(void* to, const Vec<kWords>& v) {
    memcpy(to, &v, sizeof v);
}

template <typename T>
T* computed_here(T* at) {
    return at;
}

template <typename T>
constexpr int kElements = 16 / static_cast<int>(sizeof(T));

inline void widen(const Vec16& v, float (&out)[4], const float*) {
    memcpy(out, &v, sizeof v);
}

inline void widen(const Vec16& v, float (&out)[8], const __nv_bfloat16*) {
    __nv_bfloat16 in[8];
    memcpy(in, &v, sizeof v);
    for (int i = 0; i < 8; ++i)
        out[i] = static_cast<float>(in[i]);
}

inline Vec16 narrow(const float (&x)[4], const float*) {
    Vec16 v;
    memcpy(&v, x, sizeof v);
    return v;
}

inline Vec16 narrow(const float (&x)[8], const __nv_bfloat16*) {
    __nv_bfloat16 out[8];
    for (int i = 0; i < 8; ++i)
        out[i] = __float2bfloat16_rn(x[i]);
    Vec16 v;
    memcpy(&v, out, sizeof v);
    return v;
}

}  // namespace weave::fabric
