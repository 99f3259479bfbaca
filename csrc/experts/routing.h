// Rows of a mixture sorted by expert, on every GPU: what ops/experts/routing_kernels.py says of `order` and
// `table`, for any number of rows. A row is a pair [token][choice], by its number token * choices + choice.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace weave::moe_experts {

constexpr int32_t kMostExperts = 1024;
constexpr int32_t kRoutingThreads = 256;
constexpr int32_t kRowsAThread = 4;
constexpr int32_t kStepRows = kRoutingThreads * kRowsAThread;  // that a CTA has in its registers at a time
// Every CTA reads the counts of all chunks: 128 KiB take about as long as sorting one more step.
constexpr int64_t kMostCounts = int64_t{1} << 15;
constexpr int64_t kMostChunks = 128;

struct RowsToSort {
    const int64_t* experts;  // of each row; remote where below 0 or not below num_experts
    int64_t num_rows;
    int32_t num_experts;
    int32_t tile_rows;
    int32_t* counts;  // workspace of num_counts() numbers; not read if there are none
    int32_t* order;   // [num_rows]
    int32_t* table;   // [tiles + 1, 4] and a number of each tile, at a multiple of 16 bytes
};

// Experts that the kernels are compiled for.
constexpr int32_t bins_of(int32_t num_experts) {
    return num_experts <= 64 ? 64 : num_experts <= 128 ? 128 : num_experts <= 256 ? 256 : kMostExperts;
}

// What each CTA sorts: rows that follow one another.
struct Chunks {
    int64_t count;
    int64_t rows;
};

// One at least, which finds that there are no tiles.
constexpr Chunks chunks_of(int64_t num_rows, int32_t num_experts) {
    const int64_t affordable = kMostCounts / bins_of(num_experts);
    const int64_t most = affordable < kMostChunks ? affordable : kMostChunks;
    const int64_t steps = num_rows > kStepRows ? (num_rows + kStepRows - 1) / kStepRows : 1;
    const int64_t a_chunk = (steps + most - 1) / most;
    return {(steps + a_chunk - 1) / a_chunk, a_chunk * kStepRows};
}

// Numbers of 4 bytes that the workspace has: one CTA alone needs none.
constexpr int64_t num_counts(int64_t num_rows, int32_t num_experts) {
    const Chunks chunks = chunks_of(num_rows, num_experts);
    return chunks.count > 1 ? chunks.count * bins_of(num_experts) : 0;
}

// Enqueues one kernel or two, and returns a CUDA error code; 0 is success. `early`: the second one is launched while
// the first one runs, where the GPU can do that.
int sort_rows(const RowsToSort& asked, bool early, void* stream);

}  // namespace weave::moe_experts
