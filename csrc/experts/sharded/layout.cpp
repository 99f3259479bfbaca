#include "experts/sharded/layout.h"

#include <stdexcept>
#include <string>

#include "base/sizes.h"
#include "fabric/shm.h"

namespace weave::moe {

using fabric::shm::aligned;

namespace {

[[noreturn]] void refuse(int32_t world, int64_t max_tokens, int64_t choices, int64_t row_bytes) {
    throw std::invalid_argument("no layout for " + std::to_string(max_tokens) + " tokens of " +
                                std::to_string(choices) + " choices on each of " + std::to_string(world) + " ranks, " +
                                std::to_string(row_bytes) + " bytes a row");
}

int64_t up_to_multiple(int64_t bytes, int64_t of) {
    return (bytes + of - 1) / of * of;
}

std::vector<fabric::BufferNeed> needs_of(int64_t dispatch_bytes, int64_t combine_bytes) {
    return {{"moe_dispatch", dispatch_bytes, std::nullopt, true}, {"moe_combine", combine_bytes, std::nullopt, true}};
}

}  // namespace

Layout::Layout(int32_t world, int64_t max_tokens, int64_t choices, int64_t row_bytes) : world_(world) {
    const bool counts = max_tokens >= 0 && max_tokens <= INT32_MAX && choices >= 1 && choices <= INT32_MAX;
    if (world < 1 || world > kMostRanks || row_bytes < 1 || !counts || max_tokens * choices > INT32_MAX)
        refuse(world, max_tokens, choices, row_bytes);
    product_of("rows of all ranks", {world, max_tokens + 1, choices, row_bytes + 64});
    routes_offset_ = aligned(sizeof(SlotHeader));
    rows_offset_ = routes_offset_ + aligned(max_tokens * choices * static_cast<int64_t>(sizeof(Route)));
    slot_bytes_ = rows_offset_ + aligned(max_tokens * row_bytes);
    combine_bytes_ = aligned(max_tokens * choices * row_bytes);
}

std::vector<fabric::BufferNeed> Layout::needs() const {
    return needs_of(dispatch_bytes(), combine_bytes());
}

GpuLayout::GpuLayout(int32_t world, int64_t max_tokens, int64_t choices, int64_t row_bytes) {
    const bool counts = max_tokens >= 0 && choices >= 1 && choices <= INT32_MAX && max_tokens <= INT32_MAX;
    if (world < 1 || world > kMostRanks || row_bytes < 16 || row_bytes % 16 != 0 || !counts ||
        product_of("choices of all ranks", {world, max_tokens, choices}) > INT32_MAX)
        refuse(world, max_tokens, choices, row_bytes);
    product_of("rows of all ranks", {world, max_tokens + 1, choices, row_bytes});
    rows_offset_ = up_to_multiple(world * max_tokens * choices * kIdBytes, kAlignment);
    dispatch_bytes_ = rows_offset_ + up_to_multiple(world * max_tokens * row_bytes, kAlignment);
    combine_bytes_ = up_to_multiple(max_tokens * choices * row_bytes, kAlignment);
}

std::vector<fabric::BufferNeed> GpuLayout::needs() const {
    return needs_of(dispatch_bytes(), combine_bytes());
}

}  // namespace weave::moe
