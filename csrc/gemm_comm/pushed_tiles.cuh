// The kernel of pushed_tiles.h (sm_90a): one persistent grid computes the product, sends its tiles, sums and finishes
// the rows that this rank owns, and stores them to all ranks (FlashOverlap, sections 3 and 4, without its second
// kernel).
//
// The storing thread of gemm/mainloop.cuh pushes every tile into the staging buffer of the owner of its rows, which has
// a slot for each source, this rank included. The last few CTAs compute no tiles: their consumers finish rows as panels
// are complete, and so do those of every other CTA that has no more tiles. A thread of the CTA fetches the rows
// (row_ring.cuh). Rows are claimed in the order of their panels, the order in which tiles are computed.
//
// Memory order, by what is shared:
//
//   partial rows in the owner's staging buffer, slot [source]
//     store   the source's copies (TMA)
//     fence   wait_group without .read in the storing thread; release, in signal_add
//     flag    partial[source][panel], which counts tiles
//     wait    the fetching thread, acquire; fence.proxy.async; then bulk copies
//     again   in the source's next call: it has waited for `rows` of all the owner's rows, which are made of these
//   finished rows in every rank's output buffer, where rows are returned
//     store   bulk copies of one thread of the team, out of shared memory; rows of a whole sum all its threads, plain
//     fence   wait_group without .read in that thread; barrier of the team; release, in signal_add
//     flag    rows[owner][0], which counts rows
//     wait    CTA 0 of every rank, before its kernel ends; where rows are copied out, every team. Acquire
//     again   in the owner's next call, once this rank's tiles of that call have come: this kernel has ended then
//   finished rows that stay with their owner, in memory of the caller (kSharded, and a sum of own rows)
//     store   bulk copies of one thread of the team, out of shared memory; rows of the sum all its threads, plain
//     fence   wait_group without .read in that thread, before it ends
//     wait    kernels after this one: its end. No peer writes or reads them. The words `rows` are counted and awaited
//             all the same, for what they say of the slots in the staging buffer
//   a finished row in shared memory
//     store   the team, plain
//     fence   fence.proxy.async.shared::cta in every thread, then a barrier of the team
//     wait    the thread that copies it
//     again   wait_group.read of that thread, before the barrier of the next row's sum but one
//   the row to claim next, rows[this rank][1]
//     store   atomics of this rank alone; nothing else goes with it
#pragma once

#include "fabric/call.cuh"
#include "gemm/gemm.cuh"
#include "gemm_comm/pushed_tiles.h"
#include "gemm_comm/row_ring.cuh"
#include "reduction/row.cuh"

namespace weave::gpu {

constexpr int kTeamThreads = 128;
constexpr int kTeamWarps = kTeamThreads / 32;
constexpr int kTeamVecs = 8;
constexpr int kMostRowBytes = kTeamThreads * kTeamVecs * 16;
constexpr int kVecsAtOnce = 4;

struct PushedTiles {
    gemm::Work work;
    Call call;
    OutputLayout layout;
    int64_t slot_bytes;  // of a source in the staging buffer
    NormalizedRows rows;
};

// A consumer that finishes rows. Sums are made in one order.
struct RowTeam {
    float (*parts)[kTeamWarps];
    int32_t consumer;
    uint32_t num_reductions = 0;

    __device__ __forceinline__ int32_t thread() const { return threadIdx.x % kTeamThreads; }
    __device__ __forceinline__ void await_all() const {
        asm volatile("bar.sync %0, %1;" ::"r"(consumer + 1), "n"(kTeamThreads) : "memory");
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

// Some vectors of a row as they are in memory, all loads at once; zeros beyond the row.
//
// In what follows arithmetic is done for vectors beyond the row too: a branch for each would keep the compiler from
// working on several at once.
template <int kCount>
__device__ __forceinline__ void load_vectors(const char* row, const Lanes& lanes, int first, Vec16 (&raw)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
        raw[j] = Vec16{{0, 0, 0, 0}};
        if (lanes.has(first + j)) raw[j] = fabric::load(row + lanes.at(first + j) * 16);
    }
}

// What a thread of a team reads of a row in shared memory, in bytes. Beyond the row it reads the last vector again.
struct RowPlaces {
    int32_t at[kTeamVecs];

    __device__ __forceinline__ explicit RowPlaces(const Lanes& lanes) {
#pragma unroll
        for (int j = 0; j < kTeamVecs; ++j)
            at[j] = min(lanes.at(j), lanes.count - 1) * 16;
    }
    template <int kCount>
    __device__ __forceinline__ void read(const uint8_t* row, int first, Vec16 (&raw)[kCount]) const {
#pragma unroll
        for (int j = 0; j < kCount; ++j)
            raw[j] = *reinterpret_cast<const Vec16*>(row + at[first + j]);
    }
};

// Vectors of a row that begins at `at` in every rank's arena, to all of them, the next rank first.
template <int kCount>
__device__ __forceinline__ void store_to_all(const fabric::GroupView& group, int64_t at, const Lanes& lanes, int first,
                                             const Vec16 (&out)[kCount]) {
    for (int32_t step = 1; step <= group.world; ++step) {
        char* row = group.base[step < group.world ? group.after(step) : group.rank] + at;
#pragma unroll
        for (int j = 0; j < kCount; ++j)
            if (lanes.has(first + j)) fabric::store(row + lanes.at(first + j) * 16, out[j]);
    }
}

template <typename T, int kCount>
__device__ __forceinline__ void add(float (&x)[kCount][kElements<T>], const Vec16 (&raw)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
        float value[kElements<T>];
        fabric::widen(raw[j], value, static_cast<const T*>(nullptr));
#pragma unroll
        for (int i = 0; i < kElements<T>; ++i)
            x[j][i] += value[i];
    }
}

// A parameter of the length of a row for some of its vectors; zeros beyond the row.
template <typename T, int kCount>
__device__ __forceinline__ void load_parameters(const Parameter& parameter, const Lanes& lanes, int first,
                                                float (&out)[kCount][kElements<T>]) {
    if (parameter.is_fp32) {
#pragma unroll
        for (int j = 0; j < kCount; ++j)
            if (lanes.has(first + j)) load_parameter<T>(parameter, lanes.at(first + j), out[j]);
    } else {
        Vec16 raw[kCount];
        load_vectors(static_cast<const char*>(parameter.data), lanes, first, raw);
#pragma unroll
        for (int j = 0; j < kCount; ++j)
            fabric::widen(raw[j], out[j], static_cast<const T*>(nullptr));
    }
}

// A row of the sum as it is rounded, in the order of all kernels: sources by rank, bias, scale, residual. `slot` is
// what was fetched of it. Stores it where it is wanted and returns the sum of its squares over this thread's elements.
template <typename T>
__device__ __forceinline__ float sum_row(const PushedTiles& given, const Lanes& lanes, const RowPlaces& places,
                                         int32_t own_row, const uint8_t* slot, float (&sum)[kTeamVecs][kElements<T>]) {
    constexpr int E = kElements<T>;
    const T* type = nullptr;
    const Call& call = given.call;
    const fabric::GroupView& group = call.group;
    const int32_t row_bytes = given.layout.row_bytes;
    const int64_t row_at = static_cast<int64_t>(call.begin[group.rank] + own_row) * row_bytes;
    float scale = call.scale;
    if (call.scale_value.data != nullptr) scale *= load_value<T>(call.scale_value);
    float squares[kVecsAtOnce] = {};
#pragma unroll
    for (int first = 0; first < kTeamVecs; first += kVecsAtOnce) {
        Vec16 raw[kVecsAtOnce];
        float x[kVecsAtOnce][E];
        places.read(slot, first, raw);
#pragma unroll
        for (int j = 0; j < kVecsAtOnce; ++j)
            fabric::widen(raw[j], x[j], type);
        for (int32_t source = 1; source < group.world; ++source) {
            places.read(slot + source * row_bytes, first, raw);
            add<T>(x, raw);
        }
        if (call.reduced_bias.data != nullptr) {
            float bias[kVecsAtOnce][E];
            load_parameters<T>(call.reduced_bias, lanes, first, bias);
#pragma unroll
            for (int j = 0; j < kVecsAtOnce; ++j)
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] += bias[j][i];
        }
        if (scale != 1.0f) {
#pragma unroll
            for (int j = 0; j < kVecsAtOnce; ++j)
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] *= scale;
        }
        if (call.residual != nullptr) {
            places.read(slot + group.world * row_bytes, first, raw);
            add<T>(x, raw);
        }
        Vec16 rounded[kVecsAtOnce];
#pragma unroll
        for (int j = 0; j < kVecsAtOnce; ++j) {
            rounded[j] = fabric::narrow(x[j], type);
            fabric::widen(rounded[j], sum[first + j], type);
            float of_vector = 0;
#pragma unroll
            for (int i = 0; i < E; ++i)
                of_vector += sum[first + j][i] * sum[first + j][i];
            squares[j] += lanes.has(first + j) ? of_vector : 0.0f;
        }
        if (call.sum_whole) {
            store_to_all(group, call.buffers.output_offset + given.layout.sum_offset + row_at, lanes, first, rounded);
        } else if (call.sum != nullptr) {
#pragma unroll
            for (int j = 0; j < kVecsAtOnce; ++j)
                if (lanes.has(first + j))
                    fabric::store(static_cast<char*>(call.sum) + row_at + lanes.at(first + j) * 16, rounded[j]);
        }
    }
    float total = 0;
#pragma unroll
    for (int j = 0; j < kVecsAtOnce; ++j)
        total += squares[j];
    return total;
}

// The same vector. What is made of it is made after this place, each time: hoisted out of the loop over rows, weights
// as floats would take half of all registers.
__device__ __forceinline__ Vec16 known_here(Vec16 v) {
    asm volatile("" : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3]));
    return v;
}

// Two numbers of T in each word: their products, rounded to T.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b, const __nv_bfloat16*) {
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b, const __half*) {
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}

// What the products as floats are after they are rounded.
template <typename T>
__device__ __forceinline__ Vec16 multiply(Vec16 a, const Vec16& b, const T* type) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        a.word[i] = multiply_pairs(a.word[i], b.word[i], type);
    return a;
}

// The norm of a row, into shared memory.
template <typename T>
__device__ __forceinline__ void normalize_row(const Call& call, const Lanes& lanes,
                                              float (&sum)[kTeamVecs][kElements<T>], float factor,
                                              const Vec16 (&kept_weight)[kTeamVecs], uint8_t* out) {
    constexpr int E = kElements<T>;
    const T* type = nullptr;
    const GpuNorm& norm = call.norm;
    const auto store = [&](int j, const Vec16& vec) {
        if (lanes.has(j)) *reinterpret_cast<Vec16*>(out + lanes.at(j) * 16) = vec;
    };
#pragma unroll
    for (int j = 0; j < kTeamVecs; ++j)
#pragma unroll
        for (int i = 0; i < E; ++i)
            sum[j][i] *= factor;
    const bool of_type = norm.weight.data != nullptr && !norm.weight.is_fp32;
    if (of_type && norm.spec.cast_before_weight && norm.spec.weight_offset == 0) {  // what most models do
#pragma unroll
        for (int j = 0; j < kTeamVecs; ++j)
            store(j, multiply(fabric::narrow(sum[j], type), kept_weight[j], type));
        return;
    }
#pragma unroll
    for (int first = 0; first < kTeamVecs; first += kVecsAtOnce) {
        float weight[kVecsAtOnce][E];
        if (norm.weight.is_fp32) {
            load_parameters<T>(norm.weight, lanes, first, weight);
        } else {
#pragma unroll
            for (int j = 0; j < kVecsAtOnce; ++j)
                fabric::widen(known_here(kept_weight[first + j]), weight[j], type);
        }
#pragma unroll
        for (int j = 0; j < kVecsAtOnce; ++j) {
            float (&x)[E] = sum[first + j];
            if (norm.spec.cast_before_weight) round_to<T>(x);
            if (norm.weight.data != nullptr) {
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[i] *= weight[j][i] + norm.spec.weight_offset;
            }
            store(first + j, fabric::narrow(x, type));
        }
    }
}

// The rows that fetch_rows() brings to this CTA, by the team whose turn it is. They leave through `out`, which has room
// for kOutRows of them.
template <typename T, int kOutRows>
__device__ __forceinline__ void finish_rows(const PushedTiles& given, uint64_t epoch, RowTeam& team,
                                            const RingPlace& place, RowRing& ring, uint8_t* out) {
    const Call& call = given.call;
    const fabric::GroupView& group = call.group;
    const int32_t thread = team.thread();
    const Lanes lanes{thread, kTeamThreads, call.hidden / kElements<T>};
    const RowPlaces places(lanes);
    const float inverse = 1.0f / static_cast<float>(call.hidden);
    Vec16 weight[kTeamVecs];  // kept over all rows, unless it is of fp32
    if (call.norm.weight.data != nullptr && !call.norm.weight.is_fp32)
        load_vectors(static_cast<const char*>(call.norm.weight.data), lanes, 0, weight);
    uint32_t num_finished = 0;
    for (int32_t index = team.consumer;; index += gemm::kConsumers) {
        const int32_t slot = index % place.num_slots, use = index / place.num_slots;
        // Of an odd number of slots each is the other team's every second time. A wait by parity distinguishes a phase
        // from the one before it only: while the other team's row is still in flight, it would return at once.
        if (use != 0) fabric::await_phase(&ring.empty[slot], (use - 1) & 1);
        fabric::await_phase(&ring.full[slot], use & 1);
        // The lane reads it that says later that the slot is empty, for all of its warp.
        int32_t row = kNoRow;
        if (threadIdx.x % 32 == 0) row = *const_cast<volatile int32_t*>(&ring.row[slot]);
        row = __shfl_sync(0xffffffffu, row, 0);
        if (row == kNoRow) {
            // Of a single slot the other team's end comes after this one.
            __syncwarp();
            if (threadIdx.x % 32 == 0) fabric::arrive(&ring.empty[slot]);
            break;
        }
        float sum[kTeamVecs][kElements<T>];
        const float squares = sum_row<T>(given, lanes, places, row, place.slot(slot), sum);
        __syncwarp();
        if (threadIdx.x % 32 == 0) fabric::arrive(&ring.empty[slot]);
        if (call.normalized != nullptr) {
            uint8_t* out_row = out + num_finished % kOutRows * kMostRowBytes;
            // Before the barrier of the sum: after it this memory is written again.
            if (thread == 0) fabric::await_reading<kOutRows - 1>();
            const float factor = rsqrtf(team.sum(squares) * inverse + call.norm.spec.eps);
            normalize_row<T>(call, lanes, sum, factor, weight, out_row);
            fabric::order_shared_stores_before_copies();
            team.await_all();
            if (thread == 0 && given.rows == NormalizedRows::kSharded) {
                fabric::copy_out(
                    static_cast<char*>(call.normalized) + static_cast<int64_t>(row) * given.layout.out_bytes, out_row,
                    given.layout.out_bytes);
                fabric::commit_copies();
            } else if (thread == 0) {
                const int64_t out_at = call.buffers.output_offset +
                                       static_cast<int64_t>(call.begin[group.rank] + row) * given.layout.out_row_bytes;
                for (int32_t step = 1; step <= group.world; ++step)
                    fabric::copy_out(group.base[step < group.world ? group.after(step) : group.rank] + out_at, out_row,
                                     given.layout.out_bytes);
                fabric::commit_copies();
            }
        } else {
            team.await_all();  // no warp waits for a slot that another one of its team has yet to read
        }
        ++num_finished;
    }
    if (thread == 0) fabric::await_arrival<0>();
    team.await_all();
    signal_rows(group, thread, epoch, num_finished);
}

// Whether rows have to be copied from the output buffer into tensors of the caller.
__device__ __forceinline__ bool copies_out(const PushedTiles& given) {
    const Call& call = given.call;
    const char* output = call.group.base[call.group.rank] + call.buffers.output_offset;
    const bool hands_out = call.normalized != nullptr && given.rows == NormalizedRows::kReplicated;
    return (hands_out && call.normalized != output) || call.sum_whole != 0;
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(gemm::kThreads, 1) push_tiles(const __grid_constant__ PushedTiles given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    auto& shared = gemm::shared_memory<kColumns>();
    __shared__ float parts[gemm::kConsumers][2][kTeamWarps];
    __shared__ RowRing ring;
    const Call& call = given.call;
    const int32_t num_parts = call.group.world + (call.residual != nullptr ? 1 : 0);
    const RingPlace place{shared.a[0], given.layout.row_bytes, num_parts,
                          ring_slots(sizeof(shared.a) + sizeof(shared.b), given.layout.row_bytes, num_parts)};
    init_ring(ring);
    gemm::init_pipeline(shared);
    gemm::await_cluster();
    const fabric::CallState state = fabric::begin_call<false>(call.group);
    __syncthreads();
    const uint64_t epoch = state.epoch();
    const Watch watch{call.group, fabric::tag_word(epoch, call.tokens, call.site)};
    const bool computes = gemm::cluster_index() < given.work.num_clusters;
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < 4) {
        gemm::leave_registers<gemm::kLoaderRegisters>();
        if (warp == 0) {
            if (lane == 0) {
                if (computes) gemm::load_tiles(given.work, shared, gemm::WholeA{given.work});
                fetch_rows(call, watch, epoch, complete_panel(given, epoch), given.slot_bytes, place, ring);
            }
        } else if (warp == 1) {
            if (lane == 0 && computes)
                gemm::store_tiles(given.work, shared, [&](const gemm::Tile& tile, int32_t row) {
                    fabric::Channel* owner = call.group.channel(tile.owner);
                    if (row / gemm::kPanelRows < fabric::kMaxCtas)
                        fabric::signal_add(&owner->partial[call.group.rank][row / gemm::kPanelRows], epoch, 1);
                });
        } else if (warp == 2) {
            fabric::send_tags(watch, state, lane);
            fabric::end_call<false>(watch, state, lane);
        }
    } else {
        gemm::take_registers<gemm::kConsumerRegisters>();
        const int32_t consumer = warp / 4 - 1;
        if (computes) {
            const uint32_t copied = gemm::compute_tiles<T>(given.work, shared, consumer);
            // The storing thread may still copy the last tile out of where rows go now.
            fabric::await_phase(&shared.copied[consumer], copied);
        }
        RowTeam team{parts[consumer], consumer};
        const int32_t thread = team.thread();
        finish_rows<T, gemm::Shared<kColumns>::kBytesOfC / kMostRowBytes>(given, epoch, team, place, ring,
                                                                          shared.c[consumer]);
        const bool copies = copies_out(given);
        if ((copies || (blockIdx.x == 0 && consumer == 0)) && thread < call.group.world) {
            const int32_t rows = call.begin[thread + 1] - call.begin[thread];
            if (rows > 0)
                fabric::wait(&call.group.channel(call.group.rank)->rows[thread][0], fabric::signal_word(epoch, rows),
                             watch, thread, fabric::Slot::kRows);
        }
        if (copies) {
            team.await_all();
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

// In pushed_tiles.dtypes.sm90a.cu.
template <typename T>
int enqueue_pushed_tiles(const PushedTiles& given, int32_t tile_columns, int32_t num_ctas, void* stream);

}  // namespace weave::gpu
