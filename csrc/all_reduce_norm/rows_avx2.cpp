#include "all_reduce_norm/rows.h"

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

#define WEAVE_ISA "avx2"
#define WEAVE_LANES 8
#define WEAVE_ROWS kRowsAvx2
#include "all_reduce_norm/rows_body.h"
#endif
