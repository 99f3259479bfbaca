// The kernel of pushed_tiles.h (sm_90a): one persistent grid computes the product, sends its tiles, sums and finishes
// the rows that this rank owns, and hands them out (FlashOverlap, sections 3 and 4, without its second kernel).
//
// The storing thread of gemm/mainloop.cuh pushes every tile into the staging buffer of the owner of its rows, which has a
// slot for each source, this rank included. Two more warps of every CTA, the team, take rows as their panels are complete,
// and finish them while the tensor cores go on: they need what a GEMM leaves idle, which is issue slots, and no SM of
// their own. (SMs that finish rows and compute no tiles took 2.7 us a row, and cost the GEMM as many SMs.) Rows are claimed one by one in the order of their panels, the order in which tiles are
// computed.
//
// Memory order, by what is shared:
//
//   partial rows in the owner's staging buffer, slot [source]
//     store   the source's copies (TMA)
//     fence   wait_group without .read in the storing thread; release, in signal_add
//     flag    partial[source][panel], which counts tiles
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

// Warps 2 and 3 of a CTA. Nothing sets registers aside (setmaxnreg): every thread has 168, which is what a consumer with
// 128 sums needs, and what a team of 64 threads does with a row of 16 KiB.
constexpr int kTeamThreads = 64;
constexpr int kTeamWarps = kTeamThreads / 32;
constexpr int kTeamVecs = 16;
constexpr int kVecsAtOnce = 4;

struct PushedTiles {
    gemm::Work work;
    Call call;
    OutputLayout layout;
    int64_t slot_bytes;  // of a source in the staging buffer
};

// The threads that finish rows. Sums are made in one order.
struct RowTeam {
    float (*parts)[kTeamWarps];
    uint32_t num_reductions = 0;

    __device__ __forceinline__ int32_t thread() const { return static_cast<int32_t>(threadIdx.x) - 2 * 32; }
    __device__ __forceinline__ void await_all() const {
        asm volatile("bar.sync 1, %0;" ::"n"(kTeamThreads) : "memory");
    }
    __device__ __forceinline__ float sum(float value) {
        float* row = parts[num_reductions++ & 1];
        value = warp_sum(value);
        if ((threadIdx.x & 31) == 0) row[thread() / 32] = value;
        await_all();
        float total = 0;
#pragma unroll
        for (int warp = 0; warp < kTeamWarps; ++warp)
            total += row[warp];
        return total;
    }
};

// To every rank's arena at `at`, the next rank first.
__device__ __forceinline__ void store_to_all(const fabric::GroupView& group, int64_t at, const Vec16& vec) {
    for (int32_t step = 1; step < group.world; ++step)
        fabric::store(group.base[group.after(step)] + at, vec);
    fabric::store(group.base[group.rank] + at, vec);
}

// What every word of a panel comes to: a count for each of its tiles.
__device__ __forceinline__ uint64_t complete_panel(const PushedTiles& given, uint64_t epoch) {
    return fabric::signal_word(epoch, given.work.order.columns);
}

// After the barrier of the team that follows its last row.
__device__ __forceinline__ void signal_rows(const fabric::GroupView& group, int32_t thread, uint64_t epoch,
                                            uint32_t count) {
    if (count != 0 && thread < group.world)
        fabric::signal_add(&group.channel(thread)->rows[group.rank][0], epoch, count);
}

// Claims a row of those that this rank owns: the number of the first one that is left, or of one beyond the last. Words of
// an epoch before are smaller: open_claims() comes before a thread's first claim.
__device__ __forceinline__ void open_claims(uint64_t* word, uint64_t epoch) {
    atomicMax(reinterpret_cast<unsigned long long*>(word),
              static_cast<unsigned long long>(fabric::signal_word(epoch, 0)));
}
__device__ __forceinline__ int32_t claim_row(uint64_t* word, uint64_t epoch) {
    const uint64_t before = atomicAdd(reinterpret_cast<unsigned long long*>(word), 1ull);
    return static_cast<int32_t>(before - fabric::signal_word(epoch, 0));
}

// A row of the sum as it is rounded, in the order of all kernels: sources by rank, bias, scale, residual. Stores it where
// it is wanted and returns the sum of its squares over this thread's elements.
template <typename T>
__device__ __forceinline__ float sum_row(const PushedTiles& given, const Lanes& lanes, int32_t own_row,
                                         Vec16 (&sum)[kTeamVecs]) {
    constexpr int E = kElements<T>;
    const T* type = nullptr;
    const Call& call = given.call;
    const fabric::GroupView& group = call.group;
    const int64_t row_at = static_cast<int64_t>(call.begin[group.rank] + own_row) * given.layout.row_bytes;
    const char* part = group.base[group.rank] + call.buffers.staging_offset +
                       static_cast<int64_t>(own_row) * given.layout.row_bytes;
    const char* residual = static_cast<const char*>(call.residual) + row_at;
    float scale = call.scale;
    if (call.scale_value.data != nullptr) scale *= load_value<T>(call.scale_value);
    float squares = 0;
#pragma unroll
    for (int first = 0; first < kTeamVecs; first += kVecsAtOnce) {
        if (!lanes.has(first)) break;
        float x[kVecsAtOnce][E];
        Vec16 other[kVecsAtOnce];
#pragma unroll
        for (int j = 0; j < kVecsAtOnce; ++j) {
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] = 0;
            if (call.residual != nullptr && lanes.has(first + j))
                other[j] = fabric::load(residual + lanes.at(first + j) * 16);
        }
        for (int32_t source = 0; source < group.world; ++source) {
            Vec16 raw[kVecsAtOnce];
#pragma unroll
            for (int j = 0; j < kVecsAtOnce; ++j)
                if (lanes.has(first + j))
                    raw[j] = fabric::load(part + source * given.slot_bytes + lanes.at(first + j) * 16);
#pragma unroll
            for (int j = 0; j < kVecsAtOnce; ++j) {
                if (!lanes.has(first + j)) continue;
                float value[E];
                fabric::widen(raw[j], value, type);
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] += value[i];
            }
        }
#pragma unroll
        for (int j = 0; j < kVecsAtOnce; ++j) {
            if (!lanes.has(first + j)) continue;
            const int32_t vec = lanes.at(first + j);
            float value[E];
            if (call.reduced_bias.data != nullptr) {
                load_parameter<T>(call.reduced_bias, vec, value);
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] += value[i];
            }
            if (scale != 1.0f) {
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] *= scale;
            }
            if (call.residual != nullptr) {
                fabric::widen(other[j], value, type);
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] += value[i];
            }
            sum[first + j] = fabric::narrow(x[j], type);
            fabric::widen(sum[first + j], x[j], type);
#pragma unroll
            for (int i = 0; i < E; ++i)
                squares += x[j][i] * x[j][i];
            if (call.sum_whole)
                store_to_all(group, call.buffers.output_offset + given.layout.sum_offset + row_at + vec * 16,
                             sum[first + j]);
            else if (call.sum != nullptr)
                fabric::store(static_cast<char*>(call.sum) + row_at + vec * 16, sum[first + j]);
        }
    }
    return squares;
}

// What every rank gets of a row: its norm.
template <typename T>
__device__ __forceinline__ void hand_out_row(const PushedTiles& given, const Lanes& lanes, int32_t own_row,
                                             const Vec16 (&sum)[kTeamVecs], float factor) {
    const Call& call = given.call;
    const int64_t out_at = call.buffers.output_offset +
                           static_cast<int64_t>(call.begin[call.group.rank] + own_row) * given.layout.out_row_bytes;
    const ReadWeight<T> weight;
#pragma unroll
    for (int j = 0; j < kTeamVecs; ++j) {
        if (!lanes.has(j)) break;
        float x[kElements<T>];
        fabric::widen(sum[j], x, static_cast<const T*>(nullptr));
        scale_vector<T, false>(x, factor, call.norm, lanes, j, weight);
        store_to_all(call.group, out_at + lanes.at(j) * 16, fabric::narrow(x, static_cast<const T*>(nullptr)));
    }
}

template <typename T>
__device__ __forceinline__ void finish_rows(const PushedTiles& given, const Watch& watch, uint64_t epoch,
                                            RowTeam& team, volatile int32_t* claims) {
    const Call& call = given.call;
    const fabric::GroupView& group = call.group;
    fabric::Channel* own = group.channel(group.rank);
    const int32_t thread = team.thread();
    const Lanes lanes{thread, kTeamThreads, call.hidden / kElements<T>};
    const int32_t count = call.begin[group.rank + 1] - call.begin[group.rank];
    const float inverse = 1.0f / static_cast<float>(call.hidden);
    const uint64_t complete = complete_panel(given, epoch);
    uint64_t* next_row = &own->rows[group.rank][1];

    if (thread == 0) {
        open_claims(next_row, epoch);
        claims[0] = claim_row(next_row, epoch);
    }
    team.await_all();
    int32_t panel = -1;
    uint32_t num_finished = 0;
    for (int32_t row = claims[0]; row < count;) {
        int32_t next = 0;
        if (thread == 0) next = claim_row(next_row, epoch);  // comes back while this row is finished
        if (panel != row / gemm::kPanelRows) {
            panel = row / gemm::kPanelRows;
            if (thread < group.world)
                fabric::wait(&own->partial[thread][panel], complete, watch, thread, fabric::Slot::kPartial);
            team.await_all();
        }
        Vec16 sum[kTeamVecs];
        const float squares = sum_row<T>(given, lanes, row, sum);
        if (call.normalized != nullptr)
            hand_out_row<T>(given, lanes, row, sum, rsqrtf(team.sum(squares) * inverse + call.norm.spec.eps));
        ++num_finished;
        if (thread == 0) claims[num_finished & 1] = next;
        team.await_all();
        row = claims[num_finished & 1];
    }
    signal_rows(group, thread, epoch, num_finished);
}

// Whether rows have to be copied from the output buffer into tensors of the caller.
__device__ __forceinline__ bool copies_out(const Call& call) {
    const char* output = call.group.base[call.group.rank] + call.buffers.output_offset;
    return (call.normalized != nullptr && call.normalized != output) || call.sum_whole != 0;
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(gemm::kThreads, 1) push_tiles(const __grid_constant__ PushedTiles given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    auto& shared = gemm::shared_memory<kColumns>();
    __shared__ float parts[2][kTeamWarps];
    __shared__ int32_t claims[2];
    const Call& call = given.call;
    gemm::init_pipeline(shared);
    gemm::await_cluster();
    const fabric::CallState state = fabric::begin_call<false>(call.group);
    __syncthreads();
    const uint64_t epoch = state.epoch();
    const Watch watch{call.group, fabric::tag_word(epoch, call.tokens, call.site)};
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        if (lane == 0) gemm::load_tiles(given.work, shared, [](const gemm::Tile&) {});
    } else if (warp == 1) {
        if (lane == 0)
            gemm::store_tiles(given.work, shared, [&](const gemm::Tile& tile, int32_t row) {
                fabric::Channel* owner = call.group.channel(tile.owner);
                if (row / gemm::kPanelRows < fabric::kMaxCtas)
                    fabric::signal_add(&owner->partial[call.group.rank][row / gemm::kPanelRows], epoch, 1);
            });
    } else if (warp >= 4) {
        gemm::compute_tiles<T>(given.work, shared, warp / 4 - 1);
    } else {
        RowTeam team{parts};
        const int32_t thread = team.thread();
        fabric::send_tags(watch, state, thread);
        fabric::end_call<false>(watch, state, thread);
        finish_rows<T>(given, watch, epoch, team, claims);
        const bool copies = copies_out(call);
        if ((copies || blockIdx.x == 0) && thread < call.group.world) {
            const int32_t rows = call.begin[thread + 1] - call.begin[thread];
            if (rows > 0)
                fabric::wait(&call.group.channel(call.group.rank)->rows[thread][0], fabric::signal_word(epoch, rows),
                             watch, thread, fabric::Slot::kRows);
        }
        if (copies) {
            team.await_all();
            for (int32_t row = blockIdx.x; row < call.tokens; row += gridDim.x)
                copy_row_out(call, given.layout, row, thread, kTeamThreads);
        }
    }
    // The other CTA of the cluster may still arrive at barriers here.
    __syncwarp();
    gemm::await_cluster();
#endif
}

int enqueue_pushed_tiles_bf16(const PushedTiles& given, int32_t tile_columns, int32_t num_ctas, void* stream);
int enqueue_pushed_tiles_fp16(const PushedTiles& given, int32_t tile_columns, int32_t num_ctas, void* stream);

}  // namespace weave::gpu
