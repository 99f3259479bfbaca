// What all warps of a CTA of the bulk kernel know and share; see bulk.cu.
#pragma once

#include "fabric/bulk_copy.cuh"
#include "fabric/remote.cuh"
#include "fabric/signal.cuh"
#include "reduction/gpu.h"
#include "reduction/layout.h"

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

// Words that the warps of a CTA exchange, in addition to the barriers. Each word has one writer.
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

#endif  // WEAVE_BULK_COPY

}  // namespace weave::gpu
