// Hopper's asynchronous matrix instructions (wgmma, sm_90a): 64 rows by 128, 160 or 256 columns by 16, fp32
// accumulation.
//
// A and B are in shared memory, both with K as their fast axis, in rows of 64 elements (128 bytes) whose 16-byte chunks
// are exchanged by the 128-byte swizzle: chunk c of row r is at c ^ (r % 8), as TMA writes and reads it.
//
//   operand(shared)       what names a tile: of 8 rows by 128 bytes, one after another; aligned to 1024 bytes
//   open_multiplies()     before the first multiply_add of a group, after other writes to the accumulators
//   close_multiplies()    the group ends
//   await_multiplies<N>   at most N groups still run
//   settle(d)             the compiler reads the accumulators only from here on
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace weave::gemm {

constexpr int kBlockK = 64;
constexpr int kInstructionK = 16;

__device__ __forceinline__ uint64_t operand(uint32_t shared) {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
    constexpr uint64_t kBetweenGroups = uint64_t{1024 >> 4} << 32;  // of 8 rows
    constexpr uint64_t kUnused = uint64_t{1} << 16;
    return kSwizzle128 | kBetweenGroups | kUnused | (shared & 0x3ffff) >> 4;
}

// The operand `step` instructions further along K.
__device__ __forceinline__ uint64_t along_k(uint64_t operand, int step) {
    return operand + step * (kInstructionK * 2 >> 4);
}

__device__ __forceinline__ void open_multiplies() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void close_multiplies() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void await_multiplies() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kCount>
__device__ __forceinline__ void settle(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define WEAVE_ACC8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// The text between braces, of so many accumulators.
#define WEAVE_FIRST_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WEAVE_FIRST_80 WEAVE_FIRST_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WEAVE_FIRST_128 WEAVE_FIRST_80 ", " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WEAVE_ACC64(d) \
    WEAVE_ACC8(d, 0), WEAVE_ACC8(d, 8), WEAVE_ACC8(d, 16), WEAVE_ACC8(d, 24), \
    WEAVE_ACC8(d, 32), WEAVE_ACC8(d, 40), WEAVE_ACC8(d, 48), WEAVE_ACC8(d, 56)
#define WEAVE_ACC80(d) WEAVE_ACC64(d), WEAVE_ACC8(d, 64), WEAVE_ACC8(d, 72)
#define WEAVE_ACC128(d) \
    WEAVE_ACC80(d), WEAVE_ACC8(d, 80), WEAVE_ACC8(d, 88), \
    WEAVE_ACC8(d, 96), WEAVE_ACC8(d, 104), WEAVE_ACC8(d, 112), WEAVE_ACC8(d, 120)

// d = a * b^T, plus d if `accumulate`. The last argument is a type. A, B and P: what comes after the accumulators.
#define WEAVE_MULTIPLY_ADD(COLUMNS, COUNT, A, B, P, TYPE, NAME) \
    __device__ __forceinline__ void multiply_add(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate, const TYPE*) { \
        asm volatile( \
            "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." NAME "." NAME " {" WEAVE_FIRST_##COUNT "}, " \
            A ", " B ", p, 1, 1, 0, 0;\n}\n" \
            : WEAVE_ACC##COUNT(d) \
            : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate))); \
    }
WEAVE_MULTIPLY_ADD(128, 64, "%64", "%65", "%66", __nv_bfloat16, "bf16")
WEAVE_MULTIPLY_ADD(128, 64, "%64", "%65", "%66", __half, "f16")
WEAVE_MULTIPLY_ADD(160, 80, "%80", "%81", "%82", __nv_bfloat16, "bf16")
WEAVE_MULTIPLY_ADD(160, 80, "%80", "%81", "%82", __half, "f16")
WEAVE_MULTIPLY_ADD(256, 128, "%128", "%129", "%130", __nv_bfloat16, "bf16")
WEAVE_MULTIPLY_ADD(256, 128, "%128", "%129", "%130", __half, "f16")
#undef WEAVE_MULTIPLY_ADD
#undef WEAVE_ACC128
#undef WEAVE_ACC80
#undef WEAVE_ACC64
#undef WEAVE_FIRST_128
#undef WEAVE_FIRST_80
#undef WEAVE_FIRST_64
#undef WEAVE_ACC8
// clang-format on

}  // namespace weave::gemm
