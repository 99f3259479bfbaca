// Timeouts as kernels take them.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/sizes.h"

namespace weave {

inline uint64_t nanoseconds_of(double timeout_s) {
    return static_cast<uint64_t>(std::llround(timeout_of(timeout_s) * 1e9));
}

}  // namespace weave
