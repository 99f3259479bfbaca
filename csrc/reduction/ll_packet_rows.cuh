// What a rank's threads do with the rows of a call that sends LL packets; see ll_packet.cu.
#pragma once

#include "fabric/ll_packet.cuh"
#include "reduction/cluster_team.cuh"
#include "reduction/finish.cuh"
#include "reduction/layout.h"

namespace weave::gpu {

using fabric::empty_vector;
using fabric::kMaxWorld;
using fabric::Mailbox;
using fabric::Watch;

// Of 4 to 32 bytes; see out_vector_bytes(). Words beyond them stay zero, which counts as arrived.
__device__ __forceinline__ OutVector peek_out(const char* at, int32_t bytes) {
    OutVector out{};
    for_each_piece(out, bytes, [&](auto& piece, int32_t offset) { fabric::load_relaxed(piece, at + offset); });
    return out;
}

__device__ __forceinline__ void await_out(OutVector& out, const char* at, int32_t bytes, const Watch& watch,
                                          int32_t peer) {
    fabric::Deadline deadline;
    while (!fabric::has_arrived(out.part[0]) || !fabric::has_arrived(out.part[1])) {
        if (deadline.has_passed(watch)) fabric::give_up(watch, deadline.code(), peer, fabric::Slot::kLLPacket, 1, 0, 0);
        out = peek_out(at, bytes);
    }
}

__device__ __forceinline__ void put_out(char* to, OutVector out, int32_t bytes) {
    for_each_piece(out, bytes, [&](const auto& piece, int32_t at) { fabric::store_relaxed(to + at, piece); });
}

// One vector of each rank's part of a row, in the order of ranks, which is the order of the sum; and of the residual.
template <int kMaxW>
struct Parts {
    Vec16 part[kMaxW];
    Vec16 residual;
};

// kPlain: see is_plain().
template <typename T, int kMaxW, int kVecs, bool kTwoShot, bool kPlain>
struct LLPacketRows {
    static constexpr int E = kElements<T>;
    // What of a row is there already is loaded while the row before it is finished, where there are registers for it.
    static constexpr bool kAhead = kVecs == 1 && kMaxW <= 4;
    const Call& call;
    const Watch& watch;
    const Lanes& lanes;
    ClusterTeam& team;
    const LLPacketLayout& layout;
    int64_t mailbox = 0;

    __device__ __forceinline__ int32_t out_bytes() const { return out_vector_bytes<T, kPlain>(call.out_kind); }
    __device__ __forceinline__ bool has_normalized() const { return kPlain || call.normalized != nullptr; }
    __device__ __forceinline__ bool sum_whole() const { return !kPlain && call.sum_whole; }
    __device__ __forceinline__ bool scales_rows() const { return !kPlain && call.quant == QuantKind::kPerToken; }
    // Partial rows, finished rows and rows of the sum, in the mailbox of this call.
    __device__ __forceinline__ Mailbox parts() const { return mailbox_of(0, layout.row_bytes); }
    __device__ __forceinline__ Mailbox finished() const { return mailbox_of(layout.out_offset, layout.out_row_bytes); }
    __device__ __forceinline__ Mailbox sums() const { return mailbox_of(layout.sum_offset, layout.row_bytes); }
    __device__ __forceinline__ Mailbox mailbox_of(uint32_t first, uint32_t row_bytes) const {
        return Mailbox{call.group, mailbox, first, layout.slot_rows, row_bytes};
    }
    __device__ __forceinline__ bool has_row(int32_t step, int32_t index) const {
        const int32_t owner = call.group.after(step);
        return call.begin[owner] + index < call.begin[owner + 1];
    }
    // Where row `row` of a tensor has this thread's vector j.
    __device__ __forceinline__ int64_t in_tensor(int32_t row, int j) const {
        return (static_cast<int64_t>(row) * lanes.count + lanes.at(j)) * 16;
    }
    __device__ __forceinline__ Vec16 partial(int32_t row, int j) const {
        return fabric::load(static_cast<const char*>(call.partial) + in_tensor(row, j));
    }

    // What this rank sends first: vectors of token row `index` to all peers, or of slot row `index` of every owner's
    // share to that owner.
    struct Outgoing {
        Vec16 v[kVecs][kTwoShot ? kMaxW : 1];
    };

    __device__ __forceinline__ int32_t num_outgoing() const { return kTwoShot ? call.share : call.tokens; }

    // Under one condition, so that it takes no branch: none may stand between the first load and the one of the state.
    __device__ __forceinline__ void load(Outgoing& out, int32_t index, bool wanted) const {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
#pragma unroll
            for (int step = kTwoShot ? 1 : 0; step < (kTwoShot ? kMaxW : 1); ++step) {
                const int32_t owner = call.group.after(step);
                const int32_t row = kTwoShot ? call.begin[owner] + index : index;
                const int32_t end = kTwoShot ? call.begin[owner + 1] : call.tokens;
                if (wanted & lanes.has(j) & (!kTwoShot | (step < call.group.world)) & (row < end))
                    out.v[j][step] = partial(row, j);
            }
        }
    }

    __device__ __forceinline__ void send(const Outgoing& out, int32_t index) const {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
#pragma unroll
            for (int step = 1; step < kMaxW; ++step)
                if (step < call.group.world && (!kTwoShot || has_row(step, index)))
                    parts().put(step, index, lanes.at(j) * 16, fabric::without_empty(out.v[j][kTwoShot ? step : 0]));
        }
    }

    __device__ __forceinline__ Vec16 peek_part(int32_t source, int32_t index, int j) const {
        return parts().peek(call.group.step_to(source), index, lanes.at(j) * 16);
    }

    // The own part as it is and the residual, and a first load of peers' parts. Uses none of them: whoever peeks ahead
    // has something else to do until they come.
    __device__ __forceinline__ void peek(Parts<kMaxW>& found, int32_t row, int32_t index, int j) const {
#pragma unroll
        for (int r = 0; r < kMaxW; ++r)
            if (r < call.group.world) found.part[r] = r == call.group.rank ? partial(row, j) : peek_part(r, index, j);
        if (kPlain || call.residual != nullptr)
            found.residual = fabric::load(static_cast<const char*>(call.residual) + in_tensor(row, j));
    }

    __device__ __forceinline__ void peek_ahead(Parts<kMaxW>& found, int32_t row, int32_t index) const {
        if constexpr (kAhead)
            if (lanes.has(0)) peek(found, row, index, 0);
    }

    // Polls all that are missing in one go: they come at about the same time. Leaves their places empty.
    __device__ __forceinline__ void take_parts(Vec16 (&part)[kMaxW], int32_t index, int j) const {
#pragma unroll
        for (int r = 0; r < kMaxW; ++r)
            for (uint32_t& word : part[r].word)
                word = r == call.group.rank && word == fabric::kEmptyWord ? 0u : word;
        fabric::Deadline deadline;
        for (;;) {
            int32_t missing = -1;
#pragma unroll
            for (int r = 0; r < kMaxW; ++r)
                if (r < call.group.world && !fabric::has_arrived(part[r])) missing = r;
            if (missing < 0) break;
            if (deadline.has_passed(watch))
                fabric::give_up(watch, deadline.code(), missing, fabric::Slot::kLLPacket, 1, 0, 0);
#pragma unroll
            for (int r = 0; r < kMaxW; ++r)
                if (r < call.group.world && !fabric::has_arrived(part[r])) part[r] = peek_part(r, index, j);
        }
#pragma unroll
        for (int r = 0; r < kMaxW; ++r)
            if (r < call.group.world && r != call.group.rank)
                parts().clear(call.group.step_to(r), index, lanes.at(j) * 16);
    }

    // Token row `row`, whose peers' parts come in slot row `index`: summed, finished, stored; and sent if kTwoShot.
    // `found` is what peek_ahead() found; afterwards it holds what there is of the row `stride` after, if there is
    // one.
    template <class Weight>
    __device__ __forceinline__ void reduce(Parts<kMaxW>& found, int32_t row, int32_t index, int32_t stride, int32_t end,
                                           Weight& weight) const {
        float x[kVecs][E];
        Vec16 residual[kVecs];
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] = 0;
            if (!lanes.has(j)) continue;
            if (!kAhead) peek(found, row, index, j);
            take_parts(found.part, index, j);
#pragma unroll
            for (int r = 0; r < kMaxW; ++r) {
                if (r >= call.group.world) break;
                float widened[E];
                fabric::widen(found.part[r], widened, static_cast<const T*>(nullptr));
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] += widened[i];
            }
            residual[j] = found.residual;
        }
        const auto before = [&](int j) { return residual[j]; };
        const bool adds_residual = kPlain || call.residual != nullptr;
        finish<T, kPlain>(x, call, lanes, adds_residual, before, team, weight, [&](int j, const Vec16& sum) {
            if (call.sum != nullptr) fabric::store(static_cast<char*>(call.sum) + in_tensor(row, j), sum);
            if (row + stride < end) peek_ahead(found, row + stride, index + stride);
            if constexpr (kTwoShot && !kPlain) {
#pragma unroll
                for (int step = 1; step < kMaxW; ++step)
                    if (step < call.group.world && call.sum_whole) sums().put(step, index, lanes.at(j) * 16, sum);
            }
        });
        float scale;
        const float inverse = inverse_scale<T, kPlain>(x, call, lanes, scale, team);
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            const int32_t vec = lanes.at(j);
            const OutVector out = out_vector<T, kPlain>(x[j], call.out_kind, inverse);
            if constexpr (kTwoShot) {
#pragma unroll
                for (int step = 1; step < kMaxW; ++step)
                    if (step < call.group.world) send_finished(step, index, vec, out, scale);
            }
            store_finished(row, vec, out, scale);
        }
    }

    __device__ __forceinline__ void send_finished(int32_t step, int32_t index, int32_t vec, const OutVector& out,
                                                  float scale) const {
        if (has_normalized()) put_out(finished().outgoing(step, index) + vec * out_bytes(), out, out_bytes());
        if (scales_rows() && vec == 0) {
            const uint32_t bits = __float_as_uint(scale);
            finished().put(step, index, layout.out_row_bytes - kScaleBytes, Vec16{{bits, bits, bits, bits}});
        }
    }

    __device__ __forceinline__ void store_finished(int32_t row, int32_t vec, const OutVector& out, float scale) const {
        if (has_normalized()) {
            char* to =
                static_cast<char*>(call.normalized) + (static_cast<int64_t>(row) * lanes.count + vec) * out_bytes();
            store_out(to, out, out_bytes());
        }
        if (scales_rows() && vec == 0) static_cast<float*>(call.row_scale)[row] = scale;
    }

    // Slot row `index` of every owner's share: finished rows that peers sent. Leaves their places empty.
    __device__ __forceinline__ void receive(int32_t index) const {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            const int32_t vec = lanes.at(j);
            OutVector out[kMaxW];
            Vec16 sum[kMaxW];
            int32_t rows[kMaxW];  // -1: the owner has none
#pragma unroll
            for (int step = 1; step < kMaxW; ++step) {
                const int32_t owner = call.group.after(step);
                rows[step] = call.begin[owner] + index;
                if ((step >= call.group.world) | (rows[step] >= call.begin[owner + 1])) rows[step] = -1;
                if (rows[step] < 0) continue;
                if (has_normalized())
                    out[step] = peek_out(finished().incoming(step, index) + vec * out_bytes(), out_bytes());
                if (sum_whole()) sum[step] = sums().peek(step, index, vec * 16);
            }
#pragma unroll
            for (int step = 1; step < kMaxW; ++step) {
                const int32_t row = rows[step];
                if (row < 0) continue;
                float scale = 1.0f;
                if (has_normalized()) {
                    char* from = finished().incoming(step, index) + vec * out_bytes();
                    await_out(out[step], from, out_bytes(), watch, call.group.after(step));
                    if (scales_rows() && vec == 0) {
                        const uint32_t byte = layout.out_row_bytes - kScaleBytes;
                        const Vec16 bits = finished().take(step, index, byte, empty_vector(), watch);
                        scale = __uint_as_float(bits.word[0]);
                    }
                    store_finished(row, vec, out[step], scale);
                    store_out(from, OutVector{empty_vector(), empty_vector()}, out_bytes());
                }
                if (sum_whole())
                    fabric::store(static_cast<char*>(call.sum) + in_tensor(row, j),
                                  sums().take(step, index, vec * 16, sum[step], watch));
            }
        }
    }
};

}  // namespace weave::gpu
