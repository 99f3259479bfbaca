// Stands in for csrc/fabric/signal.cuh: waits end once nothing can come any more, and whoever gives up says why.
#pragma once

#include <string>

#include "base/status.h"
#include "fabric/arena.h"
#include "ranks.h"

namespace weave::fabric {

struct Watch {
    const GroupView& group;
    uint64_t tag;
};

constexpr int32_t kCountBits = 24;

inline uint64_t signal_word(uint64_t epoch, uint32_t count) {
    return epoch << kCountBits | count;
}

inline void fence() {
    emulated::running().has_fenced = true;
}

// To another rank it takes a while; behind a fence it is a release.
inline void store_relaxed(uint64_t* word, uint64_t value) {
    if (emulated::is_own(word)) {
        *word = value;
        return;
    }
    emulated::send({word, nullptr, value, 0, {}, emulated::running().has_fenced});
}

inline void signal(uint64_t* word, uint64_t value) {
    emulated::send({word, nullptr, value, 0, {}, true});
}

inline uint64_t load_acquire(const uint64_t* word) {
    return *word;
}

class Deadline {
  public:
    bool has_passed(const Watch&) { return emulated::polled_in_vain(); }
    Code code() const { return Code::kTimeout; }
};

[[noreturn]] inline void give_up(const Watch&, Code code, int32_t peer, Slot slot, uint64_t expected, uint64_t seen,
                                 uint64_t) {
    const char* why = code == Code::kSiteMismatch ? "differs from" : "waits in vain for";
    const char* what = slot == Slot::kTag       ? "the tag"
                       : slot == Slot::kPartial ? "partial"
                       : slot == Slot::kRows    ? "rows"
                                                : "slot ";
    const int32_t step = slot < Slot::kHostStep ? -1 : static_cast<int32_t>(slot) - static_cast<int32_t>(Slot::kHostStep);
    throw std::runtime_error("rank " + std::to_string(emulated::running().cta->rank->index) + " " + why + " rank " +
                             std::to_string(peer) + " at " + what + (step < 0 ? "" : std::to_string(step)) +
                             ": expected " + std::to_string(expected) + ", seen " + std::to_string(seen));
}

inline uint64_t wait(const uint64_t* word, uint64_t value, const Watch& watch, int32_t peer, Slot slot) {
    Deadline deadline;
    uint64_t seen;
    while ((seen = load_acquire(word)) < value)
        if (deadline.has_passed(watch)) give_up(watch, deadline.code(), peer, slot, value, seen, 0);
    return seen;
}

}  // namespace weave::fabric
