// The direct kernel on `peer`: loads from and stores to each rank in turn.
#include "reduction/direct.cuh"

namespace weave::gpu {
namespace {

struct Peer {
    __device__ __forceinline__ static void order_addresses() {}

    template <typename T>
    __device__ __forceinline__ static void reduce_load(const Call& call, int64_t at, float (&sum)[kElements<T>]) {
        for (int32_t rank = 0; rank < call.group.world; ++rank) {
            float part[kElements<T>];
            fabric::widen(fabric::load(call.group.base[rank] + at), part, static_cast<const T*>(nullptr));
#pragma unroll
            for (int i = 0; i < kElements<T>; ++i)
                sum[i] += part[i];
        }
    }
    template <class Piece>
    __device__ __forceinline__ static void broadcast_store(const Call& call, int64_t at, const Piece& piece) {
        for (int32_t rank = 0; rank < call.group.world; ++rank)
            fabric::store(call.group.base[rank] + at, piece);
    }
};

}  // namespace

const char* direct_unsupported(DType dtype, int64_t hidden) {
    return hidden * size_of(dtype) / 16 > kMostDirectVecs * kDirectThreads ? "rows are too long for the direct kernel"
                                                                           : "";
}

int run_direct_peer(const Call& call, const Launch& launch) {
    return run_direct<Peer>(call, launch);
}

}  // namespace weave::gpu
