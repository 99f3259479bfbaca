// The teams of threads of the bulk kernel that reduce and finish rows; see bulk.cu.
#pragma once

#include <type_traits>

#include "reduction/bulk_work.cuh"
#include "reduction/finish.cuh"

namespace weave::gpu {

constexpr int kTeamThreads = 512 / kTeams;
[[maybe_unused]] constexpr int kTeamWarps = kTeamThreads / 32;
// Vectors of peers' parts that a thread loads at once, but at least one of every peer. The compiler takes what
// registers are left.
[[maybe_unused]] constexpr int kMostLoads = 4;

#ifdef WEAVE_BULK_COPY

// The threads that finish a row. Sums are made in one order.
struct Team {
    float (*parts)[kTeamWarps];  // by reduction parity
    int index;
    int thread;
    uint32_t num_reductions = 0;

    __device__ __forceinline__ void barrier() const {
        asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "n"(kTeamThreads) : "memory");
    }
    template <class Combine>
    __device__ __forceinline__ float reduce(float value, const Combine& combine) {
        float* row = parts[num_reductions++ & 1];
        value = combine(value);
        if ((thread & 31) == 0) row[thread >> 5] = value;
        barrier();
        return combine((thread & 31) < kTeamWarps ? row[thread & 31] : 0.0f);
    }
    __device__ __forceinline__ float sum(float value) {
        return reduce(value, [](float part) { return warp_sum(part); });
    }
    __device__ __forceinline__ float max(float value) {
        return reduce(value, [](float part) { return warp_max(part); });
    }
};

// A row that this rank owns: its unit, and where it is in the unit, in the share and among the tokens.
struct Row {
    int32_t unit;
    int32_t in_unit;
    int32_t count;  // rows of the unit
    int32_t index;
    int64_t token;
};

template <typename T, int kMaxW, int kVecs, bool kPlain>
struct Reducer {
    static constexpr int E = kElements<T>;
    // Of these, and of the own part and the residual: more would take too many registers, and what then goes to memory
    // costs most where CTAs are few.
    static constexpr int kAtOnce = kMaxW < kMostLoads ? kMostLoads / kMaxW : 1;
    static constexpr int kEarly = kVecs < 4 ? kVecs : 4;
    static constexpr int kStride = kTeamThreads * 16;
    const Work work;
    const Lanes& lanes;
    Team& team;
    uint64_t seen = 0;  // this lane's word, at its last load

    __device__ __forceinline__ Row row_at(int32_t unit, int32_t in_unit) const {
        const int32_t first = work.first(unit);
        return Row{unit, in_unit, work.unit(work.call.group.rank, first), first + in_unit,
                   work.call.begin[work.call.group.rank] + first + in_unit};
    }
    // `count` is 0 after the last row.
    __device__ __forceinline__ Row after(const Row& row) const {
        return row.in_unit + 1 < row.count ? row_at(row.unit, row.in_unit + 1) : row_at(row.unit + kTeams, 0);
    }

    // The parts of the row's unit have come from all ranks. A word covers all units up to it.
    __device__ __forceinline__ void await_unit(const Row& row) {
        const int lane = team.thread & 31;
        if (lane < work.call.group.world && lane != work.call.group.rank && seen < work.word(row.unit + 1))
            seen = fabric::wait(&work.channel(work.call.group.rank)->partial[lane][blockIdx.x], work.word(row.unit + 1),
                                work.watch, lane, fabric::Slot::kPartial);
        __syncwarp();
    }

    // The parts of a row, summed: what this rank has of it, loaded before peers' parts have come, then the slots in
    // order. Only the owner sums a row, so any fixed order is the same for everyone.
    __device__ __forceinline__ void sum(const Row& row, float (&x)[kVecs][E]) {
        Vec16 own[kEarly], residual[kEarly];
        load_own(row, 0, own, residual);
        await_unit(row);
        widen_own(0, own, residual, x);
#pragma unroll
        for (int from = kEarly; from < kVecs; from += kEarly) {
            load_own(row, from, own, residual);
            widen_own(from, own, residual, x);
        }
#pragma unroll
        for (int from = 0; from < kVecs; from += kAtOnce)
            add_peers(row, from, x);
    }

    __device__ __forceinline__ void load_own(const Row& row, int from, Vec16 (&own)[kEarly],
                                             Vec16 (&residual)[kEarly]) const {
        const int64_t at = row.token * work.layout.row_bytes + lanes.first * 16 + from * kStride;
        const char* partial = fabric::computed_here(static_cast<const char*>(work.call.partial) + at);
        const char* residuals = fabric::computed_here(static_cast<const char*>(work.call.residual) + at);
#pragma unroll
        for (int k = 0; k < kEarly; ++k) {
            own[k] = lanes.has(from + k) ? fabric::load(partial + k * kStride) : Vec16{};
            residual[k] =
                lanes.has(from + k) && adds_residual_first() ? fabric::load(residuals + k * kStride) : Vec16{};
        }
    }

    __device__ __forceinline__ void widen_own(int from, const Vec16 (&own)[kEarly], const Vec16 (&residual)[kEarly],
                                              float (&x)[kVecs][E]) const {
#pragma unroll
        for (int k = 0; k < kEarly; ++k) {
            fabric::widen(own[k], x[from + k], static_cast<const T*>(nullptr));
            if (adds_residual_first()) plus(residual[k], x[from + k]);
        }
    }

    __device__ __forceinline__ void add_peers(const Row& row, int from, float (&x)[kVecs][E]) const {
        const Call& call = work.call;
        const int64_t row_bytes = work.layout.row_bytes, slot_bytes = call.share * row_bytes;
        const char* slots =
            fabric::computed_here(work.staging(call.group.rank, row.index * row_bytes).pointer() + lanes.first * 16);
        Vec16 part[kMaxW][kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
            for (int slot = 1; slot < kMaxW; ++slot)
                part[slot][k] = lanes.has(from + k) && slot < call.group.world
                                    ? fabric::load(slots + (slot - 1) * slot_bytes + (from + k) * kStride)
                                    : Vec16{};
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
            for (int slot = 1; slot < kMaxW; ++slot)
                plus(part[slot][k], x[from + k]);
    }

    __device__ __forceinline__ static void plus(const Vec16& part, float (&x)[E]) {
        float widened[E];
        fabric::widen(part, widened, static_cast<const T*>(nullptr));
#pragma unroll
        for (int i = 0; i < E; ++i)
            x[i] += widened[i];
    }

    // Where nothing comes between the sum over ranks and the residual, it is loaded with the parts: in registers it
    // would have to wait for the rest.
    __device__ __forceinline__ bool adds_residual_first() const {
        const Call& call = work.call;
        if (kPlain) return true;
        return call.residual != nullptr && call.reduced_bias.data == nullptr && call.scale == 1.0f &&
               call.scale_value.data == nullptr && call.post.spec.kind == NormKind::kNone;
    }

    __device__ __forceinline__ void run() {
        Turn turn;
        bool first_round = true;
        for (Row row = row_at(team.index, 0); row.count > 0; row = after(row)) {
            float x[kVecs][E];
            sum(row, x);
            // The place is free once what it held before was read out of it.
            if (row.in_unit == 0 && !first_round)
                fabric::await_phase(&work.shared.place_empty[team.index][turn.at], turn.parity ^ 1);
            finish_row(row, work.place(team.index, turn.at), x);
            if (row.in_unit + 1 < row.count) continue;
            fabric::order_shared_stores_before_copies();
            team.barrier();
            if (team.thread == 0) fabric::arrive(&work.shared.place_full[team.index][turn.at]);
            turn.next(work.layout.places);
            first_round &= turn.at != 0;
        }
    }

    __device__ __forceinline__ void finish_row(const Row& row, char* place, float (&x)[kVecs][E]) {
        const Call& call = work.call;
        const BulkLayout& layout = work.layout;
        char* sums = place + layout.rows_a_unit * layout.out_row_bytes + row.in_unit * layout.row_bytes;
        char* sum_row = static_cast<char*>(call.sum) + row.token * layout.row_bytes;
        LateWeight<T, kVecs, kPlain> weight;
        const auto residual = [&](int j) {
            return fabric::load(static_cast<const char*>(call.residual) + row.token * layout.row_bytes +
                                lanes.at(j) * 16);
        };
        const bool adds_residual = call.residual != nullptr && !adds_residual_first();
        finish<T, kPlain>(x, call, lanes, adds_residual, residual, team, weight, [&](int j, const Vec16& sum) {
            if (call.sum != nullptr) fabric::store(sum_row + lanes.at(j) * 16, sum);
            if (!kPlain && call.sum_whole) *reinterpret_cast<Vec16*>(sums + lanes.at(j) * 16) = sum;
        });
        float scale;
        const float inverse = inverse_scale<T, kPlain>(x, call, lanes, scale, team);
        put(place, row.in_unit, row.token, x, inverse, scale);
    }

    __device__ __forceinline__ void put(char* place, int32_t i, int64_t row, float (&x)[kVecs][E], float inverse,
                                        float scale) const {
        const Call& call = work.call;
        char* normalized = place + i * work.layout.out_row_bytes;
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j) || (!kPlain && call.normalized == nullptr)) continue;
            OutVector out = out_vector<T, kPlain>(x[j], call.out_kind, inverse);
            const int32_t bytes = out_vector_bytes<T, kPlain>(call.out_kind);
            char* to = normalized + lanes.at(j) * bytes;
            for_each_piece(out, bytes, [&](const auto& piece, int32_t at) {
                using Piece = std::decay_t<decltype(piece)>;
                *reinterpret_cast<Piece*>(to + at) = piece;
            });
        }
        if (!kPlain && call.quant == QuantKind::kPerToken && team.thread == 0) {
            *reinterpret_cast<float*>(normalized + work.layout.out_bytes) = scale;
            static_cast<float*>(call.row_scale)[row] = scale;
        }
    }
};

#endif  // WEAVE_BULK_COPY

}  // namespace weave::gpu
