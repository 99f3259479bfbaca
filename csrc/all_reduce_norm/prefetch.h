// Memory that a kernel asks the GPU to load into its L2 cache, beside its own work: weights that the kernel behind it
// reads.
#pragma once

#include <cstdint>

namespace weave::gpu {

// `rows` pieces of `row_bytes` bytes, the first at `begin` and each `pitch_bytes` behind the one before. All of it is
// memory that may be read.
struct PrefetchRange {
    const char* begin;
    int64_t pitch_bytes;
    int32_t rows;
    int32_t row_bytes;
};

constexpr int32_t kMaxPrefetchRanges = 4;

// Ranges in the order in which they are wanted. None: nothing is loaded.
struct Prefetch {
    int32_t num_ranges;
    int32_t num_ctas;  // that load, at most; 0: one for each SM that the kernel's own work leaves idle
    PrefetchRange range[kMaxPrefetchRanges];
};

}  // namespace weave::gpu
