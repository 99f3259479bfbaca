// Element types that kernels read and write. Sums are always in fp32.
#pragma once

#include <cstdint>

namespace weave {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline int64_t size_of(DType dtype) {
    return dtype == DType::kFloat32 ? 4 : 2;
}

}  // namespace weave
