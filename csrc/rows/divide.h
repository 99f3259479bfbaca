// Rows shared out among the threads of a call.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace weave {

// A thread is woken only for this much data; below it, waking costs more than it saves.
constexpr int64_t kBytesPerThread = 256 << 10;

// body(begin, end, thread) over [begin, end) in equal parts. The end of the parallel region orders all threads' stores
// before what the calling thread does next, such as a signal.
template <typename Body>
void divide(int64_t begin, int64_t end, int64_t row_bytes, int32_t num_threads, const Body& body) {
    const int64_t num_rows = end - begin;
    const int64_t useful = std::min<int64_t>(num_rows, num_rows * row_bytes / kBytesPerThread);
    const int32_t count = static_cast<int32_t>(std::min<int64_t>(num_threads, useful));
    if (count <= 1) return body(begin, end, 0);
#pragma omp parallel num_threads(count)
    {
        const int64_t part = omp_get_thread_num(), num_parts = omp_get_num_threads();
        body(begin + num_rows * part / num_parts, begin + num_rows * (part + 1) / num_parts,
             static_cast<int32_t>(part));
    }
}

}  // namespace weave
