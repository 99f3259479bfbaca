#include "experts/sharded/counts.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "base/sizes.h"

namespace weave::moe {
namespace {

constexpr int64_t kNumParities = 2;
constexpr int64_t kBytes = kNumParities * static_cast<int64_t>(sizeof(int64_t));

}  // namespace

TokenCounts::TokenCounts(fabric::shm::Group& group, int64_t offset, int64_t data_bytes, uint32_t site, double timeout_s)
    : group_(group), offset_(offset), tag_(fabric::shm::tag(site, 0)), timeout_s_(timeout_s) {
    timeout_of(timeout_s);
    if (offset < 0 || offset % static_cast<int64_t>(sizeof(int64_t)) != 0 || offset > data_bytes - kBytes)
        throw std::invalid_argument("token counts at " + std::to_string(offset) + " do not fit an arena of " +
                                    std::to_string(data_bytes) + " bytes");
}

fabric::BufferNeed TokenCounts::need() {
    return {"token_counts", fabric::shm::aligned(kBytes), std::nullopt, true};
}

int64_t& TokenCounts::count(int32_t rank, uint32_t epoch) const {
    return reinterpret_cast<int64_t*>(group_.data(rank) + offset_)[epoch % kNumParities];
}

Status TokenCounts::largest(int64_t tokens, int64_t& most) {
    Status status = group_.enter();
    if (status.code == Code::kBusy || status.code == Code::kForked) return status;
    const fabric::shm::Held held(group_);
    if (status.ok()) {
        count(group_.rank(), group_.epoch() + 1) = tokens;
        group_.signal_ready(tag_);
        group_.store_rows_relaxed();
        status = group_.wait_all_ready(tag_, timeout_s_);
    }
    if (status.ok()) {
        most = tokens;
        for (int32_t rank = 0; rank < group_.world(); ++rank)
            most = std::max(most, count(rank, group_.epoch()));
    }
    group_.leave();
    return status;
}

}  // namespace weave::moe
