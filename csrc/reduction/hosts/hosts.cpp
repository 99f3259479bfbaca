#include "reduction/hosts/hosts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "rows/divide.h"

namespace weave::hosts {
namespace {

// Slots of messages in the direct exchanges: partial results, and finished sums.
constexpr uint32_t kPartials = 0, kSums = 1;

// In the recursive ones: sums to be added, and finished ones.
uint32_t slot_of(const Step& step) {
    return step.is_finished ? 1 : 0;
}

// The address at which row 0 would be if row `first` were at `data`.
char* as_of_row_zero(void* data, int64_t first, int64_t row_bytes) {
    return static_cast<char*>(data) - first * row_bytes;
}

char* row_at(const void* base, int64_t row, int64_t row_bytes) {
    return const_cast<char*>(static_cast<const char*>(base)) + row * row_bytes;
}

}  // namespace

AllReduceNormOfHosts::AllReduceNormOfHosts(fabric::shm::Group& local, fabric::tcp::Group& wire, HostMap map,
                                           Table table, const AllReduceNormSite& site, int32_t max_threads,
                                           const RowFunctions& functions)
    : AllReduceNorm(local, site, max_threads, functions),
      wire_(wire),
      map_(std::move(map)),
      table_(std::move(table)),
      partials_of_all_(map_.world()) {
    const int64_t row_bytes = site.hidden * size_of(site.dtype);
    const int64_t locals = local.world(), num_hosts = map_.num_hosts();
    int64_t received_rows = 0, wide_rows = 0, begin = 0;
    for (const TableRow& row : table_) {
        const bool is_last = &row == &table_.back();
        const int64_t tokens = is_last ? site.max_tokens : std::min(row.max_tokens, site.max_tokens);
        if (tokens <= begin) continue;
        begin = tokens;
        const int64_t share = (tokens + locals - 1) / locals;
        if (row.exchange == Exchange::kOneShot || row.exchange == Exchange::kTwoShot) {
            const int64_t own = row.exchange == Exchange::kOneShot ? share : (share + num_hosts - 1) / num_hosts;
            received_rows = std::max(received_rows, (num_hosts - 1) * locals * own);
            continue;
        }
        const auto steps = schedule(row.exchange, map_.host, map_.num_hosts());
        const auto added = std::count_if(steps.begin(), steps.end(),
                                         [](const Step& step) { return !step.is_finished && !step.received.empty(); });
        wide_rows = std::max(wide_rows, (added + (locals > 1)) * share);
        // At most the first two of them bring what their senders began with.
        received_rows = std::max<int64_t>(received_rows, std::min<int64_t>(added, 2) * share);
    }
    received_.resize(received_rows * row_bytes);
    wide_.resize(wide_rows * site.hidden);
    if (site.sum_out == SumOut::kNone) sums_.resize(max_share(site, local.world()) * row_bytes);
}

int64_t AllReduceNormOfHosts::message_bytes() const {
    return static_cast<int64_t>(received_.size() + wide_.size() * sizeof(float) + sums_.size());
}

AllReduceNorm::Share AllReduceNormOfHosts::part(const Share& share, int32_t host) const {
    const int64_t rows = share.end - share.begin, hosts = map_.num_hosts();
    return {share.begin + rows * host / hosts, share.begin + rows * (host + 1) / hosts};
}

Exchange AllReduceNormOfHosts::chosen(int64_t tokens) const {
    for (const TableRow& row : table_) {
        if (tokens <= row.max_tokens) return row.exchange;
    }
    return table_.back().exchange;
}

// The first failure, for messages; ranks of this host are signalled, and those of the others find the connection
// closed.
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
    const Exchange exchange = chosen(tokens);
    const bool is_direct = exchange == Exchange::kOneShot || exchange == Exchange::kTwoShot;
    status = is_direct ? direct(share, exchange == Exchange::kOneShot, rows, all, num_threads)
                       : recursive(share, exchange, rows, all, num_threads);
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

void AllReduceNormOfHosts::finish(const Rows& all, const float* total, const Share& rows, int32_t num_threads) {
    Rows summed = all;
    if (total != nullptr) {
        summed.total = total;
        summed.world = 1;
    }
    const int64_t moved = site_.hidden * size_of(site_.dtype) * (summed.world + 3);
    divide(rows.begin, rows.end, moved, num_threads, [&](int64_t from, int64_t to, int32_t thread) {
        functions_.reduce(summed, from, to, scratch_.data() + thread * padded(site_.hidden));
    });
}

void AllReduceNormOfHosts::normalize(const Rows& all, const Share& rows, int32_t num_threads) {
    if (all.normalized == nullptr) return;
    const void* sums[] = {all.sum};
    Rows finished = all;
    finished.world = 1;
    finished.partials = sums;
    finished.reduced_bias = nullptr;
    finished.scale = 1;
    finished.post = {};
    finished.residual = nullptr;
    finished.sum = nullptr;
    finish(finished, nullptr, rows, num_threads);
}

Status AllReduceNormOfHosts::direct(const Share& share, bool one_shot, const Rows& local, const Rows& all,
                                    int32_t num_threads) {
    const int32_t locals = group_.world(), hosts = map_.num_hosts(), host = map_.host;
    const int64_t row_bytes = site_.hidden * size_of(site_.dtype);
    const Share own = one_shot ? share : part(share, host);
    const int64_t own_bytes = (own.end - own.begin) * row_bytes;
    char* block = received_.data();
    for (int32_t other = 0; other < hosts; ++other) {
        std::vector<fabric::tcp::Part> sent, expected;
        const Share theirs = one_shot ? share : part(share, other);
        const int64_t their_bytes = (theirs.end - theirs.begin) * row_bytes;
        for (int32_t rank = 0; rank < locals; ++rank) {
            if (other == host) {
                partials_of_all_[map_.ranks[host][rank]] = local.partials[rank];
                continue;
            }
            sent.push_back({row_at(local.partials[rank], theirs.begin, row_bytes), their_bytes});
            expected.push_back({block, own_bytes});
            partials_of_all_[map_.ranks[other][rank]] = as_of_row_zero(block, own.begin, row_bytes);
            block += own_bytes;
        }
        if (other == host) continue;
        wire_.receive(other, kPartials, std::move(expected));
        if (!one_shot) wire_.receive(other, kSums, {{row_at(all.sum, theirs.begin, row_bytes), their_bytes}});
        wire_.send(other, kPartials, std::move(sent));
    }
    int32_t missing = hosts - 1;
    const auto arrived = [&](int32_t, uint32_t slot) {
        if (slot != kPartials || --missing > 0) return;
        finish(all, nullptr, own, num_threads);
        if (one_shot) return;
        for (int32_t other = 0; other < hosts; ++other) {
            if (other != host) wire_.send(other, kSums, {{row_at(all.sum, own.begin, row_bytes), own_bytes}});
        }
    };
    Status status = wire_.progress(arrived);
    if (!status.ok() || one_shot) return status;
    // What the other hosts computed came as sums.
    normalize(all, {share.begin, own.begin}, num_threads);
    normalize(all, {own.end, share.end}, num_threads);
    return status;
}

struct AllReduceNormOfHosts::Progress {
    struct Incoming {
        Source from = {nullptr, DType::kFloat32};  // what arrives, as of row zero
        float* to = nullptr;                       // where the sum with it goes, as of row zero
    };
    const Share& share;
    Exchange exchange;
    const Rows& all;
    int32_t num_threads;
    std::vector<Step> steps;
    Source sum;                      // of the hosts so far
    std::vector<Incoming> incoming;  // by step
    std::vector<char> has_arrived;   // by step
    std::size_t num_added = 0;       // steps that add, which come first
    std::size_t step = 0;            // the first that is not through
    bool is_sent = false;            // what that step sends
};

AllReduceNorm::Share AllReduceNormOfHosts::rows_of(const Share& share, const Parts& parts, int32_t num_parts) const {
    const int64_t rows = share.end - share.begin;
    return {share.begin + rows * parts.begin / num_parts, share.begin + rows * parts.end / num_parts};
}

// Two hosts exchange sums to be added once at most, and finished ones once: a slot says which. A message of no bytes is
// not sent, and both ends know that it is not.
Status AllReduceNormOfHosts::recursive(const Share& share, Exchange exchange, const Rows& local, const Rows& all,
                                       int32_t num_threads) {
    const int32_t locals = group_.world(), hosts = map_.num_hosts(), host = map_.host;
    const int64_t row_bytes = site_.hidden * size_of(site_.dtype), wide_bytes = site_.hidden * int64_t{sizeof(float)};
    const int64_t rows = share.end - share.begin;
    const int32_t parts = num_parts(exchange, hosts);
    Progress now{share, exchange, all, num_threads, schedule(exchange, host, hosts), {}, {}, {}};
    now.incoming.resize(now.steps.size());
    now.has_arrived.resize(now.steps.size());
    float* wide = wide_.data();
    char* narrow = received_.data();
    Source own = {local.partials[group_.rank()], site_.dtype};
    if (locals > 1) {
        auto* sum = reinterpret_cast<float*>(as_of_row_zero(wide, share.begin, wide_bytes));
        wide += rows * site_.hidden;
        divide(share.begin, share.end, row_bytes * (locals + 2), num_threads, [&](int64_t from, int64_t to, int32_t) {
            float* out = sum + from * site_.hidden;
            Source before = {row_at(local.partials[0], from, row_bytes), site_.dtype};
            for (int32_t rank = 1; rank < locals; ++rank) {
                functions_.add(before.dtype, before.data, site_.dtype, row_at(local.partials[rank], from, row_bytes),
                               out, (to - from) * site_.hidden);
                before = {out, DType::kFloat32};
            }
        });
        own = {sum, DType::kFloat32};
    }
    for (std::size_t index = 0; index < now.steps.size(); ++index) {
        const Step& step = now.steps[index];
        Progress::Incoming& incoming = now.incoming[index];
        now.num_added += !step.is_finished;
        if (step.received.empty()) continue;
        int64_t message_row_bytes = row_bytes;
        if (step.is_finished) {
            incoming.from = {all.sum, site_.dtype};
        } else {
            const std::vector<Step> theirs = schedule(exchange, step.peer, hosts);
            const auto same = std::find_if(theirs.begin(), theirs.end(),
                                           [&](const Step& each) { return each.peer == host && !each.is_finished; });
            const bool is_wide = locals > 1 || !is_untouched(theirs, same - theirs.begin());
            incoming.to = reinterpret_cast<float*>(as_of_row_zero(wide, share.begin, wide_bytes));
            wide += rows * site_.hidden;
            incoming.from = {incoming.to, DType::kFloat32};
            message_row_bytes = wide_bytes;
            if (!is_wide) {
                incoming.from = {as_of_row_zero(narrow, share.begin, row_bytes), site_.dtype};
                narrow += rows * row_bytes;
                message_row_bytes = row_bytes;
            }
        }
        const Share at = rows_of(share, step.received, parts);
        if (at.begin == at.end) continue;
        wire_.receive(
            step.peer, slot_of(step),
            {{row_at(incoming.from.data, at.begin, message_row_bytes), (at.end - at.begin) * message_row_bytes}});
    }
    now.sum = own;
    advance(now);
    Status status = wire_.progress([&](int32_t peer, uint32_t slot) {
        const auto step = std::find_if(now.steps.begin(), now.steps.end(),
                                       [&](const Step& each) { return each.peer == peer && slot_of(each) == slot; });
        now.has_arrived[step - now.steps.begin()] = 1;
        advance(now);
    });
    if (!status.ok()) return status;
    const Share own_rows = rows_of(share, finishes(exchange, host, hosts), parts);
    normalize(all, {share.begin, own_rows.begin}, num_threads);
    normalize(all, {own_rows.end, share.end}, num_threads);
    return status;
}

void AllReduceNormOfHosts::advance(Progress& now) {
    const int32_t hosts = map_.num_hosts(), parts = num_parts(now.exchange, hosts);
    const auto rows_of = [&](const Parts& of) { return this->rows_of(now.share, of, parts); };
    for (; now.step <= now.steps.size(); ++now.step, now.is_sent = false) {
        if (now.step == now.num_added && !now.is_sent) {
            const Share own = rows_of(finishes(now.exchange, map_.host, hosts));
            if (own.begin < own.end) finish(now.all, static_cast<const float*>(now.sum.data), own, now.num_threads);
        }
        if (now.step == now.steps.size()) return;
        const Step& step = now.steps[now.step];
        if (!now.is_sent) {
            now.is_sent = true;
            const Share sent = rows_of(step.sent);
            const Source from = step.is_finished ? Source{now.all.sum, site_.dtype} : now.sum;
            const int64_t row_bytes = site_.hidden * size_of(from.dtype);
            if (sent.begin < sent.end) {
                wire_.send(step.peer, slot_of(step),
                           {{row_at(from.data, sent.begin, row_bytes), (sent.end - sent.begin) * row_bytes}});
            }
        }
        const Share received = rows_of(step.received);
        if (received.begin == received.end) continue;
        if (!now.has_arrived[now.step]) return;
        if (step.is_finished) continue;
        const Progress::Incoming& incoming = now.incoming[now.step];
        divide(received.begin, received.end, 3 * site_.hidden * int64_t{sizeof(float)}, now.num_threads,
               [&](int64_t from, int64_t to, int32_t) {
                   functions_.add(now.sum.dtype, row_at(now.sum.data, from, site_.hidden * size_of(now.sum.dtype)),
                                  incoming.from.dtype,
                                  row_at(incoming.from.data, from, site_.hidden * size_of(incoming.from.dtype)),
                                  incoming.to + from * site_.hidden, (to - from) * site_.hidden);
               });
        now.sum = {incoming.to, DType::kFloat32};
    }
}

}  // namespace weave::hosts
