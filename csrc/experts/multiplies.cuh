// Multiplies whose left operand is 64 rows of a weight and whose right one is 8 to 256 tokens (wgmma, sm_90a), and
// matrices that are stored across.
#pragma once

#include "gemm/mainloop.cuh"

namespace weave::moe_experts {

// The operand `step` instructions further along the depth. kTransposed: a row of 128 bytes is of one depth and 64 rows
// of the weight.
template <bool kTransposed>
__device__ __forceinline__ uint64_t along_depth(uint64_t operand, int step) {
    return kTransposed ? operand + step * (gemm::kInstructionK * 128 >> 4) : gemm::along_k(operand, step);
}

// Threads of consumer 0 or 1, and no others.
__device__ __forceinline__ void await_consumer(int32_t consumer) {
    asm volatile("bar.sync %0, 128;" ::"r"(consumer + 1) : "memory");
}

// Four 8 x 8 matrices of 2-byte elements, one in each register of all lanes, columns as rows: lane 8 i + j has the
// address of column j of matrix i.
__device__ __forceinline__ void store_columns_as_rows(uint32_t to, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

// clang-format off
#define WEAVE_SUMS4(d, i) \
    "+f"(d[kFirst + i]), "+f"(d[kFirst + i + 1]), "+f"(d[kFirst + i + 2]), "+f"(d[kFirst + i + 3])
#define WEAVE_REGISTERS8 "%0, %1, %2, %3"
#define WEAVE_REGISTERS16 WEAVE_REGISTERS8 ", %4, %5, %6, %7"
#define WEAVE_REGISTERS24 WEAVE_REGISTERS16 ", %8, %9, %10, %11"
#define WEAVE_REGISTERS32 WEAVE_REGISTERS24 ", %12, %13, %14, %15"
#define WEAVE_REGISTERS40 WEAVE_REGISTERS32 ", %16, %17, %18, %19"
#define WEAVE_REGISTERS48 WEAVE_REGISTERS40 ", %20, %21, %22, %23"
#define WEAVE_REGISTERS56 WEAVE_REGISTERS48 ", %24, %25, %26, %27"
#define WEAVE_REGISTERS64 WEAVE_REGISTERS56 ", %28, %29, %30, %31"
#define WEAVE_REGISTERS72 WEAVE_REGISTERS64 ", %32, %33, %34, %35"
#define WEAVE_REGISTERS80 WEAVE_REGISTERS72 ", %36, %37, %38, %39"
#define WEAVE_REGISTERS88 WEAVE_REGISTERS80 ", %40, %41, %42, %43"
#define WEAVE_REGISTERS96 WEAVE_REGISTERS88 ", %44, %45, %46, %47"
#define WEAVE_REGISTERS104 WEAVE_REGISTERS96 ", %48, %49, %50, %51"
#define WEAVE_REGISTERS112 WEAVE_REGISTERS104 ", %52, %53, %54, %55"
#define WEAVE_REGISTERS120 WEAVE_REGISTERS112 ", %56, %57, %58, %59"
#define WEAVE_REGISTERS128 WEAVE_REGISTERS120 ", %60, %61, %62, %63"
#define WEAVE_REGISTERS136 WEAVE_REGISTERS128 ", %64, %65, %66, %67"
#define WEAVE_REGISTERS144 WEAVE_REGISTERS136 ", %68, %69, %70, %71"
#define WEAVE_REGISTERS152 WEAVE_REGISTERS144 ", %72, %73, %74, %75"
#define WEAVE_REGISTERS160 WEAVE_REGISTERS152 ", %76, %77, %78, %79"
#define WEAVE_REGISTERS168 WEAVE_REGISTERS160 ", %80, %81, %82, %83"
#define WEAVE_REGISTERS176 WEAVE_REGISTERS168 ", %84, %85, %86, %87"
#define WEAVE_REGISTERS184 WEAVE_REGISTERS176 ", %88, %89, %90, %91"
#define WEAVE_REGISTERS192 WEAVE_REGISTERS184 ", %92, %93, %94, %95"
#define WEAVE_REGISTERS200 WEAVE_REGISTERS192 ", %96, %97, %98, %99"
#define WEAVE_REGISTERS208 WEAVE_REGISTERS200 ", %100, %101, %102, %103"
#define WEAVE_REGISTERS216 WEAVE_REGISTERS208 ", %104, %105, %106, %107"
#define WEAVE_REGISTERS224 WEAVE_REGISTERS216 ", %108, %109, %110, %111"
#define WEAVE_REGISTERS232 WEAVE_REGISTERS224 ", %112, %113, %114, %115"
#define WEAVE_REGISTERS240 WEAVE_REGISTERS232 ", %116, %117, %118, %119"
#define WEAVE_REGISTERS248 WEAVE_REGISTERS240 ", %120, %121, %122, %123"
#define WEAVE_REGISTERS256 WEAVE_REGISTERS248 ", %124, %125, %126, %127"
#define WEAVE_SUMS8(d) WEAVE_SUMS4(d, 0)
#define WEAVE_SUMS16(d) WEAVE_SUMS8(d), WEAVE_SUMS4(d, 4)
#define WEAVE_SUMS24(d) WEAVE_SUMS16(d), WEAVE_SUMS4(d, 8)
#define WEAVE_SUMS32(d) WEAVE_SUMS24(d), WEAVE_SUMS4(d, 12)
#define WEAVE_SUMS40(d) WEAVE_SUMS32(d), WEAVE_SUMS4(d, 16)
#define WEAVE_SUMS48(d) WEAVE_SUMS40(d), WEAVE_SUMS4(d, 20)
#define WEAVE_SUMS56(d) WEAVE_SUMS48(d), WEAVE_SUMS4(d, 24)
#define WEAVE_SUMS64(d) WEAVE_SUMS56(d), WEAVE_SUMS4(d, 28)
#define WEAVE_SUMS72(d) WEAVE_SUMS64(d), WEAVE_SUMS4(d, 32)
#define WEAVE_SUMS80(d) WEAVE_SUMS72(d), WEAVE_SUMS4(d, 36)
#define WEAVE_SUMS88(d) WEAVE_SUMS80(d), WEAVE_SUMS4(d, 40)
#define WEAVE_SUMS96(d) WEAVE_SUMS88(d), WEAVE_SUMS4(d, 44)
#define WEAVE_SUMS104(d) WEAVE_SUMS96(d), WEAVE_SUMS4(d, 48)
#define WEAVE_SUMS112(d) WEAVE_SUMS104(d), WEAVE_SUMS4(d, 52)
#define WEAVE_SUMS120(d) WEAVE_SUMS112(d), WEAVE_SUMS4(d, 56)
#define WEAVE_SUMS128(d) WEAVE_SUMS120(d), WEAVE_SUMS4(d, 60)
#define WEAVE_SUMS136(d) WEAVE_SUMS128(d), WEAVE_SUMS4(d, 64)
#define WEAVE_SUMS144(d) WEAVE_SUMS136(d), WEAVE_SUMS4(d, 68)
#define WEAVE_SUMS152(d) WEAVE_SUMS144(d), WEAVE_SUMS4(d, 72)
#define WEAVE_SUMS160(d) WEAVE_SUMS152(d), WEAVE_SUMS4(d, 76)
#define WEAVE_SUMS168(d) WEAVE_SUMS160(d), WEAVE_SUMS4(d, 80)
#define WEAVE_SUMS176(d) WEAVE_SUMS168(d), WEAVE_SUMS4(d, 84)
#define WEAVE_SUMS184(d) WEAVE_SUMS176(d), WEAVE_SUMS4(d, 88)
#define WEAVE_SUMS192(d) WEAVE_SUMS184(d), WEAVE_SUMS4(d, 92)
#define WEAVE_SUMS200(d) WEAVE_SUMS192(d), WEAVE_SUMS4(d, 96)
#define WEAVE_SUMS208(d) WEAVE_SUMS200(d), WEAVE_SUMS4(d, 100)
#define WEAVE_SUMS216(d) WEAVE_SUMS208(d), WEAVE_SUMS4(d, 104)
#define WEAVE_SUMS224(d) WEAVE_SUMS216(d), WEAVE_SUMS4(d, 108)
#define WEAVE_SUMS232(d) WEAVE_SUMS224(d), WEAVE_SUMS4(d, 112)
#define WEAVE_SUMS240(d) WEAVE_SUMS232(d), WEAVE_SUMS4(d, 116)
#define WEAVE_SUMS248(d) WEAVE_SUMS240(d), WEAVE_SUMS4(d, 120)
#define WEAVE_SUMS256(d) WEAVE_SUMS248(d), WEAVE_SUMS4(d, 124)
#define WEAVE_MULTIPLY(COLUMNS, NAME, REGISTERS, A, B, TRANSPOSED, ...)                                              \
    if constexpr (kColumns == COLUMNS)                                                                            \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." NAME "." NAME " {" REGISTERS "}, "   \
                     A ", " B ", p, 1, 1, " TRANSPOSED ", 0;\n}\n"                                                    \
                     : __VA_ARGS__                                                                                \
                     : "l"(weight), "l"(tokens))
#define WEAVE_MULTIPLIES(NAME, TRANSPOSED) \
    WEAVE_MULTIPLY(8, NAME, WEAVE_REGISTERS8, "%4", "%5", TRANSPOSED, WEAVE_SUMS8(d)); \
    WEAVE_MULTIPLY(16, NAME, WEAVE_REGISTERS16, "%8", "%9", TRANSPOSED, WEAVE_SUMS16(d)); \
    WEAVE_MULTIPLY(24, NAME, WEAVE_REGISTERS24, "%12", "%13", TRANSPOSED, WEAVE_SUMS24(d)); \
    WEAVE_MULTIPLY(32, NAME, WEAVE_REGISTERS32, "%16", "%17", TRANSPOSED, WEAVE_SUMS32(d)); \
    WEAVE_MULTIPLY(40, NAME, WEAVE_REGISTERS40, "%20", "%21", TRANSPOSED, WEAVE_SUMS40(d)); \
    WEAVE_MULTIPLY(48, NAME, WEAVE_REGISTERS48, "%24", "%25", TRANSPOSED, WEAVE_SUMS48(d)); \
    WEAVE_MULTIPLY(56, NAME, WEAVE_REGISTERS56, "%28", "%29", TRANSPOSED, WEAVE_SUMS56(d)); \
    WEAVE_MULTIPLY(64, NAME, WEAVE_REGISTERS64, "%32", "%33", TRANSPOSED, WEAVE_SUMS64(d)); \
    WEAVE_MULTIPLY(72, NAME, WEAVE_REGISTERS72, "%36", "%37", TRANSPOSED, WEAVE_SUMS72(d)); \
    WEAVE_MULTIPLY(80, NAME, WEAVE_REGISTERS80, "%40", "%41", TRANSPOSED, WEAVE_SUMS80(d)); \
    WEAVE_MULTIPLY(88, NAME, WEAVE_REGISTERS88, "%44", "%45", TRANSPOSED, WEAVE_SUMS88(d)); \
    WEAVE_MULTIPLY(96, NAME, WEAVE_REGISTERS96, "%48", "%49", TRANSPOSED, WEAVE_SUMS96(d)); \
    WEAVE_MULTIPLY(104, NAME, WEAVE_REGISTERS104, "%52", "%53", TRANSPOSED, WEAVE_SUMS104(d)); \
    WEAVE_MULTIPLY(112, NAME, WEAVE_REGISTERS112, "%56", "%57", TRANSPOSED, WEAVE_SUMS112(d)); \
    WEAVE_MULTIPLY(120, NAME, WEAVE_REGISTERS120, "%60", "%61", TRANSPOSED, WEAVE_SUMS120(d)); \
    WEAVE_MULTIPLY(128, NAME, WEAVE_REGISTERS128, "%64", "%65", TRANSPOSED, WEAVE_SUMS128(d)); \
    WEAVE_MULTIPLY(136, NAME, WEAVE_REGISTERS136, "%68", "%69", TRANSPOSED, WEAVE_SUMS136(d)); \
    WEAVE_MULTIPLY(144, NAME, WEAVE_REGISTERS144, "%72", "%73", TRANSPOSED, WEAVE_SUMS144(d)); \
    WEAVE_MULTIPLY(160, NAME, WEAVE_REGISTERS160, "%80", "%81", TRANSPOSED, WEAVE_SUMS160(d)); \
    WEAVE_MULTIPLY(176, NAME, WEAVE_REGISTERS176, "%88", "%89", TRANSPOSED, WEAVE_SUMS176(d)); \
    WEAVE_MULTIPLY(192, NAME, WEAVE_REGISTERS192, "%96", "%97", TRANSPOSED, WEAVE_SUMS192(d)); \
    WEAVE_MULTIPLY(208, NAME, WEAVE_REGISTERS208, "%104", "%105", TRANSPOSED, WEAVE_SUMS208(d)); \
    WEAVE_MULTIPLY(224, NAME, WEAVE_REGISTERS224, "%112", "%113", TRANSPOSED, WEAVE_SUMS224(d)); \
    WEAVE_MULTIPLY(240, NAME, WEAVE_REGISTERS240, "%120", "%121", TRANSPOSED, WEAVE_SUMS240(d)); \
    WEAVE_MULTIPLY(256, NAME, WEAVE_REGISTERS256, "%128", "%129", TRANSPOSED, WEAVE_SUMS256(d));
// d[kFirst] and on = weight * tokens^T of 64 x kColumns added to what is there; kTransposed: the weight's rows are
// side by side, else its depth does. The last argument is a type.
#define WEAVE_MULTIPLY_BY(TYPE, NAME)                                                                             \
    template <int kColumns, bool kTransposed, int kFirst, int kCount>                                                                         \
    __device__ __forceinline__ void multiply(float (&d)[kCount], uint64_t weight, uint64_t tokens,   \
                                             const TYPE*) {                                                       \
        static_assert(kColumns <= 256 && kColumns % (kColumns <= 144 ? 8 : 16) == 0 && kFirst + kColumns / 2 <= kCount);                                                     \
        if constexpr (kTransposed) {                                                                                  \
            WEAVE_MULTIPLIES(NAME, "1")                                                                           \
        } else {                                                                                                  \
            WEAVE_MULTIPLIES(NAME, "0")                                                                           \
        }                                                                                                         \
    }
WEAVE_MULTIPLY_BY(__nv_bfloat16, "bf16")
WEAVE_MULTIPLY_BY(__half, "f16")
#undef WEAVE_MULTIPLY_BY
#undef WEAVE_MULTIPLIES
#undef WEAVE_MULTIPLY
#undef WEAVE_SUMS256
#undef WEAVE_REGISTERS256
#undef WEAVE_SUMS248
#undef WEAVE_REGISTERS248
#undef WEAVE_SUMS240
#undef WEAVE_REGISTERS240
#undef WEAVE_SUMS232
#undef WEAVE_REGISTERS232
#undef WEAVE_SUMS224
#undef WEAVE_REGISTERS224
#undef WEAVE_SUMS216
#undef WEAVE_REGISTERS216
#undef WEAVE_SUMS208
#undef WEAVE_REGISTERS208
#undef WEAVE_SUMS200
#undef WEAVE_REGISTERS200
#undef WEAVE_SUMS192
#undef WEAVE_REGISTERS192
#undef WEAVE_SUMS184
#undef WEAVE_REGISTERS184
#undef WEAVE_SUMS176
#undef WEAVE_REGISTERS176
#undef WEAVE_SUMS168
#undef WEAVE_REGISTERS168
#undef WEAVE_SUMS160
#undef WEAVE_REGISTERS160
#undef WEAVE_SUMS152
#undef WEAVE_REGISTERS152
#undef WEAVE_SUMS144
#undef WEAVE_REGISTERS144
#undef WEAVE_SUMS136
#undef WEAVE_REGISTERS136
#undef WEAVE_SUMS128
#undef WEAVE_REGISTERS128
#undef WEAVE_SUMS120
#undef WEAVE_REGISTERS120
#undef WEAVE_SUMS112
#undef WEAVE_REGISTERS112
#undef WEAVE_SUMS104
#undef WEAVE_REGISTERS104
#undef WEAVE_SUMS96
#undef WEAVE_REGISTERS96
#undef WEAVE_SUMS88
#undef WEAVE_REGISTERS88
#undef WEAVE_SUMS80
#undef WEAVE_REGISTERS80
#undef WEAVE_SUMS72
#undef WEAVE_REGISTERS72
#undef WEAVE_SUMS64
#undef WEAVE_REGISTERS64
#undef WEAVE_SUMS56
#undef WEAVE_REGISTERS56
#undef WEAVE_SUMS48
#undef WEAVE_REGISTERS48
#undef WEAVE_SUMS40
#undef WEAVE_REGISTERS40
#undef WEAVE_SUMS32
#undef WEAVE_REGISTERS32
#undef WEAVE_SUMS24
#undef WEAVE_REGISTERS24
#undef WEAVE_SUMS16
#undef WEAVE_REGISTERS16
#undef WEAVE_SUMS8
#undef WEAVE_REGISTERS8
#undef WEAVE_SUMS4
// clang-format on

}  // namespace weave::moe_experts
