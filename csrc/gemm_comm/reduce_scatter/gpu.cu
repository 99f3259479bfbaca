// Memory order, by what is shared:
//
//   partial result in every rank's arena
//     store   the GEMMs, kernels before this one in the stream
//     fence   griddepcontrol.wait, or the launch; release, in signal
//     flag    partial[source][CTA]
//     wait    CTA c of every other rank, acquire; __syncthreads; then it reads its part
//     again   after this kernel: it ends with `rows` of every peer's CTAs, signalled after they have read
//   the sum, memory of the caller
//     store   its owner alone; kernels after this one read it
#include <cuda_runtime.h>

#include <algorithm>

#include "fabric/call.cuh"
#include "fabric/kernel_code.cuh"
#include "fabric/vector.cuh"
#include "gemm_comm/reduce_scatter/gpu.h"

namespace weave::gpu {
namespace {

using fabric::kElements;
using fabric::Vec16;

constexpr int kThreads = 512;
constexpr int kAtOnce = 4;

// 16 bytes.
template <typename T>
struct Vectors {
    using Piece = Vec16;
    static constexpr int kCount = kElements<T>;
    __device__ __forceinline__ static Piece load(const char* from) { return fabric::load(from); }
    __device__ __forceinline__ static void store(char* to, const Piece& piece) { fabric::store(to, piece); }
    __device__ __forceinline__ static void widen(const Piece& piece, float (&out)[kCount]) {
        fabric::widen(piece, out, static_cast<const T*>(nullptr));
    }
    __device__ __forceinline__ static Piece narrow(const float (&x)[kCount]) {
        return fabric::narrow(x, static_cast<const T*>(nullptr));
    }
};

// One element, where rows begin anywhere.
template <typename T>
struct Elements {
    using Piece = T;
    static constexpr int kCount = 1;
    __device__ __forceinline__ static Piece load(const char* from) {
        Piece piece;
        if constexpr (sizeof(T) == 4) {
            const uint32_t bits = *reinterpret_cast<const volatile uint32_t*>(from);
            piece = *reinterpret_cast<const T*>(&bits);
        } else {
            const uint16_t bits = *reinterpret_cast<const volatile uint16_t*>(from);
            piece = *reinterpret_cast<const T*>(&bits);
        }
        return piece;
    }
    __device__ __forceinline__ static void store(char* to, const Piece& piece) { *reinterpret_cast<T*>(to) = piece; }
    __device__ __forceinline__ static void widen(const Piece& piece, float (&out)[1]) {
        out[0] = static_cast<float>(piece);
    }
    __device__ __forceinline__ static Piece narrow(const float (&x)[1]) { return static_cast<T>(x[0]); }
};

template <class Access>
__global__ void __launch_bounds__(kThreads) sum_parts(const __grid_constant__ PartSum given) {
    using Piece = typename Access::Piece;
    constexpr int E = Access::kCount;
    constexpr int64_t kPieceBytes = sizeof(Piece);
    const fabric::GroupView& group = given.group;
    const fabric::CallState state = fabric::begin_call<false>(group);
    __syncthreads();
    const fabric::Watch watch{group, fabric::tag_word(state.epoch(), given.tokens, given.site)};
    const uint64_t word = fabric::signal_word(state.epoch(), 1);
    const int32_t peer = threadIdx.x;
    const bool has_peer = peer < group.world && peer != group.rank;
    fabric::send_tags(watch, state, peer);
    fabric::end_call<false>(watch, state, peer);
    const fabric::Channel* own = group.channel(group.rank);
    if (has_peer) {
        fabric::signal(&group.channel(peer)->partial[group.rank][blockIdx.x], word);
        fabric::wait(&own->partial[peer][blockIdx.x], word, watch, peer, fabric::Slot::kPartial);
    }
    __syncthreads();

    const int64_t block = given.block / E, count = given.outer * block;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t first = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; first < count;
         first += step * kAtOnce) {
        int64_t at[kAtOnce];
        Piece piece[kAtOnce];
        float sum[kAtOnce][E];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int64_t index = first + j * step;
            const int64_t outer = given.outer == 1 ? 0 : index / block;
            at[j] = given.partial_offset +
                    ((outer * group.world + group.rank) * block + index - outer * block) * kPieceBytes;
        }
        for (int32_t source = 0; source < group.world; ++source) {
            const char* arena = group.base[source];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j)
                if (first + j * step < count) piece[j] = Access::load(arena + at[j]);
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (first + j * step >= count) continue;
                float value[E];
                Access::widen(piece[j], value);
#pragma unroll
                for (int i = 0; i < E; ++i)
                    sum[j][i] = source == 0 ? value[i] : sum[j][i] + value[i];
            }
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            if (first + j * step >= count) continue;
#pragma unroll
            for (int i = 0; i < E; ++i)
                sum[j][i] *= given.scale;
            Access::store(static_cast<char*>(given.out) + (first + j * step) * kPieceBytes, Access::narrow(sum[j]));
        }
    }
    __syncthreads();
    if (has_peer) {
        fabric::signal(&group.channel(peer)->rows[group.rank][blockIdx.x], word);
        fabric::wait(&own->rows[peer][blockIdx.x], word, watch, peer, fabric::Slot::kRows);
    }
}

template <class Access>
int enqueue(const PartSum& given, void* stream) {
    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    // CTAs wait for each other through peers: all of them must be resident at once, which is one on each SM.
    const int64_t all = (given.outer * (given.block / Access::kCount) + kThreads - 1) / kThreads;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(std::min<int64_t>({num_sms, fabric::kMaxCtas, all}));
    config.blockDim = kThreads;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = fabric::code_of<sum_parts<Access>>(device) == fabric::KernelCode::kSm90 ? 1 : 0;
    return cudaLaunchKernelEx(&config, sum_parts<Access>, given);
}

template <typename T>
int run_as(const PartSum& given, void* stream) {
    const uint64_t places = reinterpret_cast<uint64_t>(given.out) | static_cast<uint64_t>(given.partial_offset) |
                            static_cast<uint64_t>(given.block * sizeof(T));
    return places % 16 == 0 ? enqueue<Vectors<T>>(given, stream) : enqueue<Elements<T>>(given, stream);
}

}  // namespace

int run_part_sum(const PartSum& given, DType dtype, void* stream) {
    if (given.outer * given.block == 0) return cudaSuccess;
    switch (dtype) {
        case DType::kFloat32:
            return run_as<float>(given, stream);
        case DType::kBFloat16:
            return run_as<__nv_bfloat16>(given, stream);
        case DType::kFloat16:
            return run_as<__half>(given, stream);
    }
    return cudaErrorInvalidValue;
}

}  // namespace weave::gpu
