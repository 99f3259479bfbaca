#include "hierarchical_all_reduce/doubling.h"

#include <stdexcept>
#include <string>

#include "hierarchical_all_reduce/schedule.h"

namespace weave::hosts {
namespace {

constexpr int64_t kAlignment = 256;

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

std::vector<fabric::BufferNeed> doubling_needs(int64_t tokens, int64_t hidden, int32_t hosts) {
    const int64_t half = (num_slots(hosts) * slot_bytes(tokens, hidden) + kAlignment - 1) / kAlignment * kAlignment;
    const int64_t messages = kNumHalves * half;
    std::vector<fabric::BufferNeed> needs = {{"host_inbox", messages, 0u, true}, {"host_outbox", messages, 0u, true}};
    // Between two hosts nothing is added twice.
    if (hosts > 2) needs.push_back({"host_sums", tokens * hidden * 4, 0u, true});
    return needs;
}

}  // namespace weave::hosts
