// Sizes that plans ask for without a GPU.
#include "all_reduce_norm/pushed_tiles.h"

#include <optional>

#include "all_reduce_norm/layout.h"
#include "fabric/arena.h"
#include "gemm/order.h"

namespace weave::gpu {

int64_t pushed_tiles_staging_bytes(int64_t tokens, int64_t hidden, DType dtype, int32_t world) {
    return world * share_of(tokens, world) * hidden * size_of(dtype);
}

int64_t pushed_tiles_most_tokens(int32_t world) {
    return int64_t{fabric::kMaxCtas} * gemm::kPanelRows * world;
}

std::vector<fabric::BufferNeed> pushed_tiles_needs(int64_t tokens, int64_t hidden, DType dtype, int32_t world) {
    const int64_t bytes = pushed_tiles_staging_bytes(tokens, hidden, dtype, world);
    const int64_t aligned = (bytes + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment;
    std::vector<fabric::BufferNeed> needs{{"staging", aligned, std::nullopt, true}};
    for (fabric::BufferNeed& need : buffer_needs(GpuKernel::kBulk, tokens, hidden, dtype, OutKind::kSame, world)) {
        if (need.name == "output") needs.push_back(std::move(need));
    }
    return needs;
}

}  // namespace weave::gpu
