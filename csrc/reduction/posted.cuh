// What a CTA of the posted kernel of all_reduce_norm does: two steps of plain stores of 16 bytes that only push, each
// unit of rows with a signal after it. On memory of the host they are posted writes over PCIe, so nothing waits for
// them but the fence of a signal; loads are of this rank's own segment, which is on its GPU's memory node.
//
// A unit is a few rows. Unit j of CTA c is unit c + j * (CTAs) of a share, on every rank, so CTA c exchanges with CTA c
// of each peer alone. A CTA sends partial rows of one unit to every owner, finishes the unit before of its own share,
// and takes the finished rows of the unit before that: while it waits for one of these, the other two are in flight.
//
// Memory order, by what is shared:
//
//   partial rows in the owner's staging buffer
//     store   all threads of the source's CTA, plain
//     fence   __syncthreads; release at system scope, in signal
//     flag    partial[source][CTA]
//     wait    one thread a source of the owner's CTA, acquire; __syncthreads; then relaxed loads
//     again   in the source's next call: by then it has all of the owner's `rows` words, signalled after the owner read
//             what it summed
//   finished rows in every peer's output buffer
//     store   all threads of the owner's CTA, plain
//     fence   the same
//     flag    rows[owner][CTA], also where no row is returned
//     wait    one thread an owner, acquire; __syncthreads; then relaxed loads, stored to the caller's tensors
//     again   in the owner's next call, once partial rows of that call have come from here: this kernel has ended then
//
// The owner's rows go to the caller's tensors directly.
#pragma once

#include "fabric/call.cuh"
#include "reduction/block_team.cuh"
#include "reduction/row.cuh"

namespace weave::gpu {

constexpr int kPostedThreads = 256;
constexpr int kMostPostedVecs = 8;  // of a thread
constexpr int kLoadsInFlight = 4;   // of a thread, where rows are copied

// Sizes that all CTAs of all ranks share.
struct PostedLayout {
    OutputLayout output;
    int32_t rows_a_unit;
};

// What a peer wrote, `kShared`, is loaded as relaxed at system scope. The wait before it orders plain loads as well,
// but these are fetched from the host whatever a cache has of an earlier call.
template <bool kShared>
__device__ __forceinline__ Vec16 load_vector(const char* from) {
    if constexpr (!kShared) return fabric::load(from);
    Vec16 v;
    fabric::load_relaxed(v, from);
    return v;
}

// All threads of a CTA: `bytes`, a multiple of 4; vectors of 16 where both sides allow it.
template <int kThreads, bool kShared>
__device__ __forceinline__ void copy_bytes(char* to, const char* from, int64_t bytes) {
    constexpr int64_t kVec = sizeof(Vec16);
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(bytes)) % kVec) {
        for (int64_t at = threadIdx.x * 4; at < bytes; at += kThreads * 4)
            fabric::store(to + at, fabric::Vec4{{*reinterpret_cast<const volatile uint32_t*>(from + at)}});
        return;
    }
    constexpr int64_t kStride = kThreads * kVec;
    for (int64_t first = threadIdx.x * kVec; first < bytes; first += kStride * kLoadsInFlight) {
        Vec16 row[kLoadsInFlight];
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i)
            if (first + i * kStride < bytes) row[i] = load_vector<kShared>(from + first + i * kStride);
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i)
            if (first + i * kStride < bytes) fabric::store(to + first + i * kStride, row[i]);
    }
}

template <int kThreads, typename T, int kVecs, bool kPlain>
struct PostedCta {
    static constexpr int E = kElements<T>;
    const Call& call;
    const PostedLayout& layout;
    const fabric::Watch& watch;
    BlockTeam<kThreads / 32>& team;
    uint64_t epoch;  // as signal words begin in this call

    __device__ __forceinline__ int32_t peer() const { return static_cast<int32_t>(threadIdx.x); }
    __device__ __forceinline__ bool stands_for_peer() const {
        return peer() < call.group.world && peer() != call.group.rank;
    }
    // Unit j of this CTA: the index of its first row in a share, and how many rows it has of `owner`'s.
    __device__ __forceinline__ int32_t first(int32_t j) const {
        return static_cast<int32_t>(blockIdx.x + j * gridDim.x) * layout.rows_a_unit;
    }
    __device__ __forceinline__ int32_t count(int32_t owner, int32_t j) const {
        const int32_t left = call.begin[owner + 1] - call.begin[owner] - first(j);
        return left < layout.rows_a_unit ? (left < 0 ? 0 : left) : layout.rows_a_unit;
    }
    // Of the largest share: the same on all ranks.
    __device__ __forceinline__ int32_t num_units() const {
        const int32_t units = (call.share + layout.rows_a_unit - 1) / layout.rows_a_unit;
        const int32_t block = static_cast<int32_t>(blockIdx.x), grid = static_cast<int32_t>(gridDim.x);
        return units > block ? (units - block - 1) / grid + 1 : 0;
    }
    // Row `index` of the share of `owner`, as the rank `step` after the owner sent it.
    __device__ __forceinline__ char* staged(int32_t owner, int32_t step, int32_t index) const {
        const int64_t slot = static_cast<int64_t>(step - 1) * call.share + index;
        return call.group.base[owner] + call.buffers.staging_offset + slot * layout.output.row_bytes;
    }

    // This rank's partial rows of unit j, to their owners.
    __device__ __forceinline__ void send(int32_t j) const {
        for (int32_t step = 1; step < call.group.world; ++step) {
            const int32_t owner = call.group.after(step), rows = count(owner, j);
            const int64_t row_bytes = layout.output.row_bytes, token = call.begin[owner] + first(j);
            copy_bytes<kThreads, false>(staged(owner, call.group.world - step, first(j)),
                                        static_cast<const char*>(call.partial) + token * row_bytes, rows * row_bytes);
        }
        __syncthreads();
        if (stands_for_peer() && count(peer(), j) > 0)
            fabric::signal(&call.group.channel(peer())->partial[call.group.rank][blockIdx.x], epoch | (j + 1));
    }

    // Unit j of this rank's share: summed, finished, returned, and sent to everyone.
    __device__ __forceinline__ void finish_unit(int32_t j) {
        const int32_t rank = call.group.rank, rows = count(rank, j);
        if (rows == 0) return;
        if (stands_for_peer())
            fabric::wait(&call.group.channel(rank)->partial[peer()][blockIdx.x], epoch | (j + 1), watch, peer(),
                         fabric::Slot::kPartial);
        __syncthreads();
        for (int32_t i = 0; i < rows; ++i)
            finish_row(first(j) + i);
        __syncthreads();
        if (stands_for_peer()) fabric::signal(&call.group.channel(peer())->rows[rank][blockIdx.x], epoch | (j + 1));
    }

    __device__ __forceinline__ void finish_row(int32_t index) {
        const int32_t row = call.begin[call.group.rank] + index;
        const int64_t row_at = static_cast<int64_t>(row) * layout.output.row_bytes;
        const Lanes lanes{static_cast<int>(threadIdx.x), kThreads, call.hidden / E};
        float x[kVecs][E];
        Vec16 residual[kVecs];
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] = 0;
            if (!lanes.has(j)) continue;
            // In the order of ranks, each once, though any fixed order would do: only the owner sums a row.
            for (int32_t source = 0; source < call.group.world; ++source) {
                const char* from = source == call.group.rank
                                       ? static_cast<const char*>(call.partial) + row_at
                                       : staged(call.group.rank, call.group.step_to(source), index);
                const Vec16 vector = source == call.group.rank ? load_vector<false>(from + lanes.at(j) * 16)
                                                               : load_vector<true>(from + lanes.at(j) * 16);
                float part[E];
                fabric::widen(vector, part, static_cast<const T*>(nullptr));
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] += part[i];
            }
            if (kPlain || call.residual != nullptr)
                residual[j] = fabric::load(static_cast<const char*>(call.residual) + row_at + lanes.at(j) * 16);
        }
        finish_and_hand_out<T, kPlain>(x, residual, call, layout.output, lanes, row, team,
                                       [&](int64_t at, const auto& piece) { hand_out(row, at, piece); });
    }

    // A piece of row `row` at `at` in the arenas: to the peers, and where the caller has it.
    template <class Piece>
    __device__ __forceinline__ void hand_out(int32_t row, int64_t at, const Piece& piece) const {
        for (int32_t step = 1; step < call.group.world; ++step)
            fabric::store(call.group.base[call.group.after(step)] + at, piece);
        const OutputLayout& output = layout.output;
        const int64_t offset = at - call.buffers.output_offset;
        if (!kPlain && offset >= output.sum_offset) {
            fabric::store(static_cast<char*>(call.sum) + (offset - output.sum_offset), piece);
            return;
        }
        const int64_t in_row = offset - static_cast<int64_t>(row) * output.out_row_bytes;
        if (kPlain || in_row < output.out_bytes)
            fabric::store(static_cast<char*>(call.normalized) + static_cast<int64_t>(row) * output.out_bytes + in_row,
                          piece);
        else if (call.quant == QuantKind::kPerToken)
            static_cast<float*>(call.row_scale)[row] = __uint_as_float(piece.word[0]);
    }

    // Unit j of every peer's share, out of this rank's output buffer.
    __device__ __forceinline__ void collect(int32_t j) const {
        if (stands_for_peer() && count(peer(), j) > 0)
            fabric::wait(&call.group.channel(call.group.rank)->rows[peer()][blockIdx.x], epoch | (j + 1), watch, peer(),
                         fabric::Slot::kRows);
        __syncthreads();
        const OutputLayout& output = layout.output;
        const char* from = call.group.base[call.group.rank] + call.buffers.output_offset;
        for (int32_t step = 1; step < call.group.world; ++step) {
            const int32_t owner = call.group.after(step), rows = count(owner, j);
            const int64_t token = call.begin[owner] + first(j);
            char* normalized = static_cast<char*>(call.normalized) + token * output.out_bytes;
            if (call.normalized != nullptr && output.out_row_bytes == output.out_bytes) {
                copy_bytes<kThreads, true>(normalized, from + token * output.out_row_bytes,
                                           static_cast<int64_t>(rows) * output.out_bytes);
            } else if (call.normalized != nullptr) {
                for (int32_t i = 0; i < rows; ++i)
                    copy_bytes<kThreads, true>(normalized + static_cast<int64_t>(i) * output.out_bytes,
                                               from + (token + i) * output.out_row_bytes, output.out_bytes);
            }
            if (call.quant == QuantKind::kPerToken)
                for (int32_t i = threadIdx.x; i < rows; i += kThreads)
                    static_cast<float*>(call.row_scale)[token + i] = *reinterpret_cast<const volatile float*>(
                        from + (token + i) * output.out_row_bytes + output.out_row_bytes - kScaleBytes);
            if (call.sum_whole)
                copy_bytes<kThreads, true>(static_cast<char*>(call.sum) + token * output.row_bytes,
                                           from + output.sum_offset + token * output.row_bytes,
                                           static_cast<int64_t>(rows) * output.row_bytes);
        }
    }

    __device__ __forceinline__ void run(const fabric::CallState& state) {
        const int32_t units = num_units();
        for (int32_t j = 0; j < units + 2; ++j) {
            if (j < units) send(j);
            // Peers' tags come while the first unit travels; data of another call is never waited for.
            if (j == 0) fabric::end_call<false>(watch, state, peer());
            if (j >= 1 && j <= units) finish_unit(j - 1);
            if (j >= 2) collect(j - 2);
        }
    }
};

template <int kThreads, typename T, int kVecs, bool kPlain>
__device__ __forceinline__ void posted_cta(const Call& call, const PostedLayout& layout,
                                           float (*parts)[kThreads / 32]) {
    const fabric::CallState state = fabric::begin_call<false>(call.group);
    __syncthreads();
    const fabric::Watch watch{call.group, fabric::tag_word(state.epoch(), call.tokens, call.site)};
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    fabric::send_tags(watch, state, thread);
    BlockTeam<kThreads / 32> team{parts};
    PostedCta<kThreads, T, kVecs, kPlain>{call, layout, watch, team, fabric::signal_word(state.epoch(), 0)}.run(state);
}

}  // namespace weave::gpu
