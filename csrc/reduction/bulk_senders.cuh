// The threads of the bulk kernel that send rows out of shared memory, and the warp that signals; see bulk.cu.
#pragma once

#include "reduction/bulk_work.cuh"

namespace weave::gpu {

#ifdef WEAVE_BULK_COPY

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
