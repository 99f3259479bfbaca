// The kernel of pushed_tiles.h (sm_90a): one persistent grid computes the product, sends its tiles, sums and finishes
// the rows that this rank owns, and hands them out (FlashOverlap, sections 3 and 4, without its second kernel).
//
// The storing warps of gemm/mainloop.cuh push every tile into the staging buffer of the owner of its rows, which has a
// slot for each source, this rank included. The consumers of the last few CTAs compute no tiles: they take rows as
// their panels are complete. When a CTA has no more tiles, its consumers join them. Rows are claimed one by one, in
// the order of their panels, which is the order in which tiles are computed.
//
// Memory order, by what is shared:
//
//   partial rows in the owner's staging buffer, slot [source]
//     store   the source's copies (TMA)
//     fence   wait_group without .read in the storing thread; release, in signal_add
//     flag    partial[source][panel], which counts two consumers a tile
//     wait    one lane a source of the team that finishes a row, acquire; barrier of the team; then plain loads
//     again   in the source's next call: it has waited for `rows` of all the owner's rows, which are made of these
//   finished rows in every rank's output buffer
//     store   the team, plain
//     fence   barrier of the team; release, in signal_add
//     flag    rows[owner][0], which counts rows
//     wait    CTA 0 of every rank, before its kernel ends; where rows are copied out, every team. Acquire
//     again   in the owner's next call, once this rank's tiles of that call have come: this kernel has ended then
//   the row to claim next, rows[this rank][1]
//     store   atomics of this rank alone; nothing else goes with it
#pragma once

#include <algorithm>

#include "all_reduce_norm/pushed_tiles.h"
#include "all_reduce_norm/row.cuh"
#include "fabric/call.cuh"
#include "gemm/gemm.cuh"

namespace weave::gpu {

using fabric::Watch;

constexpr int kTeamThreads = 128;
constexpr int kTeamWarps = kTeamThreads / 32;

struct PushedTiles {
    gemm::Work work;
    Call call;
    OutputLayout layout;
    int64_t slot_bytes;  // of a source in the staging buffer
};

// The threads of a consumer that finishes rows. Sums are made in one order.
struct ConsumerTeam {
    float (*parts)[kTeamWarps];
    int32_t consumer;
    uint32_t num_reductions = 0;

    __device__ __forceinline__ int32_t thread() const { return threadIdx.x % kTeamThreads; }
    __device__ __forceinline__ void await_all() const {
        asm volatile("bar.sync %0, %1;" ::"r"(consumer + 1), "n"(kTeamThreads) : "memory");
    }
    template <class Combine>
    __device__ __forceinline__ float reduce(float value, const Combine& combine) {
        float* row = parts[num_reductions++ & 1];
        value = combine(value);
        if ((threadIdx.x & 31) == 0) row[thread() >> 5] = value;
        await_all();
        return combine((threadIdx.x & 31) < kTeamWarps ? row[threadIdx.x & 31] : 0.0f);
    }
    __device__ __forceinline__ float sum(float value) {
        return reduce(value, [](float part) { return warp_sum(part); });
    }
    __device__ __forceinline__ float max(float value) {
        return reduce(value, [](float part) { return warp_max(part); });
    }
};

// Claims a row of those that this rank owns: the next one, or one beyond the last.
__device__ __forceinline__ int32_t claim_row(uint64_t* word, uint64_t epoch) {
    const uint64_t none = fabric::signal_word(epoch, 0);
    atomicMax(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(none));
    return static_cast<int32_t>(atomicAdd(reinterpret_cast<unsigned long long*>(word), 1ull) - none);
}

template <typename T, int kVecs, bool kPlain>
__device__ __forceinline__ void finish_rows(const PushedTiles& given, const Watch& watch, uint64_t epoch,
                                            float (*parts)[kTeamWarps], volatile int32_t* claims, int32_t consumer) {
    constexpr int E = kElements<T>;
    const Call& call = given.call;
    const fabric::GroupView& group = call.group;
    fabric::Channel* own = group.channel(group.rank);
    ConsumerTeam team{parts, consumer};
    const int32_t thread = team.thread();
    const Lanes lanes{thread, kTeamThreads, call.hidden / E};
    const int32_t begin = call.begin[group.rank], count = call.begin[group.rank + 1] - begin;
    const uint64_t complete = fabric::signal_word(epoch, given.work.order.columns * gemm::kConsumers);
    const char* staging = group.base[group.rank] + call.buffers.staging_offset;
    uint64_t* next_row = &own->rows[group.rank][1];

    if (thread == 0) claims[0] = claim_row(next_row, epoch);
    team.await_all();
    int32_t panel = -1;
    uint32_t num_finished = 0;
    for (int32_t row = claims[0]; row < count;) {
        int32_t next = 0;
        if (thread == 0) next = claim_row(next_row, epoch);
        if (panel != row / gemm::kPanelRows) {
            panel = row / gemm::kPanelRows;
            if (thread < group.world) fabric::wait(&own->partial[thread][panel], complete, watch, thread, fabric::Slot::kPartial);
            team.await_all();
        }
        float x[kVecs][E];
        Vec16 residual[kVecs];
        const int64_t row_bytes = given.layout.row_bytes;
        const char* part = staging + row * row_bytes;
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
            if (lanes.has(j) && call.residual != nullptr)
                residual[j] =
                    fabric::load(static_cast<const char*>(call.residual) + (begin + row) * row_bytes + lanes.at(j) * 16);
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] = 0;
        for (int32_t source = 0; source < group.world; ++source, part += given.slot_bytes) {
            Vec16 raw[kVecs];
#pragma unroll
            for (int j = 0; j < kVecs; ++j)
                if (lanes.has(j)) raw[j] = fabric::load(part + lanes.at(j) * 16);
#pragma unroll
            for (int j = 0; j < kVecs; ++j) {
                if (!lanes.has(j)) continue;
                float value[E];
                fabric::widen(raw[j], value, static_cast<const T*>(nullptr));
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] += value[i];
            }
        }
        finish_and_hand_out<T, kPlain>(x, residual, call, given.layout, lanes, begin + row, team,
                                       [&](int64_t at, const auto& piece) {
                                           for (int32_t rank = 0; rank < group.world; ++rank)
                                               fabric::store(group.base[rank] + at, piece);
                                       });
        ++num_finished;
        if (thread == 0) claims[num_finished & 1] = next;
        team.await_all();
        row = claims[num_finished & 1];
    }
    if (num_finished != 0 && thread < group.world)
        fabric::signal_add(&group.channel(thread)->rows[group.rank][0], epoch, num_finished);
}

// Whether rows have to be copied from the output buffer into tensors of the caller.
__device__ __forceinline__ bool copies_out(const Call& call) {
    const char* output = call.group.base[call.group.rank] + call.buffers.output_offset;
    return (call.normalized != nullptr && call.normalized != output) || call.quant == QuantKind::kPerToken ||
           call.sum_whole != 0;
}

template <typename T, int kColumns, int kVecs, bool kPlain>
__global__ void __launch_bounds__(gemm::kThreads, 1) push_tiles(const __grid_constant__ PushedTiles given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    auto& shared = gemm::shared_memory<kColumns>();
    __shared__ float parts[gemm::kConsumers][2][kTeamWarps];
    __shared__ int32_t claims[gemm::kConsumers][2];
    const Call& call = given.call;
    gemm::init_pipeline(shared);
    gemm::await_cluster();
    const fabric::CallState state = fabric::begin_call<false>(call.group);
    __syncthreads();
    const uint64_t epoch = state.epoch();
    const Watch watch{call.group, fabric::tag_word(epoch, call.tokens, call.site)};
    const bool computes = gemm::cluster_index() < given.work.num_clusters;
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < 4) {
        gemm::limit_registers<false>();
        if (warp == 0) {
            if (lane == 0 && computes) gemm::load_tiles(given.work, shared, [](const gemm::Tile&) {});
        } else if (warp == 1) {
            fabric::send_tags(watch, state, lane);
            fabric::end_call<false>(watch, state, lane);
        } else if (lane == 0 && computes) {
            gemm::store_tiles(given.work, shared, warp - 2, [&](const gemm::Tile& tile, int32_t row) {
                fabric::Channel* owner = call.group.channel(tile.owner);
                if (row / gemm::kPanelRows < fabric::kMaxCtas)
                    fabric::signal_add(&owner->partial[call.group.rank][row / gemm::kPanelRows], epoch, 1);
            });
        }
    } else {
        gemm::limit_registers<true>();
        const int32_t consumer = warp / 4 - 1;
        if (computes) gemm::compute_tiles<T>(given.work, shared, consumer);
        finish_rows<T, kVecs, kPlain>(given, watch, epoch, parts[consumer], claims[consumer], consumer);
        const bool copies = !kPlain && copies_out(call);
        const int32_t thread = threadIdx.x % kTeamThreads;
        if ((copies || (blockIdx.x == 0 && consumer == 0)) && thread < call.group.world) {
            const int32_t rows = call.begin[thread + 1] - call.begin[thread];
            if (rows > 0)
                fabric::wait(&call.group.channel(call.group.rank)->rows[thread][0], fabric::signal_word(epoch, rows),
                             watch, thread, fabric::Slot::kRows);
        }
        if (copies) {
            ConsumerTeam{parts[consumer], consumer}.await_all();
            for (int32_t row = blockIdx.x * gemm::kConsumers + consumer; row < call.tokens;
                 row += gridDim.x * gemm::kConsumers)
                copy_row_out(call, given.layout, row, thread, kTeamThreads);
        }
    }
    // The other CTA of the cluster may still arrive at barriers here.
    __syncwarp();
    gemm::await_cluster();
#endif
}

template <typename T, int kColumns>
int enqueue_pushed_tiles_as(const PushedTiles& given, int32_t num_ctas, void* stream) {
    constexpr int kMost = kTeamThreads * kElements<T>;
    if (given.call.hidden > 16 * kMost) return cudaErrorInvalidValue;
    if (given.call.hidden > 8 * kMost)
        return gemm::enqueue<kColumns>(push_tiles<T, kColumns, 16, false>, given, num_ctas, stream);
    // Rows that are copied out are finished by the code that knows how.
    const bool in_place = given.call.normalized == given.call.group.base[given.call.group.rank] + given.call.buffers.output_offset;
    if (is_plain(given.call) && in_place) return gemm::enqueue<kColumns>(push_tiles<T, kColumns, 8, true>, given, num_ctas, stream);
    return gemm::enqueue<kColumns>(push_tiles<T, kColumns, 8, false>, given, num_ctas, stream);
}

int enqueue_pushed_tiles_bf16(const PushedTiles& given, int32_t tile_columns, int32_t num_ctas, void* stream);
int enqueue_pushed_tiles_fp16(const PushedTiles& given, int32_t tile_columns, int32_t num_ctas, void* stream);

}  // namespace weave::gpu
