// Sizes that plans and prices ask for without a GPU, by the formulas of the launch.
#include "gemm_comm/pushed_tiles.h"

#include <algorithm>
#include <optional>

#include "fabric/arena.h"
#include "reduction/layout.h"

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

gemm::TileOrder pushed_tiles_order(int64_t tokens, int64_t hidden, const TileConfig& tiles, int32_t rank,
                                   int32_t world) {
    gemm::TileOrder order{};
    for (int32_t owner = 0; owner <= world; ++owner)
        order.begin[owner] = static_cast<int32_t>(tokens * owner / world);
    order.num_owners = world;
    order.rank = rank;
    order.pairs = gemm::ceiling(share_of(tokens, world), gemm::kPairRows);
    order.columns = gemm::ceiling(hidden, tiles.tile_columns);
    order.group_pairs = std::max(tiles.group_pairs, 1);
    order.owner_order = gemm::OwnerOrder::kInterleaved;
    return order;
}

int32_t pushed_tiles_clusters(const TileConfig& tiles, int32_t num_sms) {
    const int32_t all_clusters = num_sms / gemm::kClusterCtas;
    return all_clusters - std::clamp(tiles.reducer_ctas / gemm::kClusterCtas, 0, all_clusters - 1);
}

int32_t pushed_tiles_waves(int64_t tokens, int64_t hidden, int32_t tile_columns, int32_t reducer_ctas, int32_t world,
                           int32_t num_sms) {
    if (num_sms < gemm::kClusterCtas) return 0;
    const TileConfig tiles{tile_columns, 1, reducer_ctas};
    return gemm::ceiling(pushed_tiles_order(tokens, hidden, tiles, 0, world).num_tiles(),
                         pushed_tiles_clusters(tiles, num_sms));
}

}  // namespace weave::gpu
