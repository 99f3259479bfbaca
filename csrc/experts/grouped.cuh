// The kernel of grouped.h (sm_90a): a persistent grid of clusters of two CTAs. A cluster computes tiles of up to 288
// rows of one expert, half of them in each CTA, by 256 rows of its weight, which are the left operand of the
// multiplies: so rows are rounded up to 8, not to 64. Consumer c of a CTA multiplies blocks 2 c and 2 c + 1 of the
// weight. In the first GEMM all 128 threads of the producer warp group gather the rows by cp.async, as TMA cannot
// gather on Hopper; in the second one TMA brings them. TMA brings the weight too, half of it by each CTA for both.
//
// Memory order, by what is shared:
//
//   a stage of the weight in shared memory
//     store   copies (TMA) of thread 0 of both CTAs
//     flag    full[stage], which counts their bytes
//     wait    consumers, before their multiplies
//     again   empty[stage]: 4 warps of 2 consumers of 2 CTAs have waited for the multiplies that read the stage
//   a stage of rows
//     store   first GEMM: chunks (cp.async) of the 128 producer threads, as ordinary stores; second: as the weight
//     flag    full[stage]: each producer thread's arrival after its chunks
//     fence   fence.proxy.async.shared::cta in every consumer thread, after its wait (first GEMM)
//     wait    consumers
//     again   empty[stage]; wgmma has read then, and ordinary stores may follow
//   results in a consumer's own part of shared memory
//     store   its 128 threads
//     fence   await_consumer
//     again   await_consumer, after the reads
//   table, order, rows of the first GEMM in memory
//     wait    griddepcontrol.wait, by every thread before its first read: the kernel ahead has ended
//
// Rows after the tile's last one are read, of whatever they are, and not stored: columns of a product do not mix.
#pragma once

#include "experts/copies.cuh"
#include "experts/finish.cuh"
#include "experts/parts.cuh"

namespace weave::moe_experts {

using fabric::await_phase;

constexpr int kStages = 4;
static_assert(kDepth == gemm::kBlockK && kTileRows == gemm::kClusterCtas * kPanelRows);
static_assert(kBlocks == 2 * gemm::kConsumers && kBlocks == 2 * gemm::kClusterCtas);

struct Shared {
    uint8_t weight[kStages][kBlocks][kBlockBytes];
    uint8_t rows[kStages][kPanelBytes];
    uint8_t staged[gemm::kConsumers][kStagedOctets * kOctetRows * kBlockRows * 2];
    uint64_t full[kStages], empty[kStages];
};

__device__ __forceinline__ void init_pipeline(Shared& shared, bool rows_by_chunks) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            gemm::init_barrier(&shared.full[i], rows_by_chunks ? 1 + kGatherThreads : 1);
            gemm::init_barrier(&shared.empty[i], gemm::kClusterCtas * gemm::kConsumers * 4);
        }
        gemm::publish_barriers();
    }
}

// Thread 0: this CTA's two blocks of the weight, for both, and the barrier's bytes; `row_bytes` come besides.
template <Product kProduct, bool kTransposed, class W>
__device__ __forceinline__ void load_weight(const W& work, Shared& shared, const Part& part, int32_t block,
                                            int32_t stage, int32_t row_bytes) {
    constexpr bool kGated = kProduct == Product::kGated;
    fabric::arrive_expecting(&shared.full[stage], kBlocks * kBlockBytes + row_bytes);
#pragma unroll
    for (int i = 0; i < kBlocks / gemm::kClusterCtas; ++i) {
        const int32_t which = gemm::cluster_rank() * 2 + i;
        const int32_t row = kGated ? part.column * (kWeightRows / 2) + which / 2 * kBlockRows
                                   : part.column * kWeightRows + which * kBlockRows;
        const WeightPlace place = place_of(work, kGated ? i : 0, part.expert);
        load_box_to_both(shared.weight[stage][which], place.map, kTransposed ? row : block * kDepth,
                         kTransposed ? block * kDepth : row, place.expert, &shared.full[stage]);
    }
}

// Of the producer: stages filled so far, in one register.
struct Filled {
    static_assert((kStages & (kStages - 1)) == 0);
    uint32_t count = 0;
    __device__ __forceinline__ int32_t stage() const { return static_cast<int32_t>(count % kStages); }
    // Of the phase in which the stage becomes empty.
    __device__ __forceinline__ uint32_t parity() const { return count / kStages % 2 ^ 1; }
};

// Of the kernel of one GEMM: what thread 0 does ahead of a part's stages, and between them.
struct OneGemm {
    static constexpr bool kGathersToo = false;  // whether other parts' rows come by chunks
    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void between(int32_t, int32_t) {}
};

// A part of the first GEMM: all threads of the producer warp group.
template <Product kProduct, bool kTransposed, class W, class Kernel>
__device__ __forceinline__ void gather_part(const W& work, Shared& shared, const Part& part, Filled& filled,
                                            Kernel& kernel) {
    const int32_t thread = here(threadIdx.x), blocks = work.blocks;
    const int32_t chunk = gathered_chunk(thread), chunks = work.depth / kChunkElements;
    const uint32_t to = gemm::shared_address(shared.rows) + chunk_offset(gathered_row(thread, 0), chunk);
    const int32_t passes = (part.octets * kOctetRows + kRowsAPass - 1) / kRowsAPass;
    const auto choices = static_cast<uint32_t>(work.choices);  // no sign: that would take registers
    uint32_t from[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int32_t position = min(part.first + gathered_row(thread, pass), part.last);
        from[pass] = static_cast<uint32_t>(work.order[position]) / choices * work.x_chunks + chunk;
    }
    kernel.begin();
    for (int32_t block = 0; block < blocks; ++block) {
        const int32_t stage = filled.stage();
        await_phase(&shared.empty[stage], filled.parity());
        if (thread == 0) {
            load_weight<kProduct, kTransposed>(work, shared, part, block, stage, 0);
            kernel.between(block, blocks);
        }
        const bool inside = block * kChunks + chunk < chunks;
        const uint8_t* x = work.x + block * (kDepth * 2);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
            if (pass < passes)
                copy_chunk(to + stage * kPanelBytes + pass * (kRowsAPass * kChunks * 16), x + int64_t{from[pass]} * 16,
                           inside);
        arrive_after_chunks(&shared.full[stage]);
        ++filled.count;
    }
}

// A part of the second GEMM: thread 0 alone, or with it another one that loads the rows.
enum class Loads : int32_t { kAll = 0, kWeight = 1, kRows = 2 };

template <Product kProduct, bool kTransposed, Loads kLoads, class W, class Kernel>
__device__ __forceinline__ void load_part(const W& work, Shared& shared, const Part& part, Filled& filled,
                                          Kernel& kernel) {
    constexpr int32_t kLoadBytes = kLoadRows * kDepth * 2;
    const int32_t blocks = work.blocks, loads = (part.octets * kOctetRows + kLoadRows - 1) / kLoadRows;
    kernel.begin();
    for (int32_t block = 0; block < blocks; ++block) {
        const int32_t stage = filled.stage();
        await_phase(&shared.empty[stage], filled.parity());
        if constexpr (kLoads != Loads::kRows) {
            if constexpr (Kernel::kGathersToo) fabric::arrive_times(&shared.full[stage], kGatherThreads);
            load_weight<kProduct, kTransposed>(work, shared, part, block, stage, loads * kLoadBytes);
            kernel.between(block, blocks);
        }
        if constexpr (kLoads != Loads::kWeight) {
#pragma unroll
            for (int32_t i = 0; i < kPanelRows / kLoadRows; ++i)
                if (i < loads)
                    gemm::load_tile(shared.rows[stage] + i * kLoadBytes, &work.rows, block * kDepth,
                                    part.first + i * kLoadRows, &shared.full[stage]);
        }
        ++filled.count;
    }
}

// First GEMM: all threads of the producer warp group; second: its first thread.
template <Product kProduct, bool kTransposed, class W>
__device__ __forceinline__ void load_parts(const W& work, Shared& shared) {
    OneGemm kernel;
    Filled filled;
    Part part{};
    for (Parts<false> parts(work); parts.take(part);) {
        if constexpr (is_second(kProduct)) {
            load_part<kProduct, kTransposed, Loads::kAll>(work, shared, part, filled, kernel);
        } else {
            gather_part<kProduct, kTransposed>(work, shared, part, filled, kernel);
        }
    }
}

// A part's sums, of 8 * kWide rows.
template <typename T, bool kTransposed, int kWide>
__device__ __forceinline__ void multiply_blocks(int32_t blocks, bool rows_by_chunks, Shared& shared, int32_t consumer,
                                                gemm::Position<kStages>& at, float (&sum)[kSums]) {
    constexpr int kOwn = kWide * 4;  // sums of a block
    const int32_t lane = threadIdx.x % 32;
    float own[2 * kOwn];
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i)
        own[i] = 0.0f;
    int32_t before = 0;
    for (int32_t block = 0; block < blocks; ++block) {
        await_phase(&shared.full[at.stage], at.parity);
        if (rows_by_chunks) order_chunks_before_multiplies();
        const uint64_t first = gemm::operand(gemm::shared_address(shared.weight[at.stage][2 * consumer]));
        const uint64_t second = gemm::operand(gemm::shared_address(shared.weight[at.stage][2 * consumer + 1]));
        const uint64_t rows = gemm::operand(gemm::shared_address(shared.rows[at.stage]));
        gemm::open_multiplies();
#pragma unroll
        for (int step = 0; step < kDepth / gemm::kInstructionK; ++step) {
            const T* type = nullptr;
            multiply<kWide * kOctetRows, kTransposed, 0>(own, along_depth<kTransposed>(first, step),
                                                         gemm::along_k(rows, step), type);
            multiply<kWide * kOctetRows, kTransposed, kOwn>(own, along_depth<kTransposed>(second, step),
                                                            gemm::along_k(rows, step), type);
        }
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
    for (int i = 0; i < kBlockSums; ++i) {
        sum[i] = i < kOwn ? own[i] : 0.0f;
        sum[kBlockSums + i] = i < kOwn ? own[kOwn + i] : 0.0f;
    }
}

// A part's sums, of `octets` rows of 8: all 128 threads of consumer 0 or 1.
template <typename T, bool kTransposed>
__device__ __forceinline__ void multiply_part(int32_t blocks, int32_t octets, bool rows_by_chunks, Shared& shared,
                                              int32_t consumer, gemm::Position<kStages>& at, float (&sum)[kSums]) {
#define WEAVE_ROWS(WIDE)                                                                          \
    case WIDE:                                                                                    \
        multiply_blocks<T, kTransposed, WIDE>(blocks, rows_by_chunks, shared, consumer, at, sum); \
        break;
    switch (octets) {
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
        WEAVE_ROWS(17)
        WEAVE_ROWS(18)
    }
#undef WEAVE_ROWS
}

// Where the rows go that this thread stores.
__device__ __forceinline__ void find_targets(const Work& work, const Part& part, bool second,
                                             int32_t (&targets)[kPasses]) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int32_t position = part.first + gathered_row(threadIdx.x % 128, pass);
        targets[pass] = second ? work.order[min(position, part.last)] : position;
    }
}

// All 128 threads of consumer 0 or 1.
template <typename T, Product kProduct, bool kTransposed>
__device__ __forceinline__ void compute_parts(const Work& work, Shared& shared, int32_t consumer) {
    gemm::Position<kStages> at;
    Part part{};
    for (Parts<false> parts(work); parts.take(part);) {
        int32_t targets[kPasses];
        find_targets(work, part, is_second(kProduct), targets);
        if constexpr (kProduct == Product::kToRanks) {
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass)
                targets[pass] = packed_place(targets[pass], static_cast<int32_t>(work.buffers.rows));
        }
        float sum[kSums];
        multiply_part<T, kTransposed>(work.blocks, part.octets, !is_second(kProduct), shared, consumer, at, sum);
        finish_part<T, kProduct>(work, part, consumer, shared.staged[consumer], targets, sum);
    }
}

template <typename T, Product kProduct, bool kTransposed, class W>
__device__ __forceinline__ void run_grouped(const W& work) {
    auto& shared = shared_memory<Shared>();
    init_pipeline(shared, !is_second(kProduct));
    gemm::await_cluster();
    let_next_kernel_launch();
    await_kernel_ahead();
    const int32_t warp = threadIdx.x / 32;
    if (warp < 4) {
        gemm::leave_registers<gemm::kLoaderRegisters>();
        if (!is_second(kProduct) || threadIdx.x == 0) load_parts<kProduct, kTransposed>(work, shared);
    } else {
        gemm::take_registers<gemm::kConsumerRegisters>();
        compute_parts<T, kProduct, kTransposed>(work, shared, warp / 4 - 1);
    }
    // Until both CTAs have made their last arrivals, in whichever of them the barriers are.
    __syncwarp();
    gemm::await_cluster();
}

template <typename T, Product kProduct, bool kTransposed>
__global__ void __launch_bounds__(gemm::kThreads, 1) grouped_gemm(const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    run_grouped<T, kProduct, kTransposed>(work);
#endif
}

template <typename T, Product kProduct, bool kTransposed>
__global__ void __launch_bounds__(gemm::kThreads, 1) ranged_grouped_gemm(const __grid_constant__ RangedWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    run_grouped<T, kProduct, kTransposed>(work);
#endif
}

// `transposed`: rows of the weight are contiguous. For Work in grouped.dtypes.sm90a.cu, for RangedWork in
// grouped_ranges.dtypes.sm90a.cu.
template <typename T, class W>
int launch_product(const W& work, Product product, bool transposed, int32_t num_ctas, void* stream);

}  // namespace weave::moe_experts
