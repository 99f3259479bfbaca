// The GEMM of a persistent grid (sm_90a): tiles of 128 x kColumns, two consumer warp groups of 64 rows each, a warp
// that loads, and a warp that stores. Clusters of two CTAs compute two panels of rows with the same
// columns: each loads half of the weight's tile for both.
//
// A CTA's 12 warps:
//   0         loads (one thread)
//   1         stores (one thread)
//   2, 3      free for what else a kernel does
//   4 - 7     consumer 0
//   8 - 11    consumer 1
//
// Memory order, by what is shared:
//
//   a stage of A and B in shared memory
//     store   copies (TMA) of this CTA's loading thread, and for half of B of the other CTA's
//     flag    full[stage], which counts their bytes
//     wait    consumers, before their multiplies
//     again   empty[stage]: 4 warps of 2 consumers of 2 CTAs have waited for the multiplies that read the stage
//   a consumer's rows of C in shared memory
//     store   its 128 threads
//     fence   fence.proxy.async.shared::cta in each of them
//     flag    stored[consumer], which counts 128 arrivals
//     wait    the storing thread, before its copy
//     again   copied[consumer]: the copy has read them (wait_group.read), which says nothing about where it goes
//   C in memory
//     store   the copy
//     fence   wait_group without .read in the storing thread, then what `finished` does (a release)
#pragma once

#include "fabric/bulk_copy.cuh"
#include "fabric/vector.cuh"
#include "gemm/order.h"
#include "gemm/tensor_copy.cuh"
#include "gemm/wgmma.cuh"

namespace weave::gemm {

constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kConsumerRows = kPanelRows / kConsumers;
// Of a copy out: 128 bytes, or 64 where these do not divide a tile's rows.
WEAVE_HOST_DEVICE constexpr int store_columns(int columns) {
    return columns % 64 == 0 ? 64 : 32;
}
// Of the 65536 of an SM, what a CTA is launched with: as many for each thread, a multiple of 8. Warps that take more
// than others left wait for ever.
constexpr int kLaunchedRegisters = 65536 / kThreads / 8 * 8 * kThreads;
// By thread.
constexpr int kLoaderRegisters = 40;
constexpr int kConsumerRegisters = 232;
static_assert(128 * (kLoaderRegisters + kConsumers * kConsumerRegisters) <= kLaunchedRegisters);

constexpr int stages_of(int columns) {
    return columns == 256 ? 3 : 5;
}

template <int kColumns>
struct Shared {
    static constexpr int kStages = stages_of(kColumns);
    static constexpr int kBytesOfA = kPanelRows * kBlockK * 2;
    static constexpr int kBytesOfB = kColumns * kBlockK * 2;
    static constexpr int kBytesOfC = kConsumerRows * kColumns * 2;
    uint8_t a[kStages][kBytesOfA];
    uint8_t b[kStages][kBytesOfB];
    uint8_t c[kConsumers][kBytesOfC];
    uint64_t full[kStages], empty[kStages];
    uint64_t stored[kConsumers], copied[kConsumers];
};

// What a grid computes. Maps: A in boxes of 128 rows, B of kColumns / 2 rows, C in boxes of 64 rows of `store_columns`;
// one C for each owner, beginning with its first row.
struct Work {
    CUtensorMap a;
    CUtensorMap b;
    CUtensorMap c[fabric::kMaxWorld];
    TileOrder order;
    const void* bias;  // [num_columns] of the rows' type, added to every row before it is rounded; or null
    int32_t num_columns;
    int32_t k_blocks;
    int32_t num_clusters;  // that compute tiles; those of the grid after them do something else
};

constexpr int32_t kSharedAlignment = 1024;

// Where dynamic shared memory begins is a multiple of 16 bytes only.
template <int kColumns>
__device__ __forceinline__ Shared<kColumns>& shared_memory() {
    extern __shared__ uint8_t memory[];
    const uint32_t beyond = shared_address(memory) % kSharedAlignment;
    return *reinterpret_cast<Shared<kColumns>*>(memory + (kSharedAlignment - beyond) % kSharedAlignment);
}

// Of every thread of a warp group, by all its warps: more than the launch gave them, or fewer.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A stage of the pipeline and the parity of its phase.
template <int kStages>
struct Position {
    int32_t stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <int kColumns>
__device__ __forceinline__ void init_pipeline(Shared<kColumns>& shared) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < Shared<kColumns>::kStages; ++i) {
            init_barrier(&shared.full[i], 1);
            init_barrier(&shared.empty[i], kClusterCtas * kConsumers * 4);
        }
        for (int i = 0; i < kConsumers; ++i) {
            init_barrier(&shared.stored[i], 128);
            init_barrier(&shared.copied[i], 1);
        }
        publish_barriers();
    }
}

__device__ __forceinline__ int32_t cluster_index() {
    return static_cast<int32_t>(blockIdx.x) / kClusterCtas;
}

// Where a tile's rows of A are: in which map, and the cluster's first of them there.
struct RowsOfA {
    const CUtensorMap* map;
    int32_t row;
};

// All of them in one map, and there from the beginning.
struct WholeA {
    const Work& work;
    __device__ __forceinline__ RowsOfA operator()(const Tile& tile) const {
        return {&work.a, work.order.begin[tile.owner] + tile.row};
    }
};

// One thread. `rows_of(tile)` returns when the tile's rows of A may be read, and says where they are.
template <int kColumns, class RowsOf>
__device__ __forceinline__ void load_tiles(const Work& work, Shared<kColumns>& shared, const RowsOf& rows_of) {
    using S = Shared<kColumns>;
    constexpr int kHalf = kColumns / kClusterCtas;
    const int32_t cta = cluster_rank();
    Position<S::kStages> at;
    for (int32_t index = cluster_index(); index < work.order.num_tiles(); index += work.num_clusters) {
        const Tile tile = work.order.tile(index);
        if (!work.order.has_rows(tile)) continue;
        const RowsOfA from = rows_of(tile);
        const int32_t row = from.row + cta * kPanelRows;
        const int32_t column = tile.column * kColumns + cta * kHalf;
        for (int32_t block = 0; block < work.k_blocks; ++block) {
            fabric::await_phase(&shared.empty[at.stage], at.parity ^ 1);
            fabric::arrive_expecting(&shared.full[at.stage], S::kBytesOfA + S::kBytesOfB);
            load_tile(shared.a[at.stage], from.map, block * kBlockK, row, &shared.full[at.stage]);
            load_tile_to((1 << kClusterCtas) - 1, shared.b[at.stage] + cta * (S::kBytesOfB / kClusterCtas), &work.b,
                         block * kBlockK, column, &shared.full[at.stage]);
            at.advance();
        }
    }
    // Whoever uses the memory of the stages next finds them free, here and in the cluster's other CTA.
    for (int stage = 0; stage < S::kStages; ++stage) {
        fabric::await_phase(&shared.empty[at.stage], at.parity ^ 1);
        at.advance();
    }
}

// One thread. `finished(tile, row)` comes when the panel of the tile that begins at the owner's `row` is where it goes.
template <int kColumns, class Finished>
__device__ __forceinline__ void store_tiles(const Work& work, Shared<kColumns>& shared, const Finished& finished) {
    constexpr int kStoreColumns = store_columns(kColumns), kBytes = kConsumerRows * kStoreColumns * 2;
    const int32_t cta = cluster_rank();
    uint32_t parity = 0;
    for (int32_t index = cluster_index(); index < work.order.num_tiles(); index += work.num_clusters) {
        const Tile tile = work.order.tile(index);
        if (!work.order.has_rows(tile)) continue;
        const int32_t panel_row = tile.row + cta * kPanelRows;
        for (int32_t consumer = 0; consumer < kConsumers; ++consumer) {
            const int32_t row = panel_row + consumer * kConsumerRows;
            fabric::await_phase(&shared.stored[consumer], parity);
            if (row < work.order.rows_of(tile.owner)) {
#pragma unroll
                for (int i = 0; i < kColumns / kStoreColumns; ++i)
                    store_tile(&work.c[tile.owner], shared.c[consumer] + i * kBytes,
                               tile.column * kColumns + i * kStoreColumns, row);
            }
            fabric::commit_copies();
        }
        fabric::await_reading<1>();
        fabric::arrive(&shared.copied[0]);
        fabric::await_reading<0>();
        fabric::arrive(&shared.copied[1]);
        fabric::await_arrival<0>();
        finished(tile, panel_row);
        parity ^= 1;
    }
}

// Four 8 x 8 matrices of 2-byte elements, one in each register of all lanes; lane 8 i + j has the address of row j of
// matrix i.
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

__device__ __forceinline__ uint32_t pair_of(float a, float b, const __nv_bfloat16*) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pair_of(float a, float b, const __half*) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float2 two_of(const __nv_bfloat16* from) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from));
}
__device__ __forceinline__ float2 two_of(const __half* from) {
    return __half22float2(*reinterpret_cast<const __half2*>(from));
}

// Of a tile that begins at column `first`. Of every 8 columns a thread has the same two in two rows.
template <typename T, int kSums>
__device__ __forceinline__ void add_bias(const Work& work, int32_t first, int32_t lane, float (&sum)[kSums]) {
    const T* bias = static_cast<const T*>(work.bias);
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
        const int32_t column = first + 8 * j + lane % 4 * 2;
        if (column >= work.num_columns) break;
        const float2 two = two_of(bias + column);
        sum[4 * j] += two.x;
        sum[4 * j + 1] += two.y;
        sum[4 * j + 2] += two.x;
        sum[4 * j + 3] += two.y;
    }
}

// All 128 threads of consumer 0 or 1. Returns the parity of copied[consumer] after the last tile.
template <typename T, int kColumns>
__device__ __forceinline__ uint32_t compute_tiles(const Work& work, Shared<kColumns>& shared, int32_t consumer) {
    using S = Shared<kColumns>;
    // Of a copy out. Its rows have 8 or 4 chunks of 16 bytes, exchanged by the swizzle of 128 or 64 bytes.
    constexpr int kRowBytes = store_columns(kColumns) * 2, kBytes = kConsumerRows * kRowBytes;
    constexpr int kChunks = kRowBytes / 16;
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int32_t own_row = warp * 16 + lane % 16;  // of the matrices' rows, the one whose address this lane has
    const uint32_t c_row = shared_address(shared.c[consumer]) + own_row * kRowBytes;
    const int32_t exchanged = own_row / (8 / kChunks) % kChunks;
    Position<S::kStages> at;
    uint32_t parity = 1;
    for (int32_t index = cluster_index(); index < work.order.num_tiles(); index += work.num_clusters) {
        const Tile tile = work.order.tile(index);
        if (!work.order.has_rows(tile)) continue;
        float sum[kColumns / 2];
        int32_t before = 0;
        for (int32_t block = 0; block < work.k_blocks; ++block) {
            fabric::await_phase(&shared.full[at.stage], at.parity);
            const uint64_t a = operand(shared_address(shared.a[at.stage]) + consumer * (S::kBytesOfA / kConsumers));
            const uint64_t b = operand(shared_address(shared.b[at.stage]));
            open_multiplies();
#pragma unroll
            for (int step = 0; step < kBlockK / kInstructionK; ++step)
                multiply_add(sum, along_k(a, step), along_k(b, step), block + step != 0,
                             static_cast<const T*>(nullptr));
            close_multiplies();
            if (block != 0) {
                await_multiplies<1>();
                if (lane < kClusterCtas) arrive_at(&shared.empty[before], lane);
            }
            before = at.stage;
            at.advance();
        }
        await_multiplies<0>();
        settle(sum);
        if (lane < kClusterCtas) arrive_at(&shared.empty[before], lane);
        if (work.bias != nullptr) add_bias<T>(work, tile.column * kColumns, lane, sum);

        fabric::await_phase(&shared.copied[consumer], parity);
        parity ^= 1;
#pragma unroll
        for (int j = 0; j < kColumns / 8; j += 2) {
            const T* type = nullptr;
            const int32_t chunk = (j + lane / 16) % kChunks;
            const uint32_t to = c_row + j / kChunks * kBytes + (chunk ^ exchanged) * 16;
            store_matrices(to, pair_of(sum[4 * j], sum[4 * j + 1], type), pair_of(sum[4 * j + 2], sum[4 * j + 3], type),
                           pair_of(sum[4 * j + 4], sum[4 * j + 5], type),
                           pair_of(sum[4 * j + 6], sum[4 * j + 7], type));
        }
        fabric::order_shared_stores_before_copies();
        fabric::arrive(&shared.stored[consumer]);
    }
    return parity;
}

}  // namespace weave::gemm
