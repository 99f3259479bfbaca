#include "reduction/shm.h"

#include <algorithm>
#include <cstring>

#include "rows/divide.h"
#include "rows/huge_pages.h"

namespace weave {
namespace {

constexpr int32_t kNumParameters = 5;

using fabric::shm::aligned;

}  // namespace

AllReduceNorm::AllReduceNorm(fabric::shm::Group& group, const AllReduceNormSite& site, int32_t max_threads,
                             const RowFunctions& functions)
    : group_(group),
      site_(site),
      functions_(functions),
      max_threads_(std::max(1, max_threads)),
      partials_(group.world()),
      parameters_(kNumParameters * padded(site.hidden)),
      scratch_(max_threads_ * padded(site.hidden)) {}

int64_t AllReduceNorm::max_share(const AllReduceNormSite& site, int32_t world) {
    return (site.max_tokens + world - 1) / world;
}

int64_t AllReduceNorm::output_bytes(const AllReduceNormSite& site, int32_t world) {
    const int64_t elements = max_share(site, world) * site.hidden;
    return aligned(elements * size_of(site.out_dtype)) + aligned(elements * size_of(site.dtype));
}

std::vector<fabric::BufferNeed> AllReduceNorm::buffer_needs(int64_t max_tokens, int64_t hidden, DType dtype,
                                                            DType out_dtype, int32_t world) {
    AllReduceNormSite site;
    site.max_tokens = max_tokens;
    site.hidden = hidden;
    site.dtype = dtype;
    site.out_dtype = out_dtype;
    return {fabric::shm::partial_need(max_tokens * hidden * size_of(dtype)),
            {"output", output_bytes(site, world), std::nullopt, false}};
}

char* AllReduceNorm::output_sum(int32_t rank) const {
    return output_normalized(rank) +
           aligned(max_share(site_, group_.world()) * site_.hidden * size_of(site_.out_dtype));
}

// Two buffers, by parity of the epoch. A one-shot call synchronizes once: when this rank has returned from epoch e, a
// slow peer may still read its buffer of e, so the GEMM of e + 1 goes into the other one. That of e + 2 may
// overwrite buffer e: this rank is through e + 1 then, so it has seen every peer's `ready` of e + 1, which a peer
// signals only after it finished e. Output rows need one buffer: they are written after `ready` was waited for.
void* AllReduceNorm::partial() const {
    return group_.data(group_.rank()) + site_.layout.partial_offset + next_parity() * site_.layout.partial_bytes;
}

Status AllReduceNorm::enter(int64_t tokens) {
    Status status = group_.enter(site_.layout, fabric::shm::tag(site_.tag, tokens), site_.timeout_s);
    const bool entered = status.code != Code::kBusy && status.code != Code::kForked;
    if (!status.ok() && entered) group_.leave();
    return status;
}

Status AllReduceNorm::run(int64_t tokens, const AllReduceNormArrays& arrays, int32_t num_threads) {
    const int64_t bytes = tokens * site_.hidden * size_of(site_.dtype);
    const int32_t threads = std::min(num_threads, max_threads_);
    if (arrays.partial != nullptr && bytes != 0) {
        char* to = static_cast<char*>(partial());
        const char* from = static_cast<const char*>(arrays.partial);
        divide(0, bytes, 1, threads,
               [&](int64_t begin, int64_t end, int32_t) { std::memcpy(to + begin, from + begin, end - begin); });
    }
    group_.signal_ready(fabric::shm::tag(site_.tag, tokens));
    const Rows call = rows(arrays);
    advise_huge_pages(call.sum, bytes);
    advise_huge_pages(call.normalized, tokens * site_.hidden * size_of(site_.out_dtype));
    Status status = exchange(tokens, call, threads);
    group_.leave();
    return status;
}

Status AllReduceNorm::exchange(int64_t tokens, const Rows& rows, int32_t num_threads) {
    return tokens <= site_.one_shot_max_tokens ? one_shot(tokens, rows, num_threads)
                                               : two_shot(tokens, rows, num_threads);
}

const float* AllReduceNorm::parameter(int32_t index, const void* source, const AllReduceNormArrays& arrays,
                                      float offset) {
    if (source == nullptr) return nullptr;
    const bool is_fp32 = (arrays.fp32_parameters >> index) & 1u;
    if (is_fp32 && offset == 0) return static_cast<const float*>(source);
    float* row = parameters_.data() + index * padded(site_.hidden);
    functions_.widen(is_fp32 ? DType::kFloat32 : site_.dtype, source, offset, row, site_.hidden);
    return row;
}

// Runs between signal and wait, so that widening the parameters costs nothing where a peer is late.
Rows AllReduceNorm::rows(const AllReduceNormArrays& arrays) {
    Rows call{};
    call.hidden = site_.hidden;
    call.world = group_.world();
    call.dtype = site_.dtype;
    call.out_dtype = site_.out_dtype;
    const int64_t buffer = site_.layout.partial_offset + (group_.epoch() & 1) * site_.layout.partial_bytes;
    for (int32_t rank = 0; rank < call.world; ++rank)
        partials_[rank] = group_.data(rank) + buffer;
    call.partials = partials_.data();
    call.reduced_bias = parameter(0, arrays.reduced_bias, arrays, 0);
    call.scale = arrays.scale;
    call.post = {site_.post, parameter(1, arrays.post_weight, arrays, site_.post.weight_offset),
                 parameter(2, arrays.post_bias, arrays, 0)};
    call.residual = arrays.residual;
    call.sum = site_.sum_out == SumOut::kNone ? nullptr : arrays.sum;
    call.norm = {site_.norm, parameter(3, arrays.weight, arrays, site_.norm.weight_offset),
                 parameter(4, arrays.bias, arrays, 0)};
    call.normalized = site_.norm.kind == NormKind::kNone ? nullptr : arrays.normalized;
    return call;
}

Status AllReduceNorm::wait_all_ready(uint64_t tag) {
    return group_.wait_all_ready(tag, site_.timeout_s);
}

void AllReduceNorm::reduce(const Rows& rows, int64_t begin, int64_t end, int32_t num_threads) {
    const int64_t row_bytes = site_.hidden * size_of(site_.dtype) * (group_.world() + 3);
    divide(begin, end, row_bytes, num_threads, [&](int64_t from, int64_t to, int32_t thread) {
        functions_.reduce(rows, from, to, scratch_.data() + thread * padded(site_.hidden));
    });
}

Status AllReduceNorm::one_shot(int64_t tokens, const Rows& rows, int32_t num_threads) {
    group_.store_rows_relaxed();
    Status status = wait_all_ready(fabric::shm::tag(site_.tag, tokens));
    if (status.ok()) reduce(rows, 0, tokens, num_threads);
    return status;
}

Status AllReduceNorm::two_shot(int64_t tokens, const Rows& rows, int32_t num_threads) {
    Status status = wait_all_ready(fabric::shm::tag(site_.tag, tokens));
    if (!status.ok()) return status;
    const int32_t rank = group_.rank(), world = group_.world();
    const bool shares_sum = rows.sum != nullptr && site_.sum_out == SumOut::kWhole;
    const int64_t sum_bytes = site_.hidden * size_of(site_.dtype);
    const int64_t normalized_bytes = site_.hidden * size_of(site_.out_dtype);
    const Share own = share(tokens, rank);
    const int64_t row_bytes = sum_bytes * (world + 3);
    divide(own.begin, own.end, row_bytes, num_threads, [&](int64_t from, int64_t to, int32_t thread) {
        float* scratch = scratch_.data() + thread * padded(site_.hidden);
        for (int64_t row = from; row < to; ++row) {
            functions_.reduce(rows, row, row + 1, scratch);
            // From the cache: the row was written just now.
            if (rows.normalized != nullptr) {
                std::memcpy(output_normalized(rank) + (row - own.begin) * normalized_bytes,
                            static_cast<const char*>(rows.normalized) + row * normalized_bytes, normalized_bytes);
            }
            if (shares_sum) {
                std::memcpy(output_sum(rank) + (row - own.begin) * sum_bytes,
                            static_cast<const char*>(rows.sum) + row * sum_bytes, sum_bytes);
            }
        }
    });
    return hand_out(tokens, rows, num_threads);
}

Status AllReduceNorm::hand_out(int64_t tokens, const Rows& rows, int32_t num_threads) {
    const int32_t rank = group_.rank(), world = group_.world();
    const bool shares_sum = rows.sum != nullptr && site_.sum_out == SumOut::kWhole;
    const int64_t sum_bytes = site_.hidden * size_of(site_.dtype);
    const int64_t normalized_bytes = site_.hidden * size_of(site_.out_dtype);
    Status status;
    group_.signal_rows();
    for (int32_t step = 1; step < world; ++step) {
        const int32_t peer = (rank + step) % world;
        status = group_.wait_rows(peer, site_.timeout_s);
        if (!status.ok()) return group_.poison(status);
        const Share theirs = share(tokens, peer);
        divide(theirs.begin, theirs.end, normalized_bytes + sum_bytes, num_threads,
               [&](int64_t from, int64_t to, int32_t) {
                   const int64_t num_rows = to - from, skipped = from - theirs.begin;
                   if (rows.normalized != nullptr) {
                       std::memcpy(static_cast<char*>(rows.normalized) + from * normalized_bytes,
                                   output_normalized(peer) + skipped * normalized_bytes, num_rows * normalized_bytes);
                   }
                   if (shares_sum) {
                       std::memcpy(static_cast<char*>(rows.sum) + from * sum_bytes,
                                   output_sum(peer) + skipped * sum_bytes, num_rows * sum_bytes);
                   }
               });
    }
    return status;
}

}  // namespace weave
