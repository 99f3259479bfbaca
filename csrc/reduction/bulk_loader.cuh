// The thread of the bulk kernel that brings rows into shared memory; see bulk.cu.
#pragma once

#include "reduction/bulk_work.cuh"

namespace weave::gpu {

#ifdef WEAVE_BULK_COPY

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
    // last units is left to be collected while the link stands still; else after them, since a copy in between would
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

#endif  // WEAVE_BULK_COPY

}  // namespace weave::gpu
