// What a rank's threads do with the rows of a mail call; see mail.cu.
#pragma once

#include <algorithm>

#include "all_reduce_norm/cluster_team.cuh"
#include "all_reduce_norm/finish.cuh"

namespace weave::gpu {

using fabric::kMaxWorld;
using fabric::Watch;

constexpr int kScaleBytes = 16;

// Where things lie in a mailbox. A rank sends to the rank `step` behind it (receiver = sender + step, around the ring)
// in its slot world - 1 - step, so that it finds what the rank `step` behind itself sent in slot step - 1.
struct MailLayout {
    uint32_t slot_rows;       // rows that one slot has room for
    uint32_t row_bytes;       // of a partial row and of a row of the sum
    uint32_t out_row_bytes;   // of a finished row, its scale included
    uint32_t out_at, sum_at;  // where the slots of finished rows and of sums begin
    uint32_t bytes;

    // False if a mailbox of `room` bytes, or 32-bit offsets, are too small for it.
    static bool make(MailLayout& layout, bool one_shot, int64_t tokens, int64_t hidden, int32_t element_bytes,
                     int32_t out_bytes, bool row_scales, int32_t world, bool sum_whole, int64_t room) {
        const int64_t slot_rows = one_shot ? tokens : (tokens + world - 1) / world;
        const int64_t row_bytes = hidden * element_bytes;
        const int64_t out_row_bytes = (hidden * out_bytes + 15) / 16 * 16 + (row_scales ? kScaleBytes : 0);
        const int64_t rows = slot_rows * (world - 1);
        const int64_t out_at = rows * row_bytes;
        const int64_t sum_at = out_at + (one_shot ? 0 : rows * out_row_bytes);
        const int64_t bytes = sum_at + (one_shot || !sum_whole ? 0 : rows * row_bytes);
        layout = {static_cast<uint32_t>(slot_rows),     static_cast<uint32_t>(row_bytes),
                  static_cast<uint32_t>(out_row_bytes), static_cast<uint32_t>(out_at),
                  static_cast<uint32_t>(sum_at),        static_cast<uint32_t>(bytes)};
        return bytes <= std::min<int64_t>(room, UINT32_MAX);
    }
};

__device__ __noinline__ Vec16 await_mail(const char* at, const Watch& watch, int32_t peer) {
    fabric::Patience patience;
    for (;;) {
        const Vec16 seen = fabric::relaxed_load(at);
        if (fabric::is_there(seen)) return seen;
        if (patience.is_over(watch)) fabric::give_up(watch, patience.code(), peer, fabric::Slot::kMail, 1, 0, 0);
    }
}

// Of 16 or 32 bytes, or of 4 or 8, an e4m3 vector. Words beyond it stay zero, which counts as there.
__device__ __forceinline__ Packet look_packet(const char* at, int32_t bytes) {
    Packet packet{};
    if (bytes >= 16) {
        packet.part[0] = fabric::relaxed_load(at);
        if (bytes == 32) packet.part[1] = fabric::relaxed_load(at + 16);
    } else if (bytes == 8) {
        asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(packet.part[0].word[0]), "=r"(packet.part[0].word[1])
                     : "l"(at)
                     : "memory");
    } else {
        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(packet.part[0].word[0]) : "l"(at) : "memory");
    }
    return packet;
}

__device__ __forceinline__ void await_packet(Packet& packet, const char* at, int32_t bytes, const Watch& watch,
                                             int32_t peer) {
    fabric::Patience patience;
    while (!fabric::is_there(packet.part[0]) || !fabric::is_there(packet.part[1])) {
        if (patience.is_over(watch)) fabric::give_up(watch, patience.code(), peer, fabric::Slot::kMail, 1, 0, 0);
        packet = look_packet(at, bytes);
    }
}

__device__ __forceinline__ void send_packet(char* to, const Packet& packet, int32_t bytes) {
    if (bytes >= 16) {
        fabric::relaxed_store(to, packet.part[0]);
        if (bytes == 32) fabric::relaxed_store(to + 16, packet.part[1]);
    } else if (bytes == 8) {
        asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(packet.part[0].word[0]),
                     "r"(packet.part[0].word[1])
                     : "memory");
    } else {
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(packet.part[0].word[0]) : "memory");
    }
}

__device__ __forceinline__ Vec16 absent() {
    return Vec16{{fabric::kAbsent, fabric::kAbsent, fabric::kAbsent, fabric::kAbsent}};
}

// One vector of each rank's part of a row, in the order of ranks, which is the order of the sum; and of the residual.
template <int kMaxW>
struct Parts {
    Vec16 part[kMaxW];
    Vec16 residual;
};

// kPlain: see is_plain().
template <typename T, int kMaxW, int kVecs, bool kTwoShot, bool kPlain>
struct Mail {
    static constexpr int E = kElements<T>;
    // What of a row is there already is loaded while the row before it is finished, where there are registers for it.
    static constexpr bool kAhead = kVecs == 1 && kMaxW <= 4;
    const Call& call;
    const Watch& watch;
    const Lanes& lanes;
    ClusterTeam& team;
    const MailLayout& layout;
    int64_t mailbox = 0;

    __device__ __forceinline__ int32_t out_packet() const { return packet_bytes<T, kPlain>(call.out_kind); }
    __device__ __forceinline__ bool has_normed() const { return kPlain || call.normed != nullptr; }
    __device__ __forceinline__ bool sum_whole() const { return !kPlain && call.sum_whole; }
    __device__ __forceinline__ bool scales_rows() const { return !kPlain && call.quant == QuantKind::kPerToken; }
    __device__ __forceinline__ int32_t behind(int32_t step) const {
        const int32_t rank = call.rank + step;
        return rank < call.world ? rank : rank - call.world;
    }
    // This rank's slots in the mailbox of the rank `step` behind; the slots of that rank's rows in the own mailbox.
    __device__ __forceinline__ char* theirs(uint32_t step, uint32_t at, uint32_t row_bytes, uint32_t index) const {
        return call.base[behind(step)] + mailbox +
               (at + ((call.world - 1 - step) * layout.slot_rows + index) * row_bytes);
    }
    __device__ __forceinline__ char* mine(uint32_t step, uint32_t at, uint32_t row_bytes, uint32_t index) const {
        return call.base[call.rank] + mailbox + (at + ((step - 1) * layout.slot_rows + index) * row_bytes);
    }
    __device__ __forceinline__ char* part_of(int32_t sender, int32_t index, int j) const {
        const int32_t step = sender > call.rank ? sender - call.rank : sender - call.rank + call.world;
        return mine(step, 0, layout.row_bytes, index) + lanes.at(j) * 16;
    }
    __device__ __forceinline__ bool has_row(int32_t step, int32_t index) const {
        const int32_t owner = behind(step);
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

    __device__ __forceinline__ void load(Outgoing& out, int32_t index) const {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            if constexpr (kTwoShot) {
#pragma unroll
                for (int step = 1; step < kMaxW; ++step)
                    if (step < call.world && has_row(step, index))
                        out.v[j][step] = partial(call.begin[behind(step)] + index, j);
            } else {
                out.v[j][0] = partial(index, j);
            }
        }
    }

    __device__ __forceinline__ void send(const Outgoing& out, int32_t index) const {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
#pragma unroll
            for (int step = 1; step < kMaxW; ++step)
                if (step < call.world && (!kTwoShot || has_row(step, index)))
                    fabric::relaxed_store(theirs(step, 0, layout.row_bytes, index) + lanes.at(j) * 16,
                                          fabric::filled(out.v[j][kTwoShot ? step : 0]));
        }
    }

    // The own part and the residual, and a first look at peers' parts.
    __device__ __forceinline__ void look(Parts<kMaxW>& parts, int32_t row, int32_t index, int j) const {
#pragma unroll
        for (int r = 0; r < kMaxW; ++r)
            if (r < call.world)
                parts.part[r] =
                    r == call.rank ? fabric::filled(partial(row, j)) : fabric::relaxed_load(part_of(r, index, j));
        if (kPlain || call.residual != nullptr)
            parts.residual = fabric::load(static_cast<const char*>(call.residual) + in_tensor(row, j));
    }

    __device__ __forceinline__ void look_ahead(Parts<kMaxW>& parts, int32_t row, int32_t index) const {
        if constexpr (kAhead)
            if (lanes.has(0)) look(parts, row, index, 0);
    }

    // Looks at all that are missing in one go: they come at about the same time. Leaves their places empty.
    __device__ __forceinline__ void take_parts(Vec16 (&part)[kMaxW], int32_t index, int j) const {
        fabric::Patience patience;
        for (;;) {
            int32_t missing = -1;
#pragma unroll
            for (int r = 0; r < kMaxW; ++r)
                if (r < call.world && !fabric::is_there(part[r])) missing = r;
            if (missing < 0) break;
            if (patience.is_over(watch)) fabric::give_up(watch, patience.code(), missing, fabric::Slot::kMail, 1, 0, 0);
#pragma unroll
            for (int r = 0; r < kMaxW; ++r)
                if (r < call.world && !fabric::is_there(part[r])) part[r] = fabric::relaxed_load(part_of(r, index, j));
        }
#pragma unroll
        for (int r = 0; r < kMaxW; ++r)
            if (r < call.world && r != call.rank) fabric::store(part_of(r, index, j), absent());
    }

    // Token row `row`, whose peers' parts come in slot row `index`: summed, finished, stored; and sent if kTwoShot.
    // `parts` is what look_ahead() found; afterwards it holds what there is of the row `stride` behind, if there is
    // one.
    template <class Weight>
    __device__ __forceinline__ void reduce(Parts<kMaxW>& parts, int32_t row, int32_t index, int32_t stride, int32_t end,
                                           Weight& weight) const {
        float x[kVecs][E];
        Vec16 residual[kVecs];
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] = 0;
            if (!lanes.has(j)) continue;
            if (!kAhead) look(parts, row, index, j);
            take_parts(parts.part, index, j);
#pragma unroll
            for (int r = 0; r < kMaxW; ++r) {
                if (r >= call.world) break;
                float widened[E];
                fabric::widen(parts.part[r], widened, static_cast<const T*>(nullptr));
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] += widened[i];
            }
            residual[j] = parts.residual;
        }
        const auto before = [&](int j) { return residual[j]; };
        const bool adds_residual = kPlain || call.residual != nullptr;
        finish<T, kPlain>(x, call, lanes, adds_residual, before, team, weight, [&](int j, const Vec16& sum) {
            if (call.sum != nullptr) fabric::store(static_cast<char*>(call.sum) + in_tensor(row, j), sum);
            if (row + stride < end) look_ahead(parts, row + stride, index + stride);
            if constexpr (kTwoShot && !kPlain) {
#pragma unroll
                for (int step = 1; step < kMaxW; ++step)
                    if (step < call.world && call.sum_whole)
                        fabric::relaxed_store(theirs(step, layout.sum_at, layout.row_bytes, index) + lanes.at(j) * 16,
                                              sum);
            }
        });
        float scale;
        const float inverse = inverse_scale<T, kPlain>(x, call, lanes, scale, team);
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            const int32_t vec = lanes.at(j);
            const Packet packet = packed<T, kPlain>(x[j], call.out_kind, inverse);
            if constexpr (kTwoShot) {
#pragma unroll
                for (int step = 1; step < kMaxW; ++step)
                    if (step < call.world) send_finished(step, index, vec, packet, scale);
            }
            store_finished(row, vec, packet, scale);
        }
    }

    __device__ __forceinline__ void send_finished(int32_t step, int32_t index, int32_t vec, const Packet& packet,
                                                  float scale) const {
        if (has_normed())
            send_packet(theirs(step, layout.out_at, layout.out_row_bytes, index) + vec * out_packet(), packet,
                        out_packet());
        if (scales_rows() && vec == 0) {
            const uint32_t bits = __float_as_uint(scale);
            fabric::relaxed_store(theirs(step, layout.out_at, layout.out_row_bytes, index + 1) - kScaleBytes,
                                  Vec16{{bits, bits, bits, bits}});
        }
    }

    __device__ __forceinline__ void store_finished(int32_t row, int32_t vec, const Packet& packet, float scale) const {
        if (has_normed()) {
            char* to = static_cast<char*>(call.normed) + (static_cast<int64_t>(row) * lanes.count + vec) * out_packet();
            store_packet(to, packet, out_packet());
        }
        if (scales_rows() && vec == 0) static_cast<float*>(call.row_scale)[row] = scale;
    }

    // Slot row `index` of every owner's share: finished rows that peers sent. Leaves their places empty.
    __device__ __forceinline__ void receive(int32_t index) const {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            const int32_t vec = lanes.at(j);
            Packet packet[kMaxW];
            Vec16 sum[kMaxW];
#pragma unroll
            for (int step = 1; step < kMaxW; ++step) {
                if (step >= call.world || !has_row(step, index)) continue;
                if (has_normed())
                    packet[step] = look_packet(
                        mine(step, layout.out_at, layout.out_row_bytes, index) + vec * out_packet(), out_packet());
                if (sum_whole())
                    sum[step] = fabric::relaxed_load(mine(step, layout.sum_at, layout.row_bytes, index) + vec * 16);
            }
#pragma unroll
            for (int step = 1; step < kMaxW; ++step) {
                if (step >= call.world || !has_row(step, index)) continue;
                const int32_t owner = behind(step);
                const int32_t row = call.begin[owner] + index;
                float scale = 1.0f;
                if (has_normed()) {
                    char* from = mine(step, layout.out_at, layout.out_row_bytes, index);
                    await_packet(packet[step], from + vec * out_packet(), out_packet(), watch, owner);
                    if (scales_rows() && vec == 0) {
                        char* at = from + layout.out_row_bytes - kScaleBytes;
                        const Vec16 bits = await_mail(at, watch, owner);
                        scale = __uint_as_float(bits.word[0]);
                        fabric::store(at, absent());
                    }
                    store_finished(row, vec, packet[step], scale);
                    store_packet(from + vec * out_packet(), Packet{absent(), absent()}, out_packet());
                }
                if (sum_whole()) {
                    char* at = mine(step, layout.sum_at, layout.row_bytes, index) + vec * 16;
                    if (!fabric::is_there(sum[step])) sum[step] = await_mail(at, watch, owner);
                    fabric::store(static_cast<char*>(call.sum) + in_tensor(row, j), sum[step]);
                    fabric::store(at, absent());
                }
            }
        }
    }
};

}  // namespace weave::gpu
