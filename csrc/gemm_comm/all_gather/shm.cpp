#include "gemm_comm/all_gather/shm.h"

#include <algorithm>
#include <cstring>

#include "rows/divide.h"
#include "rows/huge_pages.h"

namespace weave {

AllGatherGemm::AllGatherGemm(fabric::shm::Group& group, const fabric::shm::RowsSite& site, int64_t data_bytes,
                             int32_t max_threads)
    : call_(group, site, data_bytes), max_threads_(std::max(1, max_threads)) {}

Status AllGatherGemm::run(int64_t tokens, const Shard& layout, const void* shard, void* whole, int32_t num_threads) {
    Status status = call_.enter(tokens);
    if (!status.ok()) return status;
    const fabric::shm::Held held(call_.group());
    const int32_t threads = std::min(num_threads, max_threads_), rank = call_.rank(), world = call_.world();
    const int64_t bytes = layout.outer * layout.block_bytes;
    const char* from = static_cast<const char*>(shard);
    char* own = call_.own();
    divide(0, bytes, 1, threads,
           [&](int64_t begin, int64_t end, int32_t) { std::memcpy(own + begin, from + begin, end - begin); });
    call_.signal(tokens);
    advise_huge_pages(whole, world * bytes);
    place(rank, layout, from, static_cast<char*>(whole), threads);
    for (int32_t step = 1; step < world && status.ok(); ++step) {
        const int32_t peer = (rank + step) % world;
        status = call_.wait(peer, tokens);
        if (status.ok()) place(peer, layout, call_.rows(peer), static_cast<char*>(whole), threads);
    }
    call_.group().leave();
    return status;
}

void AllGatherGemm::place(int32_t rank, const Shard& layout, const char* from, char* whole, int32_t num_threads) const {
    const int64_t block = layout.block_bytes, world = call_.world();
    if (block == 0) return;
    divide(0, layout.outer * block, 1, num_threads, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t at = begin; at < end;) {
            const int64_t outer = at / block, first = at % block, count = std::min(block - first, end - at);
            std::memcpy(whole + (outer * world + rank) * block + first, from + at, count);
            at += count;
        }
    });
}

}  // namespace weave
