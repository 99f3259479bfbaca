#include "reduction/hosts/doubling.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "reduction/hosts/schedule.h"

namespace weave::hosts {
namespace {

constexpr int64_t kAlignment = 256;  // of halves
constexpr int64_t kVector = 16;
constexpr int64_t kFlagBytes = 8;

// Bits of the largest power of two that is not above `hosts`, and the hosts beyond it.
struct Power {
    int32_t bits = 0;
    int32_t beyond = 0;
    explicit Power(int32_t hosts) {
        while (2 << bits <= hosts)
            ++bits;
        beyond = hosts - (1 << bits);
    }
};

int32_t num_steps_slots(int32_t hosts) {
    const Power power(hosts);
    return power.bits + (power.beyond > 0 ? 1 : 0);
}

// Messages between the ranks of one host, in slots of `first` and after it: at the receiver's one for each source.
void set_within(WithinHost (&within)[kMostOfHost], const HostRanks& at, int32_t first) {
    const auto slot = [first](int32_t source, int32_t receiver) {
        return first + source - (source > receiver ? 1 : 0);
    };
    for (int32_t other = 0; other < at.num_of_host(); ++other) {
        if (other == at.rank_of_host) continue;
        HostStep step{};
        step.peer = at.ranks[at.host][other];
        step.sends = step.receives = true;
        within[other].to = within[other].from = step;
        within[other].to.slot = slot(at.rank_of_host, other);
        within[other].from.slot = slot(other, at.rank_of_host);
    }
}

}  // namespace

HostRanks host_ranks(std::vector<std::vector<int32_t>> ranks, int32_t rank) {
    HostRanks found;
    found.ranks = std::move(ranks);
    const int32_t hosts = found.num_hosts(), num_of_host = found.num_of_host();
    if (hosts < 2 || hosts > kMostHosts)
        throw std::invalid_argument(std::to_string(hosts) + " hosts: expected 2 to " + std::to_string(kMostHosts));
    if (num_of_host < 1 || num_of_host > kMostOfHost)
        throw std::invalid_argument(std::to_string(num_of_host) + " ranks of a host: expected 1 to " +
                                    std::to_string(kMostOfHost));
    std::vector<bool> seen(static_cast<std::size_t>(hosts) * num_of_host);
    bool is_there = false;
    for (int32_t host = 0; host < hosts; ++host) {
        if (static_cast<int32_t>(found.ranks[host].size()) != num_of_host)
            throw std::invalid_argument("host " + std::to_string(host) + " has " +
                                        std::to_string(found.ranks[host].size()) + " ranks, host 0 has " +
                                        std::to_string(num_of_host));
        for (int32_t each = 0; each < num_of_host; ++each) {
            const int32_t one = found.ranks[host][each];
            if (one < 0 || one >= static_cast<int32_t>(seen.size()) || seen[one])
                throw std::invalid_argument("rank " + std::to_string(one) + " of host " + std::to_string(host) +
                                            ": expected each of " + std::to_string(seen.size()) + " ranks once");
            seen[one] = true;
            if (one != rank) continue;
            is_there = true;
            found.host = host;
            found.rank_of_host = each;
        }
    }
    if (!is_there) throw std::invalid_argument("rank " + std::to_string(rank) + " is on no host");
    return found;
}

int32_t num_slots(int32_t hosts, int32_t num_of_host) {
    return num_steps_slots(hosts) + 2 * (num_of_host - 1);
}

Doubling doubling(const HostRanks& at) {
    const int32_t host = at.host, hosts = at.num_hosts(), num_of_host = at.num_of_host();
    const std::vector<Step> steps = schedule(Exchange::kDoubling, host, hosts);
    const Power power(hosts);
    // A host of several ranks has added before it sends.
    const bool always_wide = num_of_host > 1;
    Doubling found{};
    found.num_slots = num_slots(hosts, num_of_host);
    found.num_of_host = num_of_host;
    found.rank_of_host = at.rank_of_host;
    set_within(found.parts, at, num_steps_slots(hosts));
    set_within(found.finished, at, num_steps_slots(hosts) + num_of_host - 1);
    found.num_steps = static_cast<int32_t>(steps.size());
    found.first_added = found.num_steps;
    for (int32_t each = 0; each < found.num_steps; ++each) {
        const Step& step = steps[each];
        const bool with_beyond = host >= 1 << power.bits || step.peer >= 1 << power.bits;
        int32_t bit = 0;
        while (!with_beyond && 1 << bit != (host ^ step.peer))
            ++bit;
        HostStep& out = found.step[each];
        out.peer = at.ranks[step.peer][at.rank_of_host];
        // Hosts beyond the power of two send their rows, and get the sums, in a slot after those of the bits.
        out.slot = with_beyond ? power.bits : bit;
        out.sends = !step.sent.empty();
        out.receives = !step.received.empty();
        out.is_finished = out.receives && step.is_finished;
        out.sends_wide = out.sends && (always_wide || !is_untouched(steps, each));
        if (out.receives) {
            // A step of the peer's own schedule: the one in which it sends to this host.
            const std::vector<Step> theirs = schedule(Exchange::kDoubling, step.peer, hosts);
            for (std::size_t sent = 0; sent < theirs.size(); ++sent)
                if (theirs[sent].peer == host && !theirs[sent].sent.empty())
                    out.receives_wide = always_wide || !is_untouched(theirs, sent);
            if (!out.is_finished && found.first_added == found.num_steps) found.first_added = each;
            found.last_received = each;
        }
    }
    return found;
}

Doubling placed(Doubling exchange, const Places& places) {
    if (places.inbox.num_bytes != places.outbox.num_bytes || places.row_inbox.num_bytes != places.row_outbox.num_bytes)
        throw std::invalid_argument("an inbox and its outbox differ in size");
    const int64_t slots = int64_t{kNumHalves} * exchange.num_slots;
    exchange.inbox = places.inbox.offset;
    exchange.outbox = places.outbox.offset;
    exchange.slot_bytes = places.inbox.num_bytes / slots / kVector * kVector;
    exchange.row_inbox = places.row_inbox.offset;
    exchange.row_outbox = places.row_outbox.offset;
    exchange.row_slot_bytes = places.row_inbox.num_bytes / slots / kVector * kVector;
    exchange.flags = places.flags.offset;
    exchange.flag_rows = places.flags.num_bytes / slots / kFlagBytes;
    exchange.sums = places.sums.offset;
    return exchange;
}

bool fits(const Doubling& exchange, Transfer transfer, int64_t tokens, int64_t hidden) {
    const int64_t most = most_rows(tokens, exchange.num_of_host), rows = rows_bytes(transfer, most, hidden);
    if (transfer == Transfer::kPacket) return kHeaderBytesOfMessage + rows <= exchange.slot_bytes;
    return kHeaderBytesOfMessage <= exchange.slot_bytes && rows <= exchange.row_slot_bytes &&
           most <= exchange.flag_rows;
}

std::vector<fabric::BufferNeed> doubling_needs(Transfer transfer, int64_t tokens, int64_t hidden, int32_t hosts,
                                               int32_t num_of_host) {
    const int64_t slots = num_slots(hosts, num_of_host), most = most_rows(tokens, num_of_host);
    const auto need = [slots](const char* name, int64_t bytes_of_slot) {
        const int64_t half = (slots * bytes_of_slot + kAlignment - 1) / kAlignment * kAlignment;
        return fabric::BufferNeed{name, kNumHalves * half, 0u, true};
    };
    const bool packets = transfer == Transfer::kPacket;
    const int64_t rows = rows_bytes(transfer, most, hidden);
    const int64_t message = kHeaderBytesOfMessage + (packets ? rows : 0);
    std::vector<fabric::BufferNeed> needs = {need("host_inbox", message), need("host_outbox", message)};
    if (!packets) {
        needs.push_back(need("host_row_inbox", rows));
        needs.push_back(need("host_row_outbox", rows));
        needs.push_back(need("host_flags", most * kFlagBytes));
    }
    // Between two hosts of one rank nothing is added twice.
    if (hosts > 2 || num_of_host > 1) needs.push_back({"host_sums", most * hidden * 4, 0u, true});
    return needs;
}

}  // namespace weave::hosts
