// The direct kernel on `multimem`: the NVLink switch sums what it loads and copies what is stored (sm_90 and newer).
// The sum over ranks is made in fp32 and comes rounded to the activations' type.
#include "reduction/direct.cuh"

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
#define WEAVE_MULTIMEM 1
#endif

namespace weave::gpu {
namespace {

struct Multimem {
    // The same memory is reached by its own address and by the multicast one: accesses by one are ordered with those by
    // the other only by this.
    __device__ __forceinline__ static void order_addresses() { asm volatile("fence.proxy.alias;" ::: "memory"); }

#ifdef WEAVE_MULTIMEM
    __device__ __forceinline__ static Vec16 summed(const char* at, const __nv_bfloat16*) {
        Vec16 v;
        asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                     : "l"(at)
                     : "memory");
        return v;
    }
    __device__ __forceinline__ static Vec16 summed(const char* at, const __half*) {
        Vec16 v;
        asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                     : "l"(at)
                     : "memory");
        return v;
    }
    __device__ __forceinline__ static Vec16 summed(const char* at, const float*) {
        float x[4];
        asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "l"(at)
                     : "memory");
        return fabric::narrow(x, static_cast<const float*>(nullptr));
    }
#endif

    template <typename T>
    __device__ __forceinline__ static void reduce_load(const Call& call, int64_t at, float (&sum)[kElements<T>]) {
#ifdef WEAVE_MULTIMEM
        fabric::widen(summed(call.group.multicast + at, static_cast<const T*>(nullptr)), sum,
                      static_cast<const T*>(nullptr));
#endif
    }
    __device__ __forceinline__ static void broadcast_store(const Call& call, int64_t at, const Vec16& v) {
#ifdef WEAVE_MULTIMEM
        asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(call.group.multicast + at),
                     "f"(__uint_as_float(v.word[0])), "f"(__uint_as_float(v.word[1])), "f"(__uint_as_float(v.word[2])),
                     "f"(__uint_as_float(v.word[3]))
                     : "memory");
#endif
    }
    // 4 or 8 bytes, word by word.
    template <int kWords>
    __device__ __forceinline__ static void broadcast_store(const Call& call, int64_t at,
                                                           const fabric::Vec<kWords>& piece) {
#ifdef WEAVE_MULTIMEM
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            asm volatile("multimem.st.relaxed.sys.global.u32 [%0], %1;" ::"l"(call.group.multicast + at + 4 * i),
                         "r"(piece.word[i])
                         : "memory");
#endif
    }
};

}  // namespace

int run_direct_multimem(const Call& call, const Launch& launch) {
    int device = 0;
    cudaGetDevice(&device);
    // All kernels of this file were compiled for the same architectures: one of them stands for the others.
    const KernelCode code = fabric::code_of<direct<Multimem, float, 2>>(device);
    if (code != KernelCode::kSm90 || call.group.multicast == nullptr) return cudaErrorNotSupported;
    return run_direct<Multimem>(call, launch);
}

}  // namespace weave::gpu
