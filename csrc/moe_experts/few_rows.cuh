// The kernel of grouped.h for experts with few rows (sm_90a), where time is that of reading weights: a persistent grid
// goes over tiles of up to 32 rows of one expert by 128 rows of its weight, which are the left operand. Where tiles are
// too few for all SMs, the CTAs of a cluster share the depth of each, and one of them, in turn, adds up what all have.
//
// A CTA's 6 warps:
//   0 - 3   multiply, finish, and store results
//   4       loads weights (one thread). In the second GEMM it begins before the first one has ended
//   5       gathers rows, by cp.async
//
// Memory order, by what is shared:
//
//   a stage of the weight in shared memory
//     store   copies (TMA) of warp 4
//     flag    full[stage], which counts their bytes
//     wait    warps 0 - 3, before their multiplies
//     again   empty[stage]: 4 warps have waited for the multiplies that read the stage
//   a stage of rows
//     store   chunks (cp.async) of warp 5, as ordinary stores
//     flag    full[stage]: each lane's arrival after its chunks
//     fence   fence.proxy.async.shared::cta in every multiplying thread, behind its wait
//     again   empty[stage]
//   partial sums of a CTA
//     store   its threads 0 - 127, in fp32; __syncwarp
//     flag    given of the CTA that adds up: 4 warps of each other CTA, a release at the scope of the cluster
//     wait    threads 0 - 127 of the CTA that adds up, an acquire at that scope; they read the others' memory
//     again   taken of the CTA that they lie in: 4 warps of the reader, the same way
//   results in shared memory
//     store   stmatrix; await_consumers
//     again   await_consumers, behind the reads
//   order and rows in memory
//     wait    griddepcontrol.wait: first GEMM, of all threads; second GEMM, of warp 5
//   table, in the second GEMM
//     wait    none: the first GEMM lets this kernel begin when it has itself waited for the routing kernels
//
// Rows behind the expert's last one are that one again, and not stored: columns of a product do not mix.
#pragma once

#include "moe_experts/few_rows_instructions.cuh"
#include "moe_experts/few_rows_tiles.h"
#include "moe_experts/work.cuh"

namespace weave::moe_experts {

struct FewShared {
    uint8_t weights[kFewStages][kSlices][kBoxes][kFewBoxBytes];
    uint8_t rows[kFewStages][kSlices][kFewSliceBytes];
    float partial[kBoxes * 4 * kOctets][kFewConsumers];
    uint8_t staged[kFewTileRows * kStagedColumns * 2];
    uint64_t full[kFewStages], empty[kFewStages];
    uint64_t given, taken;
};

// A tile of rows by a tile of the weight.
struct FewItem {
    int32_t expert;
    int32_t first;  // position, among rows sorted by expert
    int32_t rows;
    int32_t column;  // of tiles of the weight
};

// A cluster's items, one after another.
class FewItems {
  public:
    __device__ __forceinline__ FewItems(const Work& work, int32_t splits)
        : work_(work),
          items_{read_record(work.table).x, work.columns, work.group},
          index_(static_cast<int32_t>(blockIdx.x) / splits),
          step_(static_cast<int32_t>(gridDim.x) / splits) {}
    // Whether there is one.
    __device__ __forceinline__ bool take(FewItem& found) {
        if (index_ >= items_.num_items()) return false;
        const Item item = items_.item(index_);
        const int4 record = read_record(work_.table + 4 * (item.tile + 1));
        found = {record.x, record.y, min(record.z - record.y, kFewTileRows), item.column};
        index_ += step_;
        return true;
    }

  private:
    const Work& work_;
    ItemOrder items_;
    int32_t index_, step_;
};

// One thread.
template <Product kProduct>
__device__ __forceinline__ void load_weights(const Work& work, FewShared& shared, int32_t rank, int32_t splits) {
    constexpr bool kGated = kProduct == Product::kGated;
    const Range blocks = share_of(work.blocks, rank, splits);
    gemm::Position<kFewStages> at;
    FewItem item{};
    for (FewItems items(work, splits); items.take(item);) {
        const int32_t row = item.column * few_tile_columns(kGated);
        for (int32_t block = blocks.begin; block < blocks.end; ++block) {
            fabric::await_phase(&shared.empty[at.stage], at.parity ^ 1);
            fabric::arrive_expecting(&shared.full[at.stage], kSlices * kBoxes * kFewBoxBytes);
#pragma unroll
            for (int box = 0; box < kBoxes; ++box)
#pragma unroll
                for (int slice = 0; slice < kSlices; ++slice)
                    load_box_here(shared.weights[at.stage][slice][box], &work.weight[box],
                                  block * kFewDepth + slice * kDepth, row + (kGated ? 0 : box * kFewBoxRows),
                                  item.expert, &shared.full[at.stage]);
            at.advance();
        }
    }
}

// A warp.
template <Product kProduct>
__device__ __forceinline__ void gather_rows(const Work& work, FewShared& shared, int32_t rank, int32_t splits) {
    const int32_t lane = threadIdx.x % 32, chunk = lane % kChunks, row = lane / kChunks;
    const int32_t chunks = work.depth / kChunkElements;
    const Range blocks = share_of(work.blocks, rank, splits);
    gemm::Position<kFewStages> at;
    FewItem item{};
    for (FewItems items(work, splits); items.take(item);) {
        const int32_t passes = (item.rows + kOctetRows - 1) / kOctetRows * (kOctetRows / kRowsAWarpPass);
        uint32_t from[kFewPasses];
#pragma unroll
        for (int pass = 0; pass < kFewPasses; ++pass) {
            const int32_t position = item.first + min(row + pass * kRowsAWarpPass, item.rows - 1);
            const int32_t number = kProduct == Product::kDown ? position : work.order[position] / work.choices;
            from[pass] = number * work.x_chunks + chunk;
        }
        for (int32_t block = blocks.begin; block < blocks.end; ++block) {
            fabric::await_phase(&shared.empty[at.stage], at.parity ^ 1);
#pragma unroll
            for (int slice = 0; slice < kSlices; ++slice) {
                const int32_t first = (block * kSlices + slice) * kChunks;
                const uint32_t to = gemm::shared_address(shared.rows[at.stage][slice]);
#pragma unroll
                for (int pass = 0; pass < kFewPasses; ++pass)
                    if (pass < passes)
                        copy_chunk(to + chunk_offset(row + pass * kRowsAWarpPass, chunk),
                                   work.x + (int64_t{from[pass]} + first) * 16, first + chunk < chunks);
            }
            arrive_after_chunks(&shared.full[at.stage]);
            at.advance();
        }
    }
}

// A thread's place in a box of the weight: its rows are this one and the one 8 behind.
__device__ __forceinline__ int32_t own_box_row() {
    return static_cast<int32_t>(threadIdx.x) / 32 * 16 + static_cast<int32_t>(threadIdx.x) % 32 / 4;
}

// Sums lie by box, 8 tokens, row (own or 8 behind), and token (of two): sum[box][octet][half][token].
template <typename T, Product kProduct, int kCount>
__device__ __forceinline__ void add_few_bias(const Work& work, const FewItem& item, float (&sum)[kCount]) {
    constexpr bool kGated = kProduct == Product::kGated;
    const T* bias = static_cast<const T*>(work.bias) + item.expert * work.bias_stride;
    const int32_t own = item.column * few_tile_columns(kGated) + own_box_row();
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t column = own + half * 8 + (kGated ? 0 : box * kFewBoxRows);
            if (column >= work.width) continue;
            const int64_t at = int64_t{column} * work.bias_step + (kGated && box == 1 ? work.up_bias : 0);
            const float value = static_cast<float>(bias[at]);
#pragma unroll
            for (int i = 0; i < kCount / 2; i += 4) {
                sum[box * (kCount / 2) + i + half * 2] += value;
                sum[box * (kCount / 2) + i + half * 2 + 1] += value;
            }
        }
}

// Threads 0 - 127: from sums to rows of the result.
template <typename T, Product kProduct, int kCount>
__device__ __forceinline__ void finish_item(const Work& work, FewShared& shared, const FewItem& item,
                                            float (&sum)[kCount]) {
    constexpr bool kGated = kProduct == Product::kGated;
    constexpr int kColumns = few_tile_columns(kGated), kOwnChunks = kColumns / kChunkElements;
    if (work.bias != nullptr) add_few_bias<T, kProduct>(work, item, sum);
    if constexpr (kProduct != Product::kDown) {
        if constexpr (kGated) {
            if (work.limit > 0.0f) cut_gates(sum, work.limit);
        }
        activate<kGated>(work.activation, sum, work.alpha);
    }
    const int32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const uint32_t to = gemm::shared_address(shared.staged);
#pragma unroll
    for (int box = 0; box < kColumns / kFewBoxRows; ++box)
#pragma unroll
        for (int i = 0; i < kCount / 2; i += 4) {
            const T* type = nullptr;
            const float* s = sum + box * (kCount / 2) + i;
            store_columns_as_rows(to + staged_offset(i * 2 + lane % 8, box * 8 + warp * 2 + lane / 8 % 2),
                                  gemm::pair_of(s[0], s[1], type), gemm::pair_of(s[2], s[3], type));
        }
    await_consumers();
    T* out = static_cast<T*>(work.out);
    for (int32_t i = thread; i < item.rows * kOwnChunks; i += kFewConsumers) {
        const int32_t row = i / kOwnChunks, chunk = i % kOwnChunks;
        const int32_t column = item.column * kColumns + chunk * kChunkElements;
        if (column >= work.width) continue;
        const int32_t position = item.first + row;
        const int64_t target = kProduct == Product::kDown ? work.order[position] : position;
        fabric::store(out + target * work.width + column,
                      *reinterpret_cast<const fabric::Vec16*>(shared.staged + staged_offset(row, chunk)));
    }
    await_consumers();
}

// What threads 0 - 127 keep from item to item.
struct Consumer {
    gemm::Position<kFewStages> at;
    int32_t rank, splits;
    int32_t adds_up = 0;  // the CTA that does, of this item
    uint32_t given = 0;   // parity: of the phase that this CTA waits for when it adds up
    uint32_t taken = 1;   // of the one that it waits for before it gives
};

// Whether `sum` is of the whole depth now: one CTA has it. Parts are added in the order of the CTAs that have them.
template <int kCount>
__device__ __forceinline__ bool add_up(FewShared& shared, Consumer& own, float (&sum)[kCount]) {
    if (own.splits == 1) return true;
    const int32_t thread = threadIdx.x, lane = thread % 32, leader = own.adds_up;
    own.adds_up = leader + 1 == own.splits ? 0 : leader + 1;
    if (own.rank != leader) {
        acquire_phase(&shared.taken, own.taken);
        own.taken ^= 1;
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            shared.partial[i][thread] = sum[i];
        __syncwarp();
        if (lane == 0) release_to(&shared.given, leader);
        return false;
    }
    acquire_phase(&shared.given, own.given);
    own.given ^= 1;
    float total[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        total[i] = 0.0f;
    for (int32_t cta = 0; cta < own.splits; ++cta) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            total[i] += cta == leader ? sum[i] : read_of(&shared.partial[i][thread], cta);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        sum[i] = total[i];
    __syncwarp();
    if (lane < own.splits && lane != leader) release_to(&shared.taken, lane);
    return true;
}

// Threads 0 - 127: an item of up to 8 * kWide rows.
template <typename T, Product kProduct, int kWide>
__device__ __forceinline__ void compute_item(const Work& work, FewShared& shared, const FewItem& item, Consumer& own) {
    constexpr int kColumns = kWide * kOctetRows, kBoxSums = kColumns / 2;
    const int32_t lane = threadIdx.x % 32;
    const Range blocks = share_of(work.blocks, own.rank, own.splits);
    float sum[kBoxes * kBoxSums];
#pragma unroll
    for (int i = 0; i < kBoxes * kBoxSums; ++i)
        sum[i] = 0.0f;
    int32_t before = 0;
    for (int32_t block = blocks.begin; block < blocks.end; ++block) {
        const int32_t stage = own.at.stage;
        fabric::await_phase(&shared.full[stage], own.at.parity);
        order_chunks_before_multiplies();
        gemm::open_multiplies();
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
            const uint64_t gates = gemm::operand(gemm::shared_address(shared.weights[stage][slice][0]));
            const uint64_t ups = gemm::operand(gemm::shared_address(shared.weights[stage][slice][1]));
            const uint64_t rows = gemm::operand(gemm::shared_address(shared.rows[stage][slice]));
#pragma unroll
            for (int step = 0; step < kDepth / gemm::kInstructionK; ++step) {
                const T* type = nullptr;
                multiply_few<kColumns, 0>(sum, gemm::along_k(gates, step), gemm::along_k(rows, step), true, type);
                multiply_few<kColumns, kBoxSums>(sum, gemm::along_k(ups, step), gemm::along_k(rows, step), true, type);
            }
        }
        gemm::close_multiplies();
        if (block != blocks.begin) {
            gemm::await_multiplies<1>();
            if (lane == 0) fabric::arrive(&shared.empty[before]);
        }
        before = stage;
        own.at.advance();
    }
    gemm::await_multiplies<0>();
    gemm::settle(sum);
    if (lane == 0 && blocks.begin < blocks.end) fabric::arrive(&shared.empty[before]);
    if (add_up(shared, own, sum)) finish_item<T, kProduct>(work, shared, item, sum);
}

// Threads 0 - 127.
template <typename T, Product kProduct>
__device__ __forceinline__ void compute_items(const Work& work, FewShared& shared, int32_t rank, int32_t splits) {
    Consumer own{{}, rank, splits};
    FewItem item{};
    for (FewItems items(work, splits); items.take(item);) {
        if (item.rows <= kOctetRows) {
            compute_item<T, kProduct, 1>(work, shared, item, own);
        } else if (item.rows <= 2 * kOctetRows) {
            compute_item<T, kProduct, 2>(work, shared, item, own);
        } else if (item.rows <= 3 * kOctetRows) {
            compute_item<T, kProduct, 3>(work, shared, item, own);
        } else {
            compute_item<T, kProduct, 4>(work, shared, item, own);
        }
    }
}

template <typename T, Product kProduct>
__global__ void __launch_bounds__(kFewThreads, 1) few_rows_gemm(const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    auto& shared = shared_memory<FewShared>();
    const int32_t rank = gemm::cluster_rank(), splits = cluster_size(), warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kFewStages; ++i) {
            gemm::init_barrier(&shared.full[i], 1 + 32);
            gemm::init_barrier(&shared.empty[i], kFewConsumers / 32);
        }
        gemm::init_barrier(&shared.given, (splits > 1 ? splits - 1 : 1) * (kFewConsumers / 32));
        gemm::init_barrier(&shared.taken, kFewConsumers / 32);
        gemm::publish_barriers();
    }
    gemm::await_cluster();
    // The second GEMM's weights are loaded while the first one still runs, by the table that is there by then.
    if (kProduct != Product::kDown) await_kernel_ahead();
    let_next_kernel_launch();
    if (warp < kFewConsumers / 32) {
        compute_items<T, kProduct>(work, shared, rank, splits);
    } else if (warp > kFewConsumers / 32) {
        // Without a tile too: this grid has not ended before the one ahead has.
        if (kProduct == Product::kDown) await_kernel_ahead();
        gather_rows<kProduct>(work, shared, rank, splits);
    } else if (threadIdx.x % 32 == 0) {
        load_weights<kProduct>(work, shared, rank, splits);
    }
    // Until no other CTA of the cluster reads or signals here.
    __syncwarp();
    gemm::await_cluster();
#endif
}

// In clusters of `splits` CTAs.
int enqueue_few_bf16(const Work& work, Product product, int32_t splits, void* stream);
int enqueue_few_fp16(const Work& work, Product product, int32_t splits, void* stream);

}  // namespace weave::moe_experts
