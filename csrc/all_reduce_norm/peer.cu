// The direct form on `peer`: loads from and stores to each rank in turn.
#include "all_reduce_norm/direct.cuh"

namespace weave::gpu {
namespace {

struct Peer {
    __device__ __forceinline__ static void order_addresses() {}

    template <typename T>
    __device__ __forceinline__ static void reduce_load(const Call& call, int64_t at, float (&sum)[kElements<T>]) {
        for (int32_t rank = 0; rank < call.world; ++rank) {
            float part[kElements<T>];
            fabric::widen(fabric::load(call.base[rank] + at), part, static_cast<const T*>(nullptr));
#pragma unroll
            for (int i = 0; i < kElements<T>; ++i)
                sum[i] += part[i];
        }
    }
    __device__ __forceinline__ static void broadcast_store(const Call& call, int64_t at, const Vec16& v) {
        for (int32_t rank = 0; rank < call.world; ++rank)
            fabric::store(call.base[rank] + at, v);
    }
    __device__ __forceinline__ static void broadcast_short(const Call& call, int64_t at, const Vec16& v,
                                                           int32_t bytes) {
        for (int32_t rank = 0; rank < call.world; ++rank)
            for (int32_t i = 0; i < bytes / 4; ++i)
                reinterpret_cast<uint32_t*>(call.base[rank] + at)[i] = v.word[i];
    }
};

}  // namespace

const char* direct_unsupported(DType dtype, int64_t hidden) {
    return hidden * size_of(dtype) / 16 > kMostDirectVecs * kDirectThreads ? "rows are too long for the direct form"
                                                                           : "";
}

int run_direct_peer(const Call& call, const Launch& launch) {
    return run_direct<Peer>(call, launch);
}

}  // namespace weave::gpu
