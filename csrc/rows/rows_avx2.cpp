#include "rows/rows.h"

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

#define WEAVE_ISA "avx2"
#define WEAVE_LANES 8
#define WEAVE_ROWS kRowsAvx2
#include "rows/rows_body.h"
#endif
