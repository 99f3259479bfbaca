#include "rows/rows.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include <immintrin.h>
// g++ 12 takes the "undefined" operands of its own conversion intrinsics for uninitialized variables.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define WEAVE_ISA "avx512"
#define WEAVE_LANES 16
#define WEAVE_ROWS kRowsAvx512
#include "rows/rows_body.h"
#endif
