// What a kernel asks of symmetric memory: named ranges of every rank's arena, placed by the plan.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace weave::fabric {

struct BufferNeed {
    std::string name;
    int64_t num_bytes = 0;
    std::optional<uint32_t> fill;  // what every word holds before the first call
    // Keeps one place for as long as the arena lives. All that peers write has to: a peer that is a call ahead writes
    // while this rank is still in the call before. Else the range is free again when its call, or the last reader of
    // its contents, has ended.
    bool per_arena = false;
};

}  // namespace weave::fabric
