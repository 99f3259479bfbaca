// The other kernel of grouped.h (sm_90a), for experts of many rows: tiles of up to 256 rows of one expert by 256 rows
// of its weight. Here each CTA of a cluster multiplies half of the tile's weight by all of its rows, so that a multiply
// takes up to 256 of them and reads less of shared memory for each: what bounds the one of grouped.cuh. Each CTA loads
// half of the rows for both (TMA multicast), so they are contiguous here: gather_rows.h. Results leave by
// bulk copies, a row each, while the next tile is multiplied.
//
// A CTA's warps: 0 loads, 1 stores, 4 to 7 are consumer 0, 8 to 11 consumer 1. Consumer c multiplies rows 64 c and on
// of the CTA's half of the weight. In the first GEMM with gates these are 8 gates, 8 ups of the same columns, and so
// on: so a thread has both of a column.
//
// Memory order, by what is shared:
//
//   a stage of the weight or of rows in shared memory
//     store   copies (TMA) of warp 0, those of rows of both CTAs
//     flag    full[stage], which counts their bytes
//     wait    consumers, before their multiplies
//     again   empty[stage]: 4 warps of 2 consumers of 2 CTAs have waited for the multiplies that read the stage
//   a consumer's results in shared memory
//     store   its 128 threads
//     flag    stored[consumer], which counts their arrivals
//     wait    the 96 threads that store, before they read
//     again   copied[consumer], which counts theirs
//   table, order, rows in memory
//     wait    griddepcontrol.wait, by every thread before its first read: the kernel ahead has ended
#pragma once

#include "experts/copies.cuh"
#include "experts/finish.cuh"
#include "experts/parts.cuh"

namespace weave::moe_experts {

constexpr int kWideStages = 3;
constexpr int kWideSums = kWideRows / 2;  // of a thread
constexpr int kLanes = 32;
constexpr int kStoreThreads = 3 * kLanes;
constexpr int kWideWeightBytes = kWideWeightRows * kDepth * 2;
constexpr int kWideRowBytes = kDepth * 2;

// Columns of the result that a consumer makes, and what is between its rows in shared memory: 16 bytes more than
// they have, so that eight of them are in different banks.
WEAVE_HOST_DEVICE constexpr int consumer_columns(bool gated) {
    return gated ? kBlockRows / 2 : kBlockRows;
}
WEAVE_HOST_DEVICE constexpr int staged_stride(bool gated) {
    return consumer_columns(gated) * 2 + 16;
}

struct WideShared {
    uint8_t weight[kWideStages][kWideWeightBytes];
    uint8_t rows[kWideStages][kWideRows * kWideRowBytes];
    uint8_t staged[gemm::kConsumers][kWideRows * staged_stride(false)];
    uint64_t full[kWideStages], empty[kWideStages];
    uint64_t stored[gemm::kConsumers], copied[gemm::kConsumers];
};

__device__ __forceinline__ void init_pipeline(WideShared& shared) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < kWideStages; ++i) {
            gemm::init_barrier(&shared.full[i], 1);
            gemm::init_barrier(&shared.empty[i], gemm::kClusterCtas * gemm::kConsumers * 4);
        }
        for (int i = 0; i < gemm::kConsumers; ++i) {
            gemm::init_barrier(&shared.stored[i], 128);
            gemm::init_barrier(&shared.copied[i], kStoreThreads);
        }
        gemm::publish_barriers();
    }
}

// The first column of the result that this CTA's consumer makes.
template <Product kProduct>
__device__ __forceinline__ int32_t first_column(const Part& part, int32_t consumer) {
    constexpr int32_t kColumns = consumer_columns(is_gated(kProduct));
    const int32_t cta = static_cast<int32_t>(gemm::cluster_rank());
    return ((part.column * gemm::kClusterCtas + cta) * gemm::kConsumers + consumer) * kColumns;
}

// One thread. Rows come in boxes of 64, of which each CTA brings every second one to both; what is after the tile's
// rows comes with the last box.
template <Product kProduct, class W>
__device__ __forceinline__ void load_wide(const W& work, WideShared& shared) {
    constexpr uint16_t kBoth = (1 << gemm::kClusterCtas) - 1;
    const int32_t blocks = work.blocks, cta = static_cast<int32_t>(gemm::cluster_rank());
    gemm::Position<kWideStages> at;
    Part part{};
    for (Parts<true> parts(work); parts.take(part);) {
        const int32_t boxes = (part.octets * kOctetRows + kWideBoxRows - 1) / kWideBoxRows;
        const int32_t weight_row = first_column<kProduct>(part, 0);
        const WeightPlace place = place_of(work, 0, part.expert);
        for (int32_t block = 0; block < blocks; ++block) {
            fabric::await_phase(&shared.empty[at.stage], at.parity ^ 1);
            uint64_t* full = &shared.full[at.stage];
            fabric::arrive_expecting(full, kWideWeightBytes + boxes * kWideBoxRows * kWideRowBytes);
            if constexpr (kProduct == Product::kGated) {
                load_gates_and_ups(shared.weight[at.stage], place.map, block * kDepth, weight_row / kOctetRows,
                                   place.expert, full);
            } else {
                load_box(shared.weight[at.stage], place.map, block * kDepth, weight_row, place.expert, full);
            }
            for (int32_t box = cta; box < boxes; box += gemm::kClusterCtas)
                gemm::load_tile_to(kBoth, shared.rows[at.stage] + box * kWideBoxRows * kWideRowBytes, &work.rows,
                                   block * kDepth, part.first + box * kWideBoxRows, full);
            at.advance();
        }
    }
}

// Sums of 64 rows of the weight by 16 * kWide rows.
template <typename T, int kWide>
__device__ __forceinline__ void multiply_wide(const Work& work, WideShared& shared, int32_t consumer,
                                              gemm::Position<kWideStages>& at, float (&sum)[kWideSums]) {
    const int32_t lane = threadIdx.x % kLanes, blocks = work.blocks;
    float own[kWide * kOctetRows];
#pragma unroll
    for (int i = 0; i < kWide * kOctetRows; ++i)
        own[i] = 0.0f;
    int32_t before = 0;
    for (int32_t block = 0; block < blocks; ++block) {
        fabric::await_phase(&shared.full[at.stage], at.parity);
        const uint64_t weight = gemm::operand(gemm::shared_address(shared.weight[at.stage]) + consumer * kBlockBytes);
        const uint64_t rows = gemm::operand(gemm::shared_address(shared.rows[at.stage]));
        gemm::open_multiplies();
#pragma unroll
        for (int step = 0; step < kDepth / gemm::kInstructionK; ++step)
            multiply<kWide * 16, false, 0>(own, gemm::along_k(weight, step), gemm::along_k(rows, step),
                                           static_cast<const T*>(nullptr));
        gemm::close_multiplies();
        if (block != 0) {
            gemm::await_multiplies<1>();
            if (lane < gemm::kClusterCtas) gemm::arrive_at(&shared.empty[before], lane);
        }
        before = at.stage;
        at.advance();
    }
    gemm::await_multiplies<0>();
    gemm::settle(own);
    if (lane < gemm::kClusterCtas) gemm::arrive_at(&shared.empty[before], lane);
#pragma unroll
    for (int i = 0; i < kWideSums; ++i)
        sum[i] = i < kWide * kOctetRows ? own[i] : 0.0f;
}

// A thread's sums are ordered by octet of rows, row of the weight (own or 8 further: with gates, a gate and its up),
// and row of the octet (of two). With gates results replace the gates.
template <typename T, Product kProduct>
__device__ __forceinline__ void finish_sums(const Work& work, const Part& part, int32_t consumer,
                                            float (&sum)[kWideSums]) {
    constexpr bool kGated = is_gated(kProduct);
    const int32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes % 4;
    if (work.bias != nullptr) {
        const T* bias = static_cast<const T*>(work.bias) + part.expert * work.bias_stride;
        const int32_t own = kGated ? warp * kOctetRows + lane / 4 : warp * 2 * kOctetRows + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t column = first_column<kProduct>(part, consumer) + own + (kGated ? 0 : half * kOctetRows);
            if (column >= work.width) continue;
            const float value = static_cast<float>(bias[column * work.bias_step + (kGated ? half * work.up_bias : 0)]);
#pragma unroll
            for (int octet = 0; octet < kWideRows / kOctetRows; ++octet) {
                sum[octet * 4 + half * 2] += value;
                sum[octet * 4 + half * 2 + 1] += value;
            }
        }
    }
    if constexpr (is_second(kProduct)) return;
    constexpr int kAtOnce = 8;  // octets
#pragma unroll
    for (int first = 0; first < kWideRows / kOctetRows; first += kAtOnce) {
        if (first >= part.octets) break;
        float x[kAtOnce * 4];
#pragma unroll
        for (int i = 0; i < kAtOnce * 4; ++i)
            x[i] = sum[first * 4 + i / 2 % kAtOnce * 4 + i / 2 / kAtOnce * 2 + i % 2];
        if constexpr (kGated) {
            if (work.limit > 0.0f) cut_gates(x, work.limit);
        }
        activate<kGated>(work.activation, x, work.alpha);
#pragma unroll
        for (int i = 0; i < kAtOnce * 4; ++i)
            sum[first * 4 + i / 2 % kAtOnce * 4 + i / 2 / kAtOnce * 2 + i % 2] = x[i];
    }
}

// Into the consumer's shared memory, rows of the result one after the other.
template <typename T, Product kProduct>
__device__ __forceinline__ void stage_rows(const Part& part, uint8_t* staged, const float (&sum)[kWideSums]) {
    constexpr bool kGated = is_gated(kProduct);
    constexpr int kAtOnce = kGated ? 4 : 2;  // octets
    const T* type = nullptr;
    const int32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes % 4;
    const int32_t row = kGated ? lane : lane / 16 * kOctetRows + lane % kOctetRows;
    const int32_t chunk = kGated ? warp : warp * 2 + lane / kOctetRows % 2;
    const uint32_t to = gemm::shared_address(staged) + row * staged_stride(kGated) + chunk * 16;
#pragma unroll
    for (int octet = 0; octet < kWideRows / kOctetRows; octet += kAtOnce) {
        if (octet >= part.octets) break;
        const float* s = sum + octet * 4;
        const uint32_t there = to + octet * kOctetRows * staged_stride(kGated);
        if constexpr (kGated) {
            store_columns_as_rows(there, gemm::pair_of(s[0], s[1], type), gemm::pair_of(s[4], s[5], type),
                                  gemm::pair_of(s[8], s[9], type), gemm::pair_of(s[12], s[13], type));
        } else {
            store_columns_as_rows(there, gemm::pair_of(s[0], s[1], type), gemm::pair_of(s[2], s[3], type),
                                  gemm::pair_of(s[4], s[5], type), gemm::pair_of(s[6], s[7], type));
        }
    }
}

// All 128 threads of consumer 0 or 1.
template <typename T, Product kProduct>
__device__ __forceinline__ void compute_wide(const Work& work, WideShared& shared, int32_t consumer) {
    gemm::Position<kWideStages> at;
    Part part{};
    uint32_t parity = 1;
    for (Parts<true> parts(work); parts.take(part);) {
        float sum[kWideSums];
#define WEAVE_ROWS(WIDE)                                         \
    case WIDE:                                                   \
        multiply_wide<T, WIDE>(work, shared, consumer, at, sum); \
        break;
        switch (part.octets / 2) {
            WEAVE_ROWS(1)
            WEAVE_ROWS(2)
            WEAVE_ROWS(3)
            WEAVE_ROWS(4)
            WEAVE_ROWS(5)
            WEAVE_ROWS(6)
            WEAVE_ROWS(7)
            WEAVE_ROWS(8)
            WEAVE_ROWS(9)
            WEAVE_ROWS(10)
            WEAVE_ROWS(11)
            WEAVE_ROWS(12)
            WEAVE_ROWS(13)
            WEAVE_ROWS(14)
            WEAVE_ROWS(15)
            WEAVE_ROWS(16)
        }
#undef WEAVE_ROWS
        finish_sums<T, kProduct>(work, part, consumer, sum);
        fabric::await_phase(&shared.copied[consumer], parity);
        parity ^= 1;
        stage_rows<T, kProduct>(part, shared.staged[consumer], sum);
        fabric::arrive(&shared.stored[consumer]);
    }
}

// All threads of warps 1 to 3: `thread` of 96. A row is 4 or 8 chunks of 16 bytes; whole rows at a time.
template <typename T, Product kProduct>
__device__ __forceinline__ void store_wide(const Work& work, WideShared& shared, int32_t thread) {
    constexpr bool kGated = is_gated(kProduct);
    constexpr int kRowChunks = consumer_columns(kGated) / kChunkElements;
    constexpr int kRowsAStep = kStoreThreads / kRowChunks;
    constexpr int kAtOnce = 4;  // whose targets are read together
    const int32_t chunk = thread % kRowChunks, first_row = thread / kRowChunks;
    Part part{};
    uint32_t parity = 0;
    for (Parts<true> parts(work); parts.take(part);) {
#pragma unroll
        for (int consumer = 0; consumer < gemm::kConsumers; ++consumer) {
            const int32_t column = first_column<kProduct>(part, consumer) + chunk * kChunkElements;
            const uint8_t* staged = shared.staged[consumer] + chunk * 16;
            T* out = static_cast<T*>(work.out) + column;
            fabric::await_phase(&shared.stored[consumer], parity);
            for (int32_t from = first_row; from < part.rows; from += kRowsAStep * kAtOnce) {
                int32_t targets[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
                    targets[i] = min(part.first + from + i * kRowsAStep, part.last);
                if constexpr (is_second(kProduct)) {
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i)
                        targets[i] = work.order[targets[i]];
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int32_t row = from + i * kRowsAStep;
                    if (row < part.rows && column < work.width)
                        *reinterpret_cast<int4*>(out + int64_t{targets[i]} * work.width) =
                            *reinterpret_cast<const int4*>(staged + row * staged_stride(kGated));
                }
            }
            fabric::arrive(&shared.copied[consumer]);
        }
        parity ^= 1;
    }
}

template <typename T, Product kProduct, class W>
__device__ __forceinline__ void run_wide(const W& work) {
    auto& shared = shared_memory<WideShared>();
    init_pipeline(shared);
    gemm::await_cluster();
    let_next_kernel_launch();
    await_kernel_ahead();
    const int32_t warp = threadIdx.x / kLanes;
    if (warp < 4) {
        gemm::leave_registers<gemm::kLoaderRegisters>();
        if (threadIdx.x == 0) load_wide<kProduct>(work, shared);
        if (warp != 0) store_wide<T, kProduct>(work, shared, threadIdx.x - kLanes);
    } else {
        gemm::take_registers<gemm::kConsumerRegisters>();
        compute_wide<T, kProduct>(work, shared, warp / 4 - 1);
    }
    // Until both CTAs have made their last arrivals, in whichever of them the barriers are.
    __syncwarp();
    gemm::await_cluster();
}

template <typename T, Product kProduct>
__global__ void __launch_bounds__(gemm::kThreads, 1) wide_grouped_gemm(const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    run_wide<T, kProduct>(work);
#endif
}

template <typename T, Product kProduct>
__global__ void __launch_bounds__(gemm::kThreads, 1) ranged_wide_grouped_gemm(const __grid_constant__ RangedWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    run_wide<T, kProduct>(work);
#endif
}

// For Work in wide.dtypes.sm90a.cu, for RangedWork in wide_ranges.dtypes.sm90a.cu.
template <typename T, class W>
int launch_wide(const W& work, Product product, int32_t num_ctas, void* stream);

}  // namespace weave::moe_experts
