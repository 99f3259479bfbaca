// Rows in flight from the staging buffer through shared memory: a thread claims and fetches them (bulk copies) while
// the teams of its CTA finish those before. The memory is that of the stages of A and B, which are free by then.
//
// Memory order of a slot:
//
//   store   the copies of the fetching thread, and the number of the row
//   flag    full[slot], which counts their bytes
//   wait    the 128 threads of the team whose turn it is, once the use before, which may be the other team's, is over
//   again   empty[slot]: the 4 warps of the team have read it into registers
#pragma once

#include "fabric/call.cuh"
#include "gemm/mainloop.cuh"
#include "reduction/gpu.h"

namespace weave::gpu {

using fabric::Watch;

constexpr int32_t kMostSlots = 8;
constexpr int32_t kNoRow = -1;

struct RowRing {
    uint64_t full[kMostSlots], empty[kMostSlots];
    int32_t row[kMostSlots];
};

// A slot holds the row of each source, and of the residual if there is one.
struct RingPlace {
    uint8_t* memory;
    int32_t row_bytes;
    int32_t num_parts;
    int32_t num_slots;

    __device__ __forceinline__ uint8_t* slot(int32_t index) const { return memory + index * row_bytes * num_parts; }
};

WEAVE_HOST_DEVICE inline int32_t ring_slots(int32_t bytes, int32_t row_bytes, int32_t num_parts) {
    const int32_t fit = bytes / (row_bytes * num_parts);
    return fit < kMostSlots ? fit : kMostSlots;
}

__device__ __forceinline__ void init_ring(RowRing& ring) {
    if (threadIdx.x != 32) return;
    for (int i = 0; i < kMostSlots; ++i) {
        gemm::init_barrier(&ring.full[i], 1);
        gemm::init_barrier(&ring.empty[i], 4);
    }
    gemm::publish_barriers();
}

// Claims a row of those that this rank owns: its number, which is beyond the last if none are left. One at a time: who
// claimed several would finish them when all others have ended. Words of an epoch before are smaller: open_claims()
// comes before a thread's first claim.
__device__ __forceinline__ void open_claims(uint64_t* word, uint64_t epoch) {
    atomicMax(reinterpret_cast<unsigned long long*>(word),
              static_cast<unsigned long long>(fabric::signal_word(epoch, 0)));
}
__device__ __forceinline__ int32_t claim_row(uint64_t* word, uint64_t epoch) {
    const uint64_t before = atomicAdd(reinterpret_cast<unsigned long long*>(word), 1ull);
    return static_cast<int32_t>(before - fabric::signal_word(epoch, 0));
}

// One thread. `complete` is what every source's word of a panel comes to; `slot_bytes` of a source in the staging
// buffer.
__device__ __forceinline__ void fetch_rows(const Call& call, const Watch& watch, uint64_t epoch, uint64_t complete,
                                           int64_t slot_bytes, const RingPlace& place, RowRing& ring) {
    const fabric::GroupView& group = call.group;
    fabric::Channel* own = group.channel(group.rank);
    const int32_t begin = call.begin[group.rank], count = call.begin[group.rank + 1] - begin;
    const char* staging = group.base[group.rank] + call.buffers.staging_offset;
    uint64_t* word = &own->rows[group.rank][1];
    int32_t panel = -1, slot = 0;
    uint32_t parity = 1;
    auto next_slot = [&] {
        if (++slot == place.num_slots) {
            slot = 0;
            parity ^= 1;
        }
    };
    open_claims(word, epoch);
    for (int32_t next = claim_row(word, epoch); next < count;) {
        const int32_t row = next;
        next = claim_row(word, epoch);  // comes back while this row is fetched
        if (panel != row / gemm::kPanelRows) {
            panel = row / gemm::kPanelRows;
            for (int32_t source = 0; source < group.world; ++source)
                fabric::wait(&own->partial[source][panel], complete, watch, source, fabric::Slot::kPartial);
            fabric::order_accesses_before_copies();
        }
        fabric::await_phase(&ring.empty[slot], parity);
        ring.row[slot] = row;
        fabric::arrive_expecting(&ring.full[slot], place.row_bytes * place.num_parts);
        uint8_t* to = place.slot(slot);
        const char* from = staging + static_cast<int64_t>(row) * place.row_bytes;
        for (int32_t source = 0; source < group.world; ++source, to += place.row_bytes, from += slot_bytes)
            fabric::copy_in(to, from, place.row_bytes, &ring.full[slot]);
        const int64_t residual_at = static_cast<int64_t>(begin + row) * place.row_bytes;
        if (call.residual != nullptr)
            fabric::copy_in(to, static_cast<const char*>(call.residual) + residual_at, place.row_bytes,
                            &ring.full[slot]);
        next_slot();
    }
    for (int i = 0; i < gemm::kConsumers; ++i) {
        fabric::await_phase(&ring.empty[slot], parity);
        ring.row[slot] = kNoRow;
        fabric::arrive(&ring.full[slot]);
        next_slot();
    }
}

}  // namespace weave::gpu
