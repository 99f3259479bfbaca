#include "hierarchical_all_reduce/doubling.h"

#include <stdexcept>
#include <string>

#include "hierarchical_all_reduce/schedule.h"

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

}  // namespace

int32_t num_slots(int32_t hosts) {
    const Power power(hosts);
    return power.bits + (power.beyond > 0 ? 1 : 0);
}

Doubling doubling(int32_t host, int32_t hosts) {
    if (hosts < 2 || hosts > kMostHosts || host < 0 || host >= hosts)
        throw std::invalid_argument("host " + std::to_string(host) + " of " + std::to_string(hosts) +
                                    ": expected 2 to " + std::to_string(kMostHosts) + " hosts");
    const std::vector<Step> steps = schedule(Exchange::kDoubling, host, hosts);
    const Power power(hosts);
    Doubling found{};
    found.num_slots = num_slots(hosts);
    found.num_steps = static_cast<int32_t>(steps.size());
    found.first_added = found.num_steps;
    for (int32_t at = 0; at < found.num_steps; ++at) {
        const Step& step = steps[at];
        const bool with_beyond = host >= 1 << power.bits || step.peer >= 1 << power.bits;
        int32_t bit = 0;
        while (!with_beyond && 1 << bit != (host ^ step.peer))
            ++bit;
        HostStep& out = found.step[at];
        out.peer = step.peer;
        // Hosts beyond the power of two hand their rows over, and get the sums, in a slot behind those of the bits.
        out.slot = with_beyond ? power.bits : bit;
        out.sends = !step.sent.empty();
        out.receives = !step.received.empty();
        out.is_finished = out.receives && step.is_finished;
        out.sends_wide = out.sends && !is_untouched(steps, at);
        if (out.receives) {
            // A step of the peer's own schedule: the one in which it sends to this host.
            const std::vector<Step> theirs = schedule(Exchange::kDoubling, step.peer, hosts);
            for (std::size_t each = 0; each < theirs.size(); ++each)
                if (theirs[each].peer == host && !theirs[each].sent.empty())
                    out.receives_wide = !is_untouched(theirs, each);
            if (!out.is_finished && found.first_added == found.num_steps) found.first_added = at;
            found.last_received = at;
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
    const int64_t rows = rows_bytes(transfer, tokens, hidden);
    if (transfer == Transfer::kPacket) return kHeaderBytesOfMessage + rows <= exchange.slot_bytes;
    return kHeaderBytesOfMessage <= exchange.slot_bytes && rows <= exchange.row_slot_bytes &&
           tokens <= exchange.flag_rows;
}

std::vector<fabric::BufferNeed> doubling_needs(Transfer transfer, int64_t tokens, int64_t hidden, int32_t hosts) {
    const auto need = [hosts](const char* name, int64_t bytes_of_slot) {
        const int64_t half = (num_slots(hosts) * bytes_of_slot + kAlignment - 1) / kAlignment * kAlignment;
        return fabric::BufferNeed{name, kNumHalves * half, 0u, true};
    };
    const bool packets = transfer == Transfer::kPacket;
    const int64_t rows = rows_bytes(transfer, tokens, hidden);
    const int64_t message = kHeaderBytesOfMessage + (packets ? rows : 0);
    std::vector<fabric::BufferNeed> needs = {need("host_inbox", message), need("host_outbox", message)};
    if (!packets) {
        needs.push_back(need("host_row_inbox", rows));
        needs.push_back(need("host_row_outbox", rows));
        needs.push_back(need("host_flags", tokens * kFlagBytes));
    }
    // Between two hosts nothing is added twice.
    if (hosts > 2) needs.push_back({"host_sums", tokens * hidden * 4, 0u, true});
    return needs;
}

}  // namespace weave::hosts
