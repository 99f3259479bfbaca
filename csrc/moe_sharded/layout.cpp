#include "moe_sharded/layout.h"

#include <stdexcept>
#include <string>

#include "fabric/shm.h"

namespace weave::moe {

using fabric::shm::aligned;

Layout::Layout(int32_t world, int64_t max_tokens, int64_t choices, int64_t row_bytes) : world_(world) {
    if (world < 1 || max_tokens < 0 || choices < 1 || row_bytes < 1 || max_tokens * choices > INT32_MAX) {
        throw std::invalid_argument("no layout for " + std::to_string(max_tokens) + " tokens of " +
                                    std::to_string(choices) + " choices on each of " + std::to_string(world) +
                                    " ranks, " + std::to_string(row_bytes) + " bytes a row");
    }
    routes_offset_ = aligned(sizeof(SlotHeader));
    rows_offset_ = routes_offset_ + aligned(max_tokens * choices * static_cast<int64_t>(sizeof(Route)));
    slot_bytes_ = rows_offset_ + aligned(max_tokens * row_bytes);
    combine_bytes_ = aligned(max_tokens * choices * row_bytes);
}

std::vector<fabric::BufferNeed> Layout::needs() const {
    return {{"moe_dispatch", dispatch_bytes(), std::nullopt, true},
            {"moe_combine", combine_bytes(), std::nullopt, true}};
}

}  // namespace weave::moe
