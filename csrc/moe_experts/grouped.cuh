// The kernel of grouped.h (sm_90a): a persistent grid of clusters of two CTAs computes tiles of 256 rows of one expert
// by 256 rows of its weight, CTA r the rows from 128 r on. Two consumer warp groups of 64 rows each multiply; in the
// first GEMM all 128 threads of the producer warp group gather the rows of A by cp.async, as TMA cannot gather on
// Hopper; in the second one TMA brings them. TMA brings the weight too, half of it by each CTA for both.
//
// Memory order, by what is shared:
//
//   a stage of B in shared memory
//     store   copies (TMA) of thread 0 of both CTAs
//     flag    full[stage], which counts their bytes
//     wait    consumers, before their multiplies
//     again   empty[stage]: 4 warps of 2 consumers of 2 CTAs have waited for the multiplies that read the stage
//   a stage of A
//     store   first GEMM: chunks (cp.async) of the 128 producer threads, as ordinary stores; second: as B
//     flag    full[stage]: each producer thread's arrival after its chunks
//     fence   fence.proxy.async.shared::cta in every consumer thread, behind its wait (first GEMM)
//     wait    consumers
//     again   empty[stage]; wgmma has read then, and ordinary stores may follow
//   results in a warp's own part of shared memory
//     store   stmatrix of the warp
//     fence   __syncwarp
//     again   __syncwarp, behind the reads
//   table, order, rows of the first GEMM in memory
//     wait    griddepcontrol.wait, by every thread before its first read: the kernel ahead has ended
//
// A consumer without rows (of an expert whose rows end before) multiplies nothing and takes part in the barriers.
// Rows behind the expert's last one are read, of whatever they are, and not stored: rows of a product do not mix.
#pragma once

#include "gemm/mainloop.cuh"
#include "moe_experts/activation.cuh"
#include "moe_experts/copies.cuh"
#include "moe_experts/work.cuh"

namespace weave::moe_experts {

using fabric::await_phase;

constexpr int kStages = 4;
constexpr int kSums = kWeightRows / 2;  // of a thread
static_assert(kPanelRows == gemm::kPanelRows && kBoxes == gemm::kClusterCtas && kDepth == gemm::kBlockK);

struct Shared {
    static constexpr int kBytesOfA = kPanelRows * kDepth * 2;
    static constexpr int kBytesOfB = kWeightRows * kDepth * 2;
    uint8_t a[kStages][kBytesOfA];
    uint8_t b[kStages][kBytesOfB];
    uint8_t staged[gemm::kConsumers * 4][kStagedRows * kStagedColumns * 2];
    uint64_t full[kStages], empty[kStages];
};

// One CTA's part of an item.
struct Part {
    int32_t expert;
    int32_t first;   // position, among rows sorted by expert
    int32_t rows;    // up to 128; none, or fewer, where the expert's rows end before
    int32_t last;    // position of the expert
    int32_t column;  // of tiles
};

// A cluster's parts, one after another. The next one is read while this one is worked on.
class Parts {
  public:
    __device__ __forceinline__ explicit Parts(const Work& work)
        : work_(work), items_{work.table[0], work.columns, work.group}, index_(gemm::cluster_index()) {
        read();
    }
    // Whether there is one.
    __device__ __forceinline__ bool take(Part& part) {
        if (index_ >= items_.num_items()) return false;
        part = next_;
        index_ += static_cast<int32_t>(gridDim.x) / gemm::kClusterCtas;
        read();
        return true;
    }

  private:
    __device__ __forceinline__ void read() {
        if (index_ >= items_.num_items()) return;
        const Item item = items_.item(index_);
        const int4 record = *reinterpret_cast<const int4*>(work_.table + 4 * (item.tile + 1));
        const int32_t first = record.y + static_cast<int32_t>(gemm::cluster_rank()) * kPanelRows;
        next_ = {record.x, first, min(record.z - first, kPanelRows), record.z - 1, item.column};
    }

    const Work& work_;
    ItemOrder items_;
    int32_t index_;
    Part next_{};
};

template <Product kProduct>
__device__ __forceinline__ void init_pipeline(Shared& shared) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            gemm::init_barrier(&shared.full[i], kProduct == Product::kDown ? 1 : 1 + kGatherThreads);
            gemm::init_barrier(&shared.empty[i], gemm::kClusterCtas * gemm::kConsumers * 4);
        }
        gemm::publish_barriers();
    }
}

// Thread 0: this CTA's box of the weight, for both, and in the second GEMM the rows.
template <Product kProduct>
__device__ __forceinline__ void load_boxes(const Work& work, Shared& shared, const Part& part, int32_t block,
                                           int32_t stage) {
    const int32_t box = gemm::cluster_rank();
    const int32_t row =
        kProduct == Product::kGated ? part.column * kBoxRows : part.column * kWeightRows + box * kBoxRows;
    fabric::arrive_expecting(&shared.full[stage],
                             Shared::kBytesOfB + (kProduct == Product::kDown ? Shared::kBytesOfA : 0));
    load_box_to_both(shared.b[stage] + box * (Shared::kBytesOfB / kBoxes), &work.weight[box], block * kDepth, row,
                     part.expert, &shared.full[stage]);
    if (kProduct == Product::kDown)
        gemm::load_tile(shared.a[stage], &work.rows, block * kDepth, part.first, &shared.full[stage]);
}

// First GEMM: all threads of the producer warp group; second: its first thread.
template <Product kProduct>
__device__ __forceinline__ void load_parts(const Work& work, Shared& shared) {
    constexpr bool kGathers = kProduct != Product::kDown;
    const int32_t thread = threadIdx.x, blocks = work.blocks;
    const int32_t chunk = gathered_chunk(thread), chunks = work.depth / kChunkElements;
    const uint32_t to = gemm::shared_address(shared.a) + chunk_offset(gathered_row(thread, 0), chunk);
    gemm::Position<kStages> at;
    Part part{};
    for (Parts parts(work); parts.take(part);) {
        const int32_t passes = passes_of(part.rows);
        uint32_t from[kPasses];
        if constexpr (kGathers) {
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                const int32_t position = min(part.first + gathered_row(thread, pass), part.last);
                from[pass] = work.order[position] / work.choices * work.x_chunks + chunk;
            }
        }
        for (int32_t block = 0; block < blocks; ++block) {
            await_phase(&shared.empty[at.stage], at.parity ^ 1);
            if (thread == 0) load_boxes<kProduct>(work, shared, part, block, at.stage);
            if constexpr (kGathers) {
                const bool inside = block * kChunks + chunk < chunks;
                const uint8_t* x = work.x + block * (kDepth * 2);
#pragma unroll
                for (int pass = 0; pass < kPasses; ++pass)
                    if (pass < passes)
                        copy_chunk(to + at.stage * Shared::kBytesOfA + pass * (kRowsAPass * kChunks * 16),
                                   x + int64_t{from[pass]} * 16, inside);
                arrive_after_chunks(&shared.full[at.stage]);
            }
            at.advance();
        }
    }
}

// Where row lane % 16 of a warp's 16 goes. -1: nowhere.
template <Product kProduct>
__device__ __forceinline__ int32_t target_of(const Work& work, const Part& part, int32_t warp_row) {
    const int32_t row = warp_row + static_cast<int32_t>(threadIdx.x) % kStagedRows;
    if (row >= part.rows) return -1;
    return kProduct == Product::kDown ? work.order[part.first + row] : part.first + row;
}

template <typename T>
struct alignas(2 * sizeof(T)) Pair {
    T first, second;
};

// A thread has of each 8 columns two that are neighbours, the first one even, in two rows; and so has it of what the
// second half of its sums is of. So two pairs of biases are for four sums of a row, in whatever order they lie.
template <typename T, Product kProduct>
__device__ __forceinline__ void add_bias(const Work& work, const Part& part, int32_t column, float (&sum)[kSums]) {
    constexpr bool kGated = kProduct == Product::kGated;
    const T* bias = static_cast<const T*>(work.bias) + part.expert * work.bias_stride;
    const int32_t own = column + static_cast<int32_t>(threadIdx.x) % 4 * 2;
    const bool interleaved = kGated && work.bias_step == 2;
    const int32_t between = interleaved ? 2 : kGated ? work.up_bias : kBoxRows;
#pragma unroll
    for (int i = 0; i < kSums / 2; i += 4) {
        const int32_t one = own + i * 2, other = kGated ? one : one + kBoxRows;
        float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of both columns, then of what is in the second half
        const T* at = bias + one * work.bias_step;
        if (one < work.width) {
            const Pair<T> pair = *reinterpret_cast<const Pair<T>*>(at);
            value[0] = static_cast<float>(pair.first);
            value[1] = static_cast<float>(pair.second);
        }
        if (other < work.width) {
            const Pair<T> pair = *reinterpret_cast<const Pair<T>*>(at + between);
            value[2] = static_cast<float>(pair.first);
            value[3] = static_cast<float>(pair.second);
        }
        const float up = interleaved ? value[1] : value[2];
        if (interleaved) value[1] = value[2];
        value[2] = up;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            sum[i + side] += value[side];
            sum[i + 2 + side] += value[side];
            sum[kSums / 2 + i + side] += value[2 + side];
            sum[kSums / 2 + i + 2 + side] += value[2 + side];
        }
    }
}

// 128 columns of the warp's rows, from sums kFirst on, to `column` of the result and behind. `staged` is the warp's;
// `target` is of row lane % 16.
template <typename T, int kFirst>
__device__ __forceinline__ void store_columns(const Work& work, const float (&sum)[kSums], uint8_t* staged,
                                              int32_t target, int32_t column) {
    const int32_t lane = threadIdx.x % 32;
    const uint32_t to = gemm::shared_address(staged);
#pragma unroll
    for (int i = 0; i < kStagedChunks; i += 2) {
        const T* type = nullptr;
        const float* s = sum + kFirst + 4 * i;
        gemm::store_matrices(to + staged_offset(lane % 16, i + lane / 16), gemm::pair_of(s[0], s[1], type),
                             gemm::pair_of(s[2], s[3], type), gemm::pair_of(s[4], s[5], type),
                             gemm::pair_of(s[6], s[7], type));
    }
    __syncwarp();
    const int32_t chunk = lane % 16, at = column + chunk * kChunkElements;
    T* out = static_cast<T*>(work.out) + at;
#pragma unroll
    for (int i = 0; i < kStagedRows / 2; ++i) {
        const int32_t row = 2 * i + lane / 16, to_row = __shfl_sync(0xffffffffu, target, row);
        const auto* from = reinterpret_cast<const fabric::Vec16*>(staged + staged_offset(row, chunk));
        if (to_row >= 0 && at < work.width) fabric::store(out + int64_t{to_row} * work.width, *from);
    }
    __syncwarp();
}

// A consumer's 128 threads: its rows of the product.
template <typename T, Product kProduct>
__device__ __forceinline__ void finish_part(const Work& work, const Part& part, uint8_t* staged, int32_t target,
                                            float (&sum)[kSums]) {
    constexpr bool kGated = kProduct == Product::kGated;
    const int32_t column = part.column * (kGated ? kBoxRows : kWeightRows);
    if (work.bias != nullptr) add_bias<T, kProduct>(work, part, column, sum);
    if constexpr (kProduct != Product::kDown) {
        if constexpr (kGated) {
            if (work.limit > 0.0f) cut_gates(sum, work.limit);
        }
        activate<kGated>(work.activation, sum, work.alpha);
    }
    store_columns<T, 0>(work, sum, staged, target, column);
    if constexpr (!kGated) store_columns<T, kSums / 2>(work, sum, staged, target, column + kStagedColumns);
}

// All 128 threads of consumer 0 or 1.
template <typename T, Product kProduct>
__device__ __forceinline__ void compute_parts(const Work& work, Shared& shared, int32_t consumer) {
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, blocks = work.blocks;
    gemm::Position<kStages> at;
    Part part{};
    for (Parts parts(work); parts.take(part);) {
        if (part.rows <= consumer * gemm::kConsumerRows) {
            for (int32_t block = 0; block < blocks; ++block) {
                await_phase(&shared.full[at.stage], at.parity);
                if (lane < gemm::kClusterCtas) gemm::arrive_at(&shared.empty[at.stage], lane);
                at.advance();
            }
            continue;
        }
        float sum[kSums];
        int32_t before = 0;
        for (int32_t block = 0; block < blocks; ++block) {
            await_phase(&shared.full[at.stage], at.parity);
            if constexpr (kProduct != Product::kDown) order_chunks_before_multiplies();
            const uint32_t own_a = consumer * (Shared::kBytesOfA / gemm::kConsumers);
            const uint64_t a = gemm::operand(gemm::shared_address(shared.a[at.stage]) + own_a);
            const uint64_t b = gemm::operand(gemm::shared_address(shared.b[at.stage]));
            gemm::open_multiplies();
#pragma unroll
            for (int step = 0; step < kDepth / gemm::kInstructionK; ++step)
                gemm::multiply_add(sum, gemm::along_k(a, step), gemm::along_k(b, step), block + step != 0,
                                   static_cast<const T*>(nullptr));
            gemm::close_multiplies();
            if (block != 0) {
                gemm::await_multiplies<1>();
                if (lane < gemm::kClusterCtas) gemm::arrive_at(&shared.empty[before], lane);
            }
            before = at.stage;
            at.advance();
        }
        const int32_t warp_row = consumer * gemm::kConsumerRows + warp * kStagedRows;
        const int32_t target = target_of<kProduct>(work, part, warp_row);
        gemm::await_multiplies<0>();
        gemm::settle(sum);
        if (lane < gemm::kClusterCtas) gemm::arrive_at(&shared.empty[before], lane);
        finish_part<T, kProduct>(work, part, shared.staged[consumer * 4 + warp], target, sum);
    }
}

template <typename T, Product kProduct>
__global__ void __launch_bounds__(gemm::kThreads, 1) grouped_gemm(const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    auto& shared = shared_memory<Shared>();
    init_pipeline<kProduct>(shared);
    gemm::await_cluster();
    let_next_kernel_launch();
    await_kernel_ahead();
    const int32_t warp = threadIdx.x / 32;
    if (warp < 4) {
        gemm::leave_registers<gemm::kLoaderRegisters>();
        if (kProduct != Product::kDown || threadIdx.x == 0) load_parts<kProduct>(work, shared);
    } else {
        gemm::take_registers<gemm::kConsumerRegisters>();
        compute_parts<T, kProduct>(work, shared, warp / 4 - 1);
    }
    // Until both CTAs have made their last arrivals, in whichever of them the barriers lie.
    __syncwarp();
    gemm::await_cluster();
#endif
}

int enqueue_bf16(const Work& work, Product product, int32_t num_ctas, void* stream);
int enqueue_fp16(const Work& work, Product product, int32_t num_ctas, void* stream);

}  // namespace weave::moe_experts
