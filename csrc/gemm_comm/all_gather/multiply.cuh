// The kernel of multiply.h (sm_90a). Own rows come first, out of the shard itself; then those of the ranks after this
// one, in the order in which they are pushed. The loading thread waits for the shard that has a tile's rows.
//
// Memory order: gpu.cu. Here: acquire of the shard's flag, fence.proxy.async, then loads by TMA, all in
// one thread. This kernel lets no other one begin before it ends, not even the next GEMM of the call: its CTAs would
// take the SMs that are left to the kernels that signal, and wait there for this one, which may wait for a signal.
#pragma once

#include "gemm/gemm.cuh"
#include "gemm_comm/all_gather/multiply.h"
#include "gemm_comm/all_gather/shards.cuh"

namespace weave::gpu {

struct GatheredWork {
    gemm::Work work;
    CUtensorMap own_rows;
    fabric::GroupView group;
    int32_t tokens;
    uint32_t site;
};

template <typename T, int kColumns>
__global__ void __launch_bounds__(gemm::kThreads, 1) multiply_gathered(const __grid_constant__ GatheredWork given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    auto& shared = gemm::shared_memory<kColumns>();
    const gemm::Work& work = given.work;
    gemm::init_pipeline(shared);
    gemm::await_cluster();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < 4) {
        gemm::leave_registers<gemm::kLoaderRegisters>();
        if (lane == 0 && warp == 0) {
            const uint64_t epoch = running_call(given.group);
            const fabric::Watch watch{given.group, fabric::tag_word(epoch, given.tokens, given.site)};
            int32_t source = given.group.rank;  // whose rows are here
            gemm::load_tiles(work, shared, [&](const gemm::Tile& tile) {
                if (tile.owner == given.group.rank) return gemm::RowsOfA{&given.own_rows, tile.row};
                if (source != tile.owner) {
                    await_shard(watch, epoch, tile.owner);
                    fabric::order_accesses_before_copies();
                    source = tile.owner;
                }
                return gemm::RowsOfA{&work.a, work.order.begin[tile.owner] + tile.row};
            });
        }
        if (lane == 0 && warp == 1) gemm::store_tiles(work, shared, [](const gemm::Tile&, int32_t) {});
    } else {
        gemm::take_registers<gemm::kConsumerRegisters>();
        gemm::compute_tiles<T>(work, shared, warp / 4 - 1);
    }
    __syncwarp();
    gemm::await_cluster();
#endif
}

// In multiply.dtypes.sm90a.cu.
template <typename T>
int enqueue_gathered(const GatheredWork& given, int32_t tile_columns, int32_t num_ctas, void* stream);

}  // namespace weave::gpu
