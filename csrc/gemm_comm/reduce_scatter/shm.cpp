#include "gemm_comm/reduce_scatter/shm.h"

#include <algorithm>

#include "rows/divide.h"
#include "rows/huge_pages.h"

namespace weave {

GemmReduceScatter::GemmReduceScatter(fabric::shm::Group& group, const fabric::shm::RowsSite& site, int64_t data_bytes,
                                     DType dtype, int32_t max_threads)
    : call_(group, site, data_bytes),
      functions_(choose_rows()),
      dtype_(dtype),
      max_threads_(std::max(1, max_threads)) {}

Status GemmReduceScatter::run(int64_t tokens, const Parts& parts, float scale, void* out, int32_t num_threads) {
    call_.signal(tokens);
    const int64_t needed = max_threads_ * padded(parts.row);
    if (static_cast<int64_t>(scratch_.size()) < needed) scratch_.resize(needed);
    advise_huge_pages(out, parts.outer * parts.inner * parts.row * size_of(dtype_));
    Status status;
    for (int32_t step = 1; step < call_.world() && status.ok(); ++step)
        status = call_.wait((call_.rank() + step) % call_.world(), tokens);
    if (status.ok()) reduce(parts, scale, static_cast<char*>(out), std::min(num_threads, max_threads_));
    call_.group().leave();
    return status;
}

void GemmReduceScatter::reduce(const Parts& parts, float scale, char* out, int32_t num_threads) {
    const int32_t world = call_.world();
    const int64_t row_bytes = parts.row * size_of(dtype_);
    divide(0, parts.outer * parts.inner, row_bytes * (world + 1), num_threads,
           [&](int64_t begin, int64_t end, int32_t thread) {
               std::vector<const void*> partials(world);
               Rows rows{};
               rows.hidden = parts.row;
               rows.world = world;
               rows.dtype = rows.out_dtype = dtype_;
               rows.partials = partials.data();
               rows.scale = scale;
               for (int64_t at = begin; at < end;) {
                   const int64_t outer = at / parts.inner, first = at % parts.inner;
                   const int64_t count = std::min(parts.inner - first, end - at);
                   const int64_t there = ((outer * world + call_.rank()) * parts.inner + first) * row_bytes;
                   for (int32_t rank = 0; rank < world; ++rank)
                       partials[rank] = call_.rows(rank) + there;
                   rows.sum = out + at * row_bytes;
                   functions_.reduce(rows, 0, count, scratch_.data() + thread * padded(parts.row));
                   at += count;
               }
           });
}

}  // namespace weave
