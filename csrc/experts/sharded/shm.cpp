#include "experts/sharded/shm.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/sizes.h"
#include "rows/divide.h"

namespace weave::moe {

using fabric::shm::Group;

namespace {

constexpr int64_t kMostExperts = 1 << 20;

int64_t row_bytes_of(const Site& site) {
    return within("hidden", site.hidden, 1, kMostRow) * size_of(known("dtype", site.dtype, DType::kFloat16));
}

}  // namespace

ShardedMixture::ShardedMixture(Group& group, const Site& site, int64_t data_bytes, const RowFunctions& functions)
    : group_(group),
      site_(site),
      layout_(group.world(), site.max_tokens, site.choices, row_bytes_of(site)),
      row_bytes_(site.hidden * size_of(site.dtype)),
      functions_(functions),
      last_token_(group.world()),
      begins_(within("num_experts", site.num_experts, 1, kMostExperts) + 1) {
    // A buffer outside the segment would be a wild store later.
    expect_inside("dispatch", site.dispatch_offset, layout_.dispatch_bytes(), data_bytes);
    expect_inside("combine", site.combine_offset, layout_.combine_bytes(), data_bytes);
    timeout_of(site.timeout_s);
}

Status ShardedMixture::enter() {
    const Status status = group_.enter();
    const bool entered = status.code != Code::kBusy && status.code != Code::kForked;
    if (!status.ok() && entered) group_.leave();
    if (status.ok()) {
        is_dispatched_ = false;
        unsorted_.clear();
        sorted_.clear();
    }
    return status;
}

void ShardedMixture::dispatch(const void* x, const int64_t* experts, int64_t tokens, int32_t num_threads) {
    x_ = static_cast<const char*>(x);
    experts_ = experts;
    tokens_ = tokens;
    own_routes_.clear();
    copies_.clear();
    for (int32_t step = 1; step < group_.world(); ++step)
        header((group_.rank() + step) % group_.world(), group_.rank()) = {tokens, 0, 0};
    if (tokens <= site_.max_tokens) route(tokens);
    divide(0, static_cast<int64_t>(copies_.size()), row_bytes_, num_threads, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t at = begin; at < end; ++at)
            std::memcpy(copies_[at].to, x_ + copies_[at].token * row_bytes_, row_bytes_);
    });
    traffic_.dispatched += static_cast<int64_t>(copies_.size());
    is_dispatched_ = true;
    group_.signal_ready(tag());
}

void ShardedMixture::route(int64_t tokens) {
    std::fill(last_token_.begin(), last_token_.end(), -1);
    for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t choice = 0; choice < site_.choices; ++choice) {
            const int64_t place = token * site_.choices + choice, id = experts_[place];
            if (is_nobodys(id)) continue;
            const int32_t owner = static_cast<int32_t>(id / site_.num_experts);
            Route route{static_cast<int32_t>(token), static_cast<int32_t>(id % site_.num_experts),
                        static_cast<int32_t>(place)};
            if (owner == group_.rank()) {
                own_routes_.push_back(route);
                continue;
            }
            char* to = slot(owner, group_.rank());
            SlotHeader& head = header(owner, group_.rank());
            if (last_token_[owner] != token) {
                last_token_[owner] = token;
                copies_.push_back({to + layout_.rows() + head.num_rows++ * row_bytes_, token});
            }
            route.row = static_cast<int32_t>(head.num_rows - 1);
            reinterpret_cast<Route*>(to + layout_.routes())[head.num_routes++] = route;
        }
    }
}

Status ShardedMixture::collect(int32_t first, int32_t last, int64_t& num_routes) {
    num_routes = tokens_ > site_.max_tokens ? kOverflow : 0;
    unsorted_.clear();
    for (int32_t step = first; step < last; ++step) {
        const int32_t source = (group_.rank() + step) % group_.world();
        if (step == 0) {
            add(source, own_routes_.data(), static_cast<int64_t>(own_routes_.size()), x_);
            continue;
        }
        const Status status = group_.wait_ready(source, tag(), site_.timeout_s);
        if (!status.ok()) return group_.poison(status);
        const SlotHeader head = header(group_.rank(), source);
        if (head.num_tokens > site_.max_tokens) num_routes = kOverflow;
        const char* from = slot(group_.rank(), source);
        add(source, reinterpret_cast<const Route*>(from + layout_.routes()), head.num_routes, from + layout_.rows());
    }
    if (num_routes == kOverflow) return {};
    num_routes = static_cast<int64_t>(unsorted_.size());
    // Counting sort: stable, so within an expert the routes stay in the order of the sources and of their tokens.
    std::fill(begins_.begin(), begins_.end(), 0);
    for (const Sorted& each : unsorted_)
        ++begins_[each.expert + 1];
    for (int64_t expert = 0; expert < site_.num_experts; ++expert)
        begins_[expert + 1] += begins_[expert];
    sorted_.resize(unsorted_.size());
    for (const Sorted& each : unsorted_)
        sorted_[begins_[each.expert]++] = each;
    return {};
}

void ShardedMixture::add(int32_t source, const Route* routes, int64_t count, const char* rows) {
    char* combine = group_.data(source) + site_.combine_offset;
    for (int64_t at = 0; at < count; ++at) {
        const Route& route = routes[at];
        unsorted_.push_back({rows + route.row * row_bytes_, combine + route.place * row_bytes_, route.expert, source});
    }
}

void ShardedMixture::gather(void* rows, int64_t* experts, int32_t num_threads) const {
    char* out = static_cast<char*>(rows);
    divide(0, static_cast<int64_t>(sorted_.size()), 2 * row_bytes_, num_threads,
           [&](int64_t begin, int64_t end, int32_t) {
               for (int64_t at = begin; at < end; ++at) {
                   std::memcpy(out + at * row_bytes_, sorted_[at].row, row_bytes_);
                   experts[at] = sorted_[at].expert;
               }
           });
}

void ShardedMixture::return_results(const void* results, int32_t num_threads) {
    const char* from = static_cast<const char*>(results);
    divide(0, static_cast<int64_t>(sorted_.size()), 2 * row_bytes_, num_threads,
           [&](int64_t begin, int64_t end, int32_t) {
               for (int64_t at = begin; at < end; ++at)
                   std::memcpy(sorted_[at].combine, from + at * row_bytes_, row_bytes_);
           });
    for (const Sorted& each : sorted_)
        traffic_.returned += each.source != group_.rank();
}

Status ShardedMixture::wait_results() {
    group_.signal_rows();
    for (int32_t step = 1; step < group_.world(); ++step) {
        const Status status = group_.wait_rows((group_.rank() + step) % group_.world(), site_.timeout_s);
        if (!status.ok()) return group_.poison(status);
    }
    return {};
}

Status ShardedMixture::finish(const float* weights, void* out, int32_t num_threads) {
    const fabric::shm::Held held(group_);
    const Status status = wait_results();
    if (status.ok()) {
        const char* results = group_.data(group_.rank()) + site_.combine_offset;
        const int64_t token_bytes = (site_.choices + 1) * row_bytes_;
        divide(0, tokens_, token_bytes, num_threads, [&](int64_t begin, int64_t end, int32_t) {
            std::vector<const void*> rows(site_.choices);
            std::vector<float> factors(site_.choices);
            for (int64_t token = begin; token < end; ++token) {
                int64_t count = 0;
                for (int64_t choice = 0; choice < site_.choices; ++choice) {
                    const int64_t place = token * site_.choices + choice;
                    if (is_nobodys(experts_[place])) continue;
                    rows[count] = results + place * row_bytes_;
                    factors[count++] = weights[place];
                }
                functions_.weigh(site_.dtype, rows.data(), factors.data(), count,
                                 static_cast<char*>(out) + token * row_bytes_, site_.hidden);
            }
        });
    }
    group_.leave();
    return status;
}

Status ShardedMixture::end_without_results() {
    const fabric::shm::Held held(group_);
    // Of ranks that were not collected: whether they run the same call.
    Status status = group_.wait_all_ready(tag(), site_.timeout_s);
    if (status.ok()) status = wait_results();
    group_.leave();
    return status;
}

}  // namespace weave::moe
