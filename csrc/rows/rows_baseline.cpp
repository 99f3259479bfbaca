#include "rows/rows.h"

#define WEAVE_ISA "baseline"
#define WEAVE_LANES 4
#define WEAVE_ROWS kRowsBaseline
#include "rows/rows_body.h"

namespace weave {

std::vector<const RowFunctions*> usable_rows() {
    std::vector<const RowFunctions*> usable;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        usable.push_back(&kRowsAvx512);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        usable.push_back(&kRowsAvx2);
    }
#endif
    usable.push_back(&kRowsBaseline);
    return usable;
}

const RowFunctions& choose_rows() {
    static const RowFunctions& widest = *usable_rows().front();
    return widest;
}

}  // namespace weave
