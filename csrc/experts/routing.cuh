// The kernels of routing.h. `count_rows` counts the rows of each expert in each chunk of rows. `place_rows` sorts a
// chunk in shared memory, a step of 1024 rows at a time, and puts each step's rows after those of the chunks and steps
// before. Ranks within a step come from the lanes' order: the order is the same at every call.
//
// Memory order, by what is shared:
//
//   experts of rows
//     wait    none in the kernels: count_rows is launched when every kernel ahead has ended, and place_rows begins
//             after all of count_rows has begun. So place_rows sorts its first step while count_rows runs
//   counts of chunks
//     store   count_rows
//     wait    griddepcontrol.wait of every thread of place_rows: count_rows has ended
//   order, table
//     wait    the next kernel waits for the end of place_rows, which has waited for that of count_rows
#pragma once

#include <cstdint>

#include "experts/kernel_ahead.cuh"
#include "experts/routing.h"
#include "experts/tiles.h"

namespace weave::moe_experts {

constexpr int32_t kForeign = -1;
constexpr int32_t kRoutingWarps = kRoutingThreads / 32;
constexpr int32_t kWarpRows = kStepRows / kRoutingWarps;
constexpr int32_t kCountsInFlight = 8;  // loads of a thread: of 64 bins all that 128 chunks have
constexpr uint32_t kAllLanes = 0xffffffff;

struct SortWork {
    RowsToSort of;
    int64_t chunk_rows;
};

template <int kBins>
struct CountShared {
    int32_t counts[kBins];
};

// Counts of experts are read four at a time: a group of threads has all of one chunk's.
template <int kBins>
struct Grouping {
    static constexpr int32_t kBinsAThread = kBins > kRoutingThreads ? kBins / kRoutingThreads : 1;
    static constexpr int32_t kVectors = kBins / 4;
    static constexpr int32_t kGroups = kRoutingThreads / kVectors;
    static constexpr int32_t kParts = kGroups < kRoutingWarps ? kGroups : kRoutingWarps;
};

template <int kBins>
struct PlaceShared {
    uint16_t warp_rows[kRoutingWarps][kBins];  // of each warp and expert in a step: how many, then where they begin
    uint32_t sorted[kStepRows];                // expert << 16 | row of the step
    int32_t shifts[kBins];                     // from a place in the step to a position
    int32_t firsts[kBins + 1];                 // positions
    int32_t first_tiles[kBins + 1];
    int32_t parts[2][Grouping<kBins>::kParts][kBins];  // of all chunks, of those before this one
    int64_t warp_sums[kRoutingWarps];
};

// What a thread holds of its bins: thread t has those from t * kBinsAThread on.
template <int kBins>
using OfBins = int32_t[Grouping<kBins>::kBinsAThread];

__device__ __forceinline__ int32_t row_of_step(int32_t round) {
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return warp * kWarpRows + round * 32 + lane;
}

__device__ __forceinline__ void load_experts(const RowsToSort& of, int64_t first, int32_t (&experts)[kRowsAThread]) {
#pragma unroll
    for (int32_t round = 0; round < kRowsAThread; ++round) {
        const int64_t row = first + row_of_step(round);
        const int64_t expert = row < of.num_rows ? __ldcg(of.experts + row) : kForeign;
        experts[round] = expert >= 0 && expert < of.num_experts ? static_cast<int32_t>(expert) : kForeign;
    }
}

template <int kBins>
__device__ void count_rows(const SortWork& work, CountShared<kBins>& shared) {
    let_next_kernel_launch();
    for (int32_t bin = threadIdx.x; bin < kBins; bin += kRoutingThreads)
        shared.counts[bin] = 0;
    __syncthreads();
    const int64_t begin = blockIdx.x * work.chunk_rows, beyond = begin + work.chunk_rows;
    const int64_t end = beyond < work.of.num_rows ? beyond : work.of.num_rows;
    for (int64_t first = begin; first < end; first += kStepRows) {
        int32_t experts[kRowsAThread];
        load_experts(work.of, first, experts);
#pragma unroll
        for (int32_t round = 0; round < kRowsAThread; ++round)
            if (experts[round] != kForeign) atomicAdd(&shared.counts[experts[round]], 1);
    }
    __syncthreads();
    for (int32_t bin = threadIdx.x; bin < kBins; bin += kRoutingThreads)
        work.of.counts[blockIdx.x * kBins + bin] = shared.counts[bin];
}

// The sum of `value` over the threads before this one; `all`: over all of them.
__device__ __forceinline__ int64_t sum_before(int64_t value, int64_t (&warp_sums)[kRoutingWarps], int64_t& all) {
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t sum = value;
#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
        const int64_t other = __shfl_up_sync(kAllLanes, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int64_t before = sum - value;
    all = 0;
#pragma unroll
    for (int32_t other = 0; other < kRoutingWarps; ++other) {
        if (other < warp) before += warp_sums[other];
        all += warp_sums[other];
    }
    return before;
}

// Of the step's rows of each expert: how many there are, and where they begin in `sorted`.
template <int kBins>
struct SortedStep {
    OfBins<kBins> counts, firsts;
    int32_t num_rows;
};

template <int kBins>
__device__ __forceinline__ void sort_step(const int32_t (&experts)[kRowsAThread], PlaceShared<kBins>& shared,
                                          SortedStep<kBins>& step) {
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto& mine = shared.warp_rows[warp];
    for (int32_t bin = lane; bin < kBins; bin += 32)
        mine[bin] = 0;
    __syncwarp();
    int32_t ranks[kRowsAThread];  // among the warp's rows of the same expert
#pragma unroll
    for (int32_t round = 0; round < kRowsAThread; ++round) {
        const int32_t expert = experts[round];
        const uint32_t same = __match_any_sync(kAllLanes, expert);
        const int32_t ahead = __popc(same & ((1u << lane) - 1)), seen = expert == kForeign ? 0 : mine[expert];
        ranks[round] = seen + ahead;
        __syncwarp();
        if (expert != kForeign && ahead == 0) mine[expert] = static_cast<uint16_t>(seen + __popc(same));
        __syncwarp();
    }
    __syncthreads();
    constexpr int32_t kEach = Grouping<kBins>::kBinsAThread;
    const int32_t first_bin = threadIdx.x * kEach;
    int64_t sum = 0, all;
#pragma unroll
    for (int32_t at = 0; at < kEach; ++at) {
        step.counts[at] = 0;
#pragma unroll
        for (int32_t of = 0; of < kRoutingWarps; ++of)
            if (first_bin < kBins) step.counts[at] += shared.warp_rows[of][first_bin + at];
        sum += step.counts[at];
    }
    auto next = static_cast<int32_t>(sum_before(sum, shared.warp_sums, all));
    step.num_rows = static_cast<int32_t>(all);
#pragma unroll
    for (int32_t at = 0; at < kEach; ++at) {
        step.firsts[at] = next;
#pragma unroll
        for (int32_t of = 0; of < kRoutingWarps; ++of) {
            if (first_bin >= kBins) break;
            const int32_t rows = shared.warp_rows[of][first_bin + at];
            shared.warp_rows[of][first_bin + at] = static_cast<uint16_t>(next);
            next += rows;
        }
    }
    __syncthreads();
#pragma unroll
    for (int32_t round = 0; round < kRowsAThread; ++round)
        if (experts[round] != kForeign)
            shared.sorted[mine[experts[round]] + ranks[round]] =
                static_cast<uint32_t>(experts[round]) << 16 | static_cast<uint32_t>(row_of_step(round));
}

// Rows of the thread's bins in all chunks, and in those before this one.
template <int kBins>
__device__ __forceinline__ void sum_counts(const int32_t* counts, PlaceShared<kBins>& shared, OfBins<kBins>& totals,
                                           OfBins<kBins>& before) {
    using G = Grouping<kBins>;
    const int32_t chunk = blockIdx.x, num_chunks = gridDim.x;
    const int32_t vector = threadIdx.x % G::kVectors, group = threadIdx.x / G::kVectors;
    const int4* from = reinterpret_cast<const int4*>(counts) + vector;
    int32_t sums[2][4] = {};
    for (int32_t first = group; first < num_chunks; first += kCountsInFlight * G::kGroups) {
        int4 read[kCountsInFlight];
#pragma unroll
        for (int32_t at = 0; at < kCountsInFlight; ++at) {
            const int32_t each = first + at * G::kGroups;
            read[at] = each < num_chunks ? __ldcg(from + each * G::kVectors) : int4{};
        }
#pragma unroll
        for (int32_t at = 0; at < kCountsInFlight; ++at) {
            const int32_t found[4] = {read[at].x, read[at].y, read[at].z, read[at].w};
            const bool is_before = first + at * G::kGroups < chunk;
#pragma unroll
            for (int32_t bin = 0; bin < 4; ++bin) {
                sums[0][bin] += found[bin];
                sums[1][bin] += is_before ? found[bin] : 0;
            }
        }
    }
    // Groups within a warp are added up first; a part is a warp then, else a group.
#pragma unroll
    for (int32_t which = 0; which < 2; ++which)
#pragma unroll
        for (int32_t at = 0; at < 4; ++at) {
#pragma unroll
            for (int32_t lanes = G::kVectors; lanes < 32; lanes *= 2)
                sums[which][at] += __shfl_xor_sync(kAllLanes, sums[which][at], lanes);
            const int32_t part = G::kVectors < 32 ? threadIdx.x / 32 : group;
            if (threadIdx.x % 32 < G::kVectors) shared.parts[which][part][4 * vector + at] = sums[which][at];
        }
    __syncthreads();
#pragma unroll
    for (int32_t at = 0; at < G::kBinsAThread; ++at) {
        const int32_t bin = threadIdx.x * G::kBinsAThread + at;
        totals[at] = before[at] = 0;
#pragma unroll
        for (int32_t part = 0; part < G::kParts; ++part) {
            if (bin >= kBins) break;
            totals[at] += shared.parts[0][part][bin];
            before[at] += shared.parts[1][part][bin];
        }
    }
}

// Where each expert's rows and tiles begin. Of both one scan: tiles are in the upper half of its numbers.
template <int kBins>
__device__ __forceinline__ void begin_experts(const OfBins<kBins>& totals, int32_t tile_rows,
                                              PlaceShared<kBins>& shared) {
    constexpr int32_t kEach = Grouping<kBins>::kBinsAThread;
    int64_t counts[kEach], sum = 0, all;
#pragma unroll
    for (int32_t at = 0; at < kEach; ++at) {
        const auto rows = static_cast<uint32_t>(totals[at]), a_tile = static_cast<uint32_t>(tile_rows);
        counts[at] = static_cast<int64_t>((rows + a_tile - 1) / a_tile) << 32 | rows;
        sum += counts[at];
    }
    int64_t next = sum_before(sum, shared.warp_sums, all);
#pragma unroll
    for (int32_t at = 0; at < kEach; ++at) {
        const int32_t bin = threadIdx.x * kEach + at;
        if (bin < kBins) {
            shared.firsts[bin] = static_cast<int32_t>(next & 0xffffffff);
            shared.first_tiles[bin] = static_cast<int32_t>(next >> 32);
        }
        next += counts[at];
    }
    if (threadIdx.x == 0) {
        shared.firsts[kBins] = static_cast<int32_t>(all & 0xffffffff);
        shared.first_tiles[kBins] = static_cast<int32_t>(all >> 32);
    }
}

// Every CTA writes some of the tiles.
template <int kBins>
__device__ __forceinline__ void write_tiles(const RowsToSort& of, const PlaceShared<kBins>& shared) {
    const int32_t num_tiles = shared.first_tiles[kBins], num_ctas = gridDim.x, cta = blockIdx.x;
    if (cta == 0 && threadIdx.x == 0) {
        of.table[0] = num_tiles;
        of.table[kTakenAt] = 0;
    }
    for (int32_t tile = threadIdx.x * num_ctas + cta; tile < num_tiles; tile += kRoutingThreads * num_ctas) {
        int32_t expert = 0;  // the last one whose tiles begin here or before: those without rows begin with the next
#pragma unroll
        for (int32_t step = kBins / 2; step > 0; step /= 2)
            if (shared.first_tiles[expert + step] <= tile) expert += step;
        const int32_t begin = shared.firsts[expert];
        const int32_t first = begin + (tile - shared.first_tiles[expert]) * of.tile_rows;
        reinterpret_cast<int4*>(of.table)[tile + 1] = int4{expert, first, shared.firsts[expert + 1], begin};
        of.table[stored_at(num_tiles, tile)] = 0;
    }
}

// Of the step's sorted rows, the first one of which is row `first`.
template <int kBins>
__device__ __forceinline__ void write_step(int32_t* order, int64_t first, int32_t num_rows,
                                           const PlaceShared<kBins>& shared) {
    int32_t rows[kRowsAThread], positions[kRowsAThread];
#pragma unroll
    for (int32_t round = 0; round < kRowsAThread; ++round) {
        const int32_t at = round * kRoutingThreads + static_cast<int32_t>(threadIdx.x);
        const uint32_t found = at < num_rows ? shared.sorted[at] : 0;
        rows[round] = static_cast<int32_t>(first + (found & 0xffff));
        positions[round] = at < num_rows ? at + shared.shifts[found >> 16] : kForeign;
    }
#pragma unroll
    for (int32_t round = 0; round < kRowsAThread; ++round)
        if (positions[round] != kForeign) order[positions[round]] = rows[round];
}

template <int kBins>
__device__ void place_rows(const SortWork& work, PlaceShared<kBins>& shared) {
    constexpr int32_t kEach = Grouping<kBins>::kBinsAThread;
    const int64_t begin = blockIdx.x * work.chunk_rows, beyond = begin + work.chunk_rows;
    const int64_t end = beyond < work.of.num_rows ? beyond : work.of.num_rows;
    int32_t experts[kRowsAThread];
    SortedStep<kBins> step;
    load_experts(work.of, begin, experts);
    sort_step(experts, shared, step);

    await_kernel_ahead();
    let_next_kernel_launch();
    OfBins<kBins> totals, next;  // next: from the first position of an expert to that of its next row
    if (gridDim.x == 1) {        // what was sorted is all there is
#pragma unroll
        for (int32_t at = 0; at < kEach; ++at) {
            totals[at] = step.counts[at];
            next[at] = 0;
        }
    } else {
        sum_counts(work.of.counts, shared, totals, next);
    }
    begin_experts(totals, work.of.tile_rows, shared);

    for (int64_t first = begin;;) {
#pragma unroll
        for (int32_t at = 0; at < kEach; ++at) {
            const int32_t bin = threadIdx.x * kEach + at;
            if (bin < kBins) shared.shifts[bin] = shared.firsts[bin] + next[at] - step.firsts[at];
            next[at] += step.counts[at];
        }
        const int64_t following = first + kStepRows;
        if (following < end) load_experts(work.of, following, experts);
        __syncthreads();
        write_step(work.of.order, first, step.num_rows, shared);
        if (following >= end) break;
        sort_step(experts, shared, step);
        first = following;
    }
    write_tiles(work.of, shared);
}

}  // namespace weave::moe_experts
