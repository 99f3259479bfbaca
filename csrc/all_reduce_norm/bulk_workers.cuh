// The warps of a CTA of the bulk kernel that move rows and signals; see bulk.cu.
#pragma once

#include "all_reduce_norm/gpu.h"
#include "all_reduce_norm/layout.h"
#include "fabric/bulk_copy.cuh"
#include "fabric/remote.cuh"
#include "fabric/signal.cuh"

namespace weave::gpu {

using fabric::Channel;
using fabric::kMaxCtas;
using fabric::kMaxWorld;
using fabric::Remote;
using fabric::Watch;

constexpr int kMaxStages = 8;
constexpr int kMaxPlaces = 2;
constexpr int kTeams = 2;

// Sizes that all CTAs of all ranks share.
struct BulkLayout {
    uint32_t unit_bytes;  // of partial rows, and of a stage; a longer row is a unit of its own, in pieces
    int32_t rows_a_unit;
    int32_t row_bytes;  // as in OutputLayout
    int32_t out_bytes;
    int32_t out_row_bytes;
    int64_t sum_offset;
    int32_t stages;  // between loader and sender; even
    int32_t places;  // of a team for finished units, used in turn
    int32_t place_bytes;
    int32_t max_in_flight;   // copies of a sender
    int32_t aliases_output;  // the caller's normalized rows are the output buffer itself
    int32_t collects;        // what peers push into the output buffer is taken out of it
    int32_t collects_early;  // and that while partial rows are still being sent
};

#ifdef WEAVE_BULK_COPY

// One copy out of a stage.
struct Job {
    char* to;
    uint32_t bytes;  // 0: no more will come
    int16_t owner;   // whom it brings partial rows, or -1
    uint16_t units;  // how many of those units that makes; 0: it is not the last of its unit
};

// What the warps of a CTA tell each other, beside the barriers. Each word has one writer.
struct Shared {
    uint64_t stage_full[kMaxStages], stage_empty[kMaxStages];
    uint64_t place_full[kTeams][kMaxPlaces], place_empty[kTeams][kMaxPlaces];
    Job jobs[kMaxStages];
    uint32_t pushed[kMaxWorld];  // by owner: units whose partial rows have arrived there
    uint32_t published;          // finished units that have arrived everywhere
    // The loader's own, by owner: units that were collected, and units that were there at its last load.
    uint32_t collected[kMaxWorld], seen[kMaxWorld];

    // One thread.
    __device__ __forceinline__ void init() {
        for (int i = 0; i < kMaxStages; ++i) {
            fabric::init_barrier(&stage_full[i]);
            fabric::init_barrier(&stage_empty[i]);
        }
        for (int team = 0; team < kTeams; ++team)
            for (int i = 0; i < kMaxPlaces; ++i) {
                fabric::init_barrier(&place_full[team][i]);
                fabric::init_barrier(&place_empty[team][i]);
            }
        for (int i = 0; i < kMaxWorld; ++i)
            pushed[i] = collected[i] = seen[i] = 0;
        published = 0;
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// A word that one warp writes and another polls. Atomic operations, as both run at once; everything before
// the store, arrived copies included, is seen by who loads what was stored.
__device__ __forceinline__ void store_release_shared(uint32_t& word, uint32_t value) {
    [[maybe_unused]] uint32_t before;
    asm volatile("atom.release.cta.shared::cta.exch.b32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(fabric::shared_address(&word)), "r"(value)
                 : "memory");
}

__device__ __forceinline__ uint32_t load_acquire_shared(uint32_t& word) {
    uint32_t value;
    asm volatile("atom.acquire.cta.shared::cta.or.b32 %0, [%1], 0;"
                 : "=r"(value)
                 : "r"(fabric::shared_address(&word))
                 : "memory");
    return value;
}

// A place in a ring, and the parity of the phase that its barrier is in when it gets there the next time.
struct Turn {
    uint32_t at = 0, parity = 0;
    __device__ __forceinline__ void next(uint32_t size) {
        if (++at == size) {
            at = 0;
            parity ^= 1;
        }
    }
};

// What every part of the kernel knows.
struct Work {
    const Call& call;
    const BulkLayout& layout;
    const Watch& watch;
    Shared& shared;
    char* stages;
    char* places;
    uint64_t epoch;  // as signal words begin in this call

    __device__ __forceinline__ Channel* channel(int32_t rank) const { return call.group.channel(rank); }
    // In the staging and the output buffer of a rank.
    __device__ __forceinline__ Remote staging(int32_t rank, int64_t at) const {
        return Remote{call.group, rank, call.buffers.staging_offset + at};
    }
    __device__ __forceinline__ Remote output(int32_t rank, int64_t at) const {
        return Remote{call.group, rank, call.buffers.output_offset + at};
    }
    // What a word holds once `count` units have come.
    __device__ __forceinline__ uint64_t word(uint32_t count) const { return epoch | count; }
    __device__ __forceinline__ char* place(int32_t team, uint32_t at) const {
        return places + (team * layout.places + at) * layout.place_bytes;
    }
    // Unit j of this CTA: the index of its first row in a share, and how many rows it has of `owner`'s.
    __device__ __forceinline__ int32_t first(int32_t j) const {
        return static_cast<int32_t>(blockIdx.x + j * gridDim.x) * layout.rows_a_unit;
    }
    __device__ __forceinline__ int32_t unit(int32_t owner, int32_t index) const {
        const int32_t left = call.begin[owner + 1] - call.begin[owner] - index;
        return left < layout.rows_a_unit ? (left < 0 ? 0 : left) : layout.rows_a_unit;
    }
    // How many units of this CTA `owner`'s share has.
    __device__ __forceinline__ uint32_t num_units(int32_t owner) const {
        const int32_t rows = call.begin[owner + 1] - call.begin[owner];
        const uint32_t units = (rows + layout.rows_a_unit - 1) / layout.rows_a_unit;
        return units > blockIdx.x ? (units - blockIdx.x - 1) / gridDim.x + 1 : 0;
    }
};

// Fills stages: this rank's partial rows, unit by unit, owners in turn; and what peers pushed into the output buffer.
struct Loader {
    const Work work;
    Turn turn;
    bool first_round = true;

    __device__ __forceinline__ void take_stage() {
        if (!first_round) fabric::await_phase(&work.shared.stage_empty[turn.at], turn.parity ^ 1);
    }
    __device__ __forceinline__ void next() {
        turn.next(work.layout.stages);
        first_round &= turn.at != 0;
    }

    // `bytes` in pieces that fit a stage.
    __device__ __forceinline__ void load(const char* from, char* to, uint32_t bytes, int32_t owner, uint32_t units) {
        for (uint32_t done = 0; done < bytes; done += work.layout.unit_bytes) {
            const uint32_t piece = min(bytes - done, work.layout.unit_bytes);
            take_stage();
            work.shared.jobs[turn.at] = Job{to + done, piece, static_cast<int16_t>(owner),
                                            static_cast<uint16_t>(done + piece == bytes ? units : 0)};
            fabric::arrive_expecting(&work.shared.stage_full[turn.at], piece);
            fabric::copy_in(work.stages + turn.at * work.layout.unit_bytes, from + done, piece,
                            &work.shared.stage_full[turn.at]);
            next();
        }
    }

    // This rank's partial rows, and what has come from peers: between them, where CTAs are few, so that nothing but the
    // last units is left to be collected while the link stands still; else behind them, since a copy in between would
    // hold up those that the link waits for.
    __device__ __forceinline__ void run() {
        const Call& call = work.call;
        for (int32_t j = 0; work.first(j) < call.share; ++j) {
            send(j);
            if (work.layout.collects_early) collect_what_has_come();
        }
        while (work.layout.collects && collect_next()) {
        }
        take_stage();
        work.shared.jobs[turn.at].bytes = 0;
        fabric::arrive(&work.shared.stage_full[turn.at]);
        // What peers wrote where it is read is not collected, but has to be there.
        for (int32_t step = 1; step < call.group.world; ++step) {
            const int32_t owner = work.call.group.after(step);
            if (work.num_units(owner) > 0) await_unit(owner, work.num_units(owner) - 1);
        }
    }

    // One unit of every owner that has one more here.
    __device__ __forceinline__ void collect_what_has_come() {
#pragma unroll 1
        for (int32_t step = 1; step < work.call.group.world; ++step) {
            const int32_t owner = work.call.group.after(step);
            const uint32_t unit = work.shared.collected[owner];
            if (unit < work.num_units(owner) && fabric::load_relaxed(rows_word(owner)) >= work.word(unit + 1))
                collect(owner);
        }
    }

    // One more unit of every owner, waited for; false if there is none.
    __device__ __forceinline__ bool collect_next() {
        bool any = false;
#pragma unroll 1
        for (int32_t step = 1; step < work.call.group.world; ++step) {
            const int32_t owner = work.call.group.after(step);
            if (work.shared.collected[owner] == work.num_units(owner)) continue;
            collect(owner);
            any = true;
        }
        return any;
    }

    // Unit j of every peer's share.
    __device__ __forceinline__ void send(int32_t j) {
        const Call& call = work.call;
        const int64_t row_bytes = work.layout.row_bytes;
        const char* partial = static_cast<const char*>(call.partial);
        const int32_t index = work.first(j);
        for (int32_t step = 1; step < call.group.world; ++step) {
            const int32_t owner = work.call.group.after(step);
            const int64_t slot_row = static_cast<int64_t>(call.group.world - 1 - step) * call.share + index;
            char* to = work.staging(owner, slot_row * row_bytes).pointer();
            load(partial + (call.begin[owner] + index) * row_bytes, to, work.unit(owner, index) * row_bytes, owner,
                 j + 1);
        }
    }

    __device__ __forceinline__ const uint64_t* rows_word(int32_t owner) const {
        return &work.channel(work.call.group.rank)->rows[owner][blockIdx.x];
    }

    // Waits until unit j of `owner` is there. A word covers all units up to it.
    __device__ __forceinline__ void await_unit(int32_t owner, uint32_t j) {
        if (work.shared.seen[owner] > j) return;
        const uint64_t word = fabric::wait(rows_word(owner), work.word(j + 1), work.watch, owner, fabric::Slot::kRows);
        work.shared.seen[owner] = fabric::count_in(word);
        fabric::order_accesses_before_copies();
    }

    // The next unit of `owner`.
    __device__ __forceinline__ void collect(int32_t owner) {
        const Call& call = work.call;
        const BulkLayout& layout = work.layout;
        const int32_t j = work.shared.collected[owner]++;
        const int32_t index = work.first(j), rows = work.unit(owner, index);
        await_unit(owner, j);
        const int64_t token = call.begin[owner] + index;
        const char* output = work.output(call.group.rank, 0).pointer();
        char* normalized = static_cast<char*>(call.normalized) + token * layout.out_bytes;
        if (call.quant == QuantKind::kPerToken) {
            // Rows that carry a scale are taken one by one, since the caller's tensor has no room for it.
            for (int32_t i = 0; i < rows; ++i) {
                const char* from = output + (token + i) * layout.out_row_bytes;
                static_cast<float*>(call.row_scale)[token + i] =
                    *reinterpret_cast<const volatile float*>(from + layout.out_bytes);
                load(from, normalized + i * layout.out_bytes, layout.out_bytes, -1, 0);
            }
        } else if (call.normalized != nullptr && !layout.aliases_output) {
            load(output + token * layout.out_bytes, normalized, rows * layout.out_bytes, -1, 0);
        }
        if (call.sum_whole) {
            load(output + layout.sum_offset + token * layout.row_bytes,
                 static_cast<char*>(call.sum) + token * layout.row_bytes, rows * layout.row_bytes, -1, 0);
        }
    }
};

// Sends stages as they fill, in order, and reports the partial rows that have arrived.
struct StageSender {
    // More than are ever in flight.
    static constexpr uint32_t kRing = 16;
    const Work work;
    uint32_t* ring;  // owner and units of what is in flight
    Turn turn, to_free;
    uint32_t num_sent = 0, num_freed = 0, num_arrived = 0;

    __device__ __forceinline__ void run() {
        for (;; turn.next(work.layout.stages)) {
            while (!fabric::is_over(&work.shared.stage_full[turn.at], turn.parity)) {
                // Nothing to send: see what has arrived meanwhile.
                fabric::await_reading<0>();
                free(0);
                if (num_sent != num_arrived) report(num_sent - num_arrived - 1);
            }
            const Job job = work.shared.jobs[turn.at];
            if (job.bytes == 0) break;
            fabric::copy_out(job.to, work.stages + turn.at * work.layout.unit_bytes, job.bytes);
            fabric::commit_copies();
            ring[num_sent++ % kRing] = static_cast<uint32_t>(job.units) << 16 | static_cast<uint16_t>(job.owner);
            if (work.layout.stages > 4) {
                fabric::await_reading<3>();
                free(3);
            } else {
                fabric::await_reading<1>();
                free(1);
            }
            if (num_sent - num_arrived > static_cast<uint32_t>(work.layout.max_in_flight))
                report(work.layout.max_in_flight);
        }
        while (num_sent != num_arrived)
            report(num_sent - num_arrived - 1);
    }

    // All but the last `reading` copies have been read out of their stages.
    __device__ __forceinline__ void free(uint32_t reading) {
        for (; num_sent - num_freed > reading; ++num_freed) {
            fabric::arrive(&work.shared.stage_empty[to_free.at]);
            to_free.next(work.layout.stages);
        }
    }

    // Waits until at most `pending` copies are in flight, which is one less.
    __device__ __forceinline__ void report(uint32_t pending) {
        fabric::await_arrival(pending);
        const uint32_t what = ring[num_arrived++ % kRing];
        if (what >> 16 != 0) store_release_shared(work.shared.pushed[what & 0xffff], what >> 16);
    }
};

// Sends finished units to everyone, in order, and reports those that have arrived.
struct RowSender {
    const Work work;

    __device__ __forceinline__ void run() {
        const uint32_t num_units = work.num_units(work.call.group.rank);
        uint32_t num_freed = 0, num_arrived = 0;
        Turn turn, to_free;  // of a team's places: the teams take units in turn
        const auto free = [&](uint32_t upto) {
            for (; num_freed < upto; ++num_freed) {
                fabric::arrive(&work.shared.place_empty[num_freed % kTeams][to_free.at]);
                if (num_freed % kTeams == kTeams - 1) to_free.next(work.layout.places);
            }
        };
        for (uint32_t j = 0; j < num_units; ++j) {
            const uint32_t team = j % kTeams;
            while (!fabric::is_over(&work.shared.place_full[team][turn.at], turn.parity)) {
                fabric::await_reading<0>();
                free(j);
                if (num_arrived == j) continue;
                fabric::await_arrival<0>();
                store_release_shared(work.shared.published, num_arrived = j);
            }
            push(j, work.place(team, turn.at));
            fabric::await_reading<1>();
            free(j);
            fabric::await_arrival<1>();
            store_release_shared(work.shared.published, num_arrived = j);
            if (team == kTeams - 1) turn.next(work.layout.places);
        }
        Remote::flush();
        store_release_shared(work.shared.published, num_units);
    }

    __device__ __forceinline__ void push(int32_t j, const char* place) {
        const Call& call = work.call;
        const BulkLayout& layout = work.layout;
        const int32_t index = work.first(j);
        const int32_t count = work.unit(call.group.rank, index);
        const int64_t first = call.begin[call.group.rank] + index;
        const char* sums = place + layout.rows_a_unit * layout.out_row_bytes;
        for (int step = 1; step < call.group.world; ++step) {
            const int32_t peer = call.group.after(step);
            if (call.normalized != nullptr)
                work.output(peer, first * layout.out_row_bytes).put(place, count * layout.out_row_bytes);
            if (call.sum_whole)
                work.output(peer, layout.sum_offset + first * layout.row_bytes).put(sums, count * layout.row_bytes);
        }
        char* normalized = static_cast<char*>(call.normalized) + first * layout.out_bytes;
        if (call.normalized != nullptr) {
            if (layout.out_row_bytes == layout.out_bytes) {
                fabric::copy_out(normalized, place, count * layout.out_bytes);
            } else {
                for (int32_t i = 0; i < count; ++i)
                    fabric::copy_out(normalized + i * layout.out_bytes, place + i * layout.out_row_bytes,
                                     layout.out_bytes);
            }
        }
        fabric::commit_copies();
    }
};

// The warp that signals: lane `step - 1` to the rank `step` after this one. One fence for all that has arrived.
__device__ __forceinline__ void publish(const Work work) {
    const Call& call = work.call;
    const int32_t step = (threadIdx.x & 31) + 1;
    const bool active = step < call.group.world;
    const int32_t peer = active ? work.call.group.after(step) : call.group.rank;
    const uint32_t all_rows = active ? work.num_units(call.group.rank) : 0,
                   all_partial = active ? work.num_units(peer) : 0;
    uint32_t rows = 0, partial = 0;
    while (!__all_sync(0xffffffffu, rows == all_rows && partial == all_partial)) {
        const uint32_t rows_now = active ? load_acquire_shared(work.shared.published) : 0;
        const uint32_t partial_now = active ? load_acquire_shared(work.shared.pushed[peer]) : 0;
        if (!__any_sync(0xffffffffu, rows_now != rows || partial_now != partial)) {
            __nanosleep(32);
            continue;
        }
        fabric::fence();
        Channel* channel = work.channel(peer);
        if (partial_now != partial)
            fabric::store_relaxed(&channel->partial[call.group.rank][blockIdx.x], work.word(partial_now));
        if (rows_now != rows) fabric::store_relaxed(&channel->rows[call.group.rank][blockIdx.x], work.word(rows_now));
        rows = rows_now;
        partial = partial_now;
    }
}

#endif  // WEAVE_BULK_COPY

}  // namespace weave::gpu
