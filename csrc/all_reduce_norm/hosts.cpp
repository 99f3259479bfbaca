#include "all_reduce_norm/hosts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "rows/divide.h"

namespace weave {
namespace {

// Slots of messages: partial results, and finished sums.
constexpr uint32_t kPartials = 0, kSums = 1;

// The address at which row 0 would lie if row `first` lay at `data`.
char* as_of_row_zero(char* data, int64_t first, int64_t row_bytes) {
    return data - first * row_bytes;
}

}  // namespace

AllReduceNormOfHosts::AllReduceNormOfHosts(fabric::shm::Group& local, fabric::tcp::Group& wire, HostMap map,
                                           const AllReduceNormSite& site, int32_t max_threads,
                                           const RowFunctions& functions)
    : AllReduceNorm(local, site, max_threads, functions),
      wire_(wire),
      map_(std::move(map)),
      partials_of_all_(map_.world()) {
    const int64_t row_bytes = site.hidden * size_of(site.dtype);
    const int64_t locals = local.world(), hosts = map_.num_hosts();
    const int64_t of_one_shot = (std::min(site.one_shot_max_tokens, site.max_tokens) + locals - 1) / locals;
    const int64_t of_two_shot = (max_share(site, local.world()) + hosts - 1) / hosts;
    received_.resize((hosts - 1) * locals * std::max(of_one_shot, of_two_shot) * row_bytes);
    if (site.sum_out == SumOut::kNone) sums_.resize(max_share(site, local.world()) * row_bytes);
}

AllReduceNorm::Share AllReduceNormOfHosts::part(const Share& share, int32_t host) const {
    const int64_t rows = share.end - share.begin, hosts = map_.num_hosts();
    return {share.begin + rows * host / hosts, share.begin + rows * (host + 1) / hosts};
}

// The first failure, for messages; ranks of this host are told, and those of the others find the connection closed.
Status AllReduceNormOfHosts::kept(Status status, bool is_wire) {
    if (status.code == Code::kBusy || status.code == Code::kForked) return status;
    if (is_wire) group_.poison(status);
    if (!is_wire) wire_.poison(status);
    if (status.peer >= 0) {
        const int32_t host = is_wire ? status.peer : map_.host;
        status.peer = map_.ranks[host][is_wire ? group_.rank() : status.peer];
    }
    if (status_.ok()) status_ = status;
    return status;
}

Status AllReduceNormOfHosts::exchange(int64_t tokens, const Rows& rows, int32_t num_threads) {
    const uint64_t tag = fabric::shm::tag(site_.tag, tokens);
    const int32_t locals = group_.world();
    if (locals == 1) group_.store_rows_relaxed();
    Status status = wait_all_ready(tag);
    if (!status.ok()) return kept(status, false);
    const int64_t row_bytes = site_.hidden * size_of(site_.dtype);
    const Share share = this->share(tokens, group_.rank());
    Rows all = rows;
    if (all.sum == nullptr) all.sum = as_of_row_zero(sums_.data(), share.begin, row_bytes);
    all.world = map_.world();
    all.partials = partials_of_all_.data();
    status = wire_.begin(tag, site_.timeout_s);
    if (!status.ok()) return kept(status, true);
    status = between_hosts(share, tokens <= site_.one_shot_max_tokens, rows, all, num_threads);
    wire_.leave();
    if (!status.ok()) return kept(status, true);
    if (locals == 1) return {};
    const int64_t normalized_bytes = site_.hidden * size_of(site_.out_dtype);
    const int64_t num_rows = share.end - share.begin;
    if (rows.normalized != nullptr) {
        std::memcpy(output_normalized(group_.rank()),
                    static_cast<const char*>(rows.normalized) + share.begin * normalized_bytes,
                    num_rows * normalized_bytes);
    }
    if (rows.sum != nullptr) {
        std::memcpy(output_sum(group_.rank()), static_cast<const char*>(rows.sum) + share.begin * row_bytes,
                    num_rows * row_bytes);
    }
    status = hand_out(tokens, rows, num_threads);
    return status.ok() ? status : kept(status, false);
}

Status AllReduceNormOfHosts::between_hosts(const Share& share, bool one_shot, const Rows& local, const Rows& all,
                                           int32_t num_threads) {
    const int32_t locals = group_.world(), hosts = map_.num_hosts(), host = map_.host;
    const int64_t row_bytes = site_.hidden * size_of(site_.dtype);
    const Share own = one_shot ? share : part(share, host);
    const int64_t own_bytes = (own.end - own.begin) * row_bytes;
    const auto rows_at = [&](const void* base, int64_t row) {
        return const_cast<char*>(static_cast<const char*>(base)) + row * row_bytes;
    };
    char* block = received_.data();
    for (int32_t other = 0; other < hosts; ++other) {
        std::vector<fabric::tcp::Part> sent, expected;
        const Share theirs = one_shot ? share : part(share, other);
        for (int32_t rank = 0; rank < locals; ++rank) {
            if (other == host) {
                partials_of_all_[map_.ranks[host][rank]] = local.partials[rank];
                continue;
            }
            sent.push_back({rows_at(local.partials[rank], theirs.begin), (theirs.end - theirs.begin) * row_bytes});
            expected.push_back({block, own_bytes});
            partials_of_all_[map_.ranks[other][rank]] = as_of_row_zero(block, own.begin, row_bytes);
            block += own_bytes;
        }
        if (other == host) continue;
        wire_.receive(other, kPartials, std::move(expected));
        if (!one_shot) {
            wire_.receive(other, kSums, {{rows_at(all.sum, theirs.begin), (theirs.end - theirs.begin) * row_bytes}});
        }
        wire_.send(other, kPartials, std::move(sent));
    }
    int32_t missing = hosts - 1;
    const auto arrived = [&](int32_t, uint32_t slot) {
        if (slot != kPartials || --missing > 0) return;
        const int64_t moved = row_bytes * (all.world + 3);
        divide(own.begin, own.end, moved, num_threads, [&](int64_t from, int64_t to, int32_t thread) {
            functions_.reduce(all, from, to, scratch_.data() + thread * padded(site_.hidden));
        });
        if (one_shot) return;
        for (int32_t other = 0; other < hosts; ++other) {
            if (other != host) wire_.send(other, kSums, {{rows_at(all.sum, own.begin), own_bytes}});
        }
    };
    Status status = wire_.progress(arrived);
    if (!status.ok() || one_shot || all.normalized == nullptr) return status;
    // What the other hosts computed came as sums.
    const void* sums[] = {all.sum};
    Rows finished = all;
    finished.world = 1;
    finished.partials = sums;
    finished.reduced_bias = nullptr;
    finished.scale = 1;
    finished.post = {};
    finished.residual = nullptr;
    finished.sum = nullptr;
    for (const Share& each : {Share{share.begin, own.begin}, Share{own.end, share.end}}) {
        divide(each.begin, each.end, 3 * row_bytes, num_threads, [&](int64_t from, int64_t to, int32_t thread) {
            functions_.reduce(finished, from, to, scratch_.data() + thread * padded(site_.hidden));
        });
    }
    return status;
}

}  // namespace weave
