// What the kernel of few rows needs of sm_90 beyond copies.cuh: multiplies of few columns (wgmma), matrices stored
// across, and shared memory of a cluster's other CTAs.
#pragma once

#include "gemm/mainloop.cuh"
#include "moe_experts/copies.cuh"

namespace weave::moe_experts {

// CTAs of the cluster.
__device__ __forceinline__ uint32_t cluster_size() {
    uint32_t size;
    asm volatile("mov.u32 %0, %cluster_nctarank;" : "=r"(size));
    return size;
}

// Not from the L1: the kernel that wrote it may have ended after this one began.
__device__ __forceinline__ int4 read_record(const int32_t* from) {
    int4 record;
    asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(record.x), "=r"(record.y), "=r"(record.z), "=r"(record.w)
                 : "l"(from)
                 : "memory");
    return record;
}

// The box of `map` at (`x`, `y`, `z`), x along rows; what is beyond the tensor arrives as zeros.
__device__ __forceinline__ void load_box_here(void* to, const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                                              uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(gemm::shared_address(to)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(gemm::shared_address(barrier))
        : "memory");
}

// All threads that multiply, and no others.
__device__ __forceinline__ void await_consumers() {
    asm volatile("bar.sync 1, 128;" ::: "memory");
}

// Two 8 x 8 matrices of 2-byte elements, one in each register of all lanes, columns as rows: lane 8 i + j, of the first
// 16, has the address of column j of matrix i.
__device__ __forceinline__ void store_columns_as_rows(uint32_t to, uint32_t m0, uint32_t m1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(m0), "r"(m1)
                 : "memory");
}

// At the same barrier of CTA `cta`, releasing at the scope of the cluster all that this thread wrote and read, and what
// other lanes did before a __syncwarp.
__device__ __forceinline__ void release_to(uint64_t* barrier, uint32_t cta) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(gemm::shared_address(barrier)),
        "r"(cta)
        : "memory");
}

// What arrivals by release_to() released can be read, and written again, afterwards.
__device__ __forceinline__ void acquire_phase(uint64_t* barrier, uint32_t parity) {
    uint32_t done = 0;
    while (done == 0) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(gemm::shared_address(barrier)), "r"(parity)
            : "memory");
    }
}

// What lies at the same place in CTA `cta`'s shared memory.
__device__ __forceinline__ float read_of(const float* from, uint32_t cta) {
    float value;
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %1, %2;\nld.shared::cluster.f32 %0, [remote];\n}"
        : "=f"(value)
        : "r"(gemm::shared_address(from)), "r"(cta)
        : "memory");
    return value;
}

// clang-format off
#define WEAVE_SUMS4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WEAVE_MULTIPLY(COLUMNS, NAME, REGISTERS, A, B, P, ...)                                              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." NAME "." NAME " {" REGISTERS "}, " A ", " B \
                 ", p, 1, 1, 0, 0;\n}\n"                                                                          \
                 : __VA_ARGS__                                                                                    \
                 : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)))
#define WEAVE_MULTIPLY_FEW(TYPE, NAME)                                                                            \
    template <int kColumns, int kFirst, int kCount>                                                               \
    __device__ __forceinline__ void multiply_few(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate,     \
                                                 const TYPE*) {                                                   \
        static_assert(kColumns % 8 == 0 && kColumns <= 32 && kFirst + kColumns / 2 <= kCount);                    \
        if constexpr (kColumns == 8)                                                                              \
            WEAVE_MULTIPLY("8", NAME, "%0, %1, %2, %3", "%4", "%5", "%6", WEAVE_SUMS4(d, kFirst));          \
        else if constexpr (kColumns == 16)                                                                        \
            WEAVE_MULTIPLY("16", NAME, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10",                 \
                           WEAVE_SUMS4(d, kFirst), WEAVE_SUMS4(d, kFirst + 4));                                   \
        else if constexpr (kColumns == 24)                                                                        \
            WEAVE_MULTIPLY("24", NAME, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11", "%12", "%13",    \
                           "%14", WEAVE_SUMS4(d, kFirst), WEAVE_SUMS4(d, kFirst + 4), WEAVE_SUMS4(d, kFirst + 8)); \
        else                                                                                                      \
            WEAVE_MULTIPLY("32", NAME,                                                                      \
                           "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", "%16", "%17",  \
                           "%18", WEAVE_SUMS4(d, kFirst), WEAVE_SUMS4(d, kFirst + 4), WEAVE_SUMS4(d, kFirst + 8),  \
                           WEAVE_SUMS4(d, kFirst + 12));                                                          \
    }
// d[kFirst] and on = a * b^T of 64 x kColumns, plus what is there if `accumulate`. The last argument is a type.
WEAVE_MULTIPLY_FEW(__nv_bfloat16, "bf16")
WEAVE_MULTIPLY_FEW(__half, "f16")
#undef WEAVE_MULTIPLY_FEW
#undef WEAVE_MULTIPLY
#undef WEAVE_SUMS4
// clang-format on

}  // namespace weave::moe_experts
