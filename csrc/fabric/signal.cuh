// Signals between the kernels of different GPUs: words in a peer's arena that only grow, and bounded waits for them.
//
//   signal(word, value)       store, release at system scope: whoever waits for that value sees every store before it,
//                             of this thread and of those after the same barrier
//   signal_add(word, epoch, n)    adds n to what the word counts in that epoch, release at system scope: for several
//                             threads or CTAs that signal by one word; whoever waits for their sum sees what was before
//                             each of them
//   store_relaxed(word, value)    only the word itself; orders nothing. After fence() it is a signal()
//   wait(word, value)         until the word has at least this value; acquire at system scope
//   load_acquire, load_relaxed    one load
//
// Words never go back. Most hold signal_word(epoch, count): the epoch of a channel (its calls, from 1) above what is
// counted in it, so nothing has to be reset between calls and a word from an earlier call is smaller than any of this
// one. They are 64 bits wide, so they do not wrap. Every wait is bounded: a thread that gives up writes a Record into
// host memory, signals its peers, whose waits end then, and ends the kernel with a trap, so nothing goes on with wrong
// data.
//
// A signal after ordinary stores of several threads comes after the barrier that makes those stores part of it. A
// signal after bulk copies comes after they have arrived (await_arrival, which is `wait_group` without `.read`).
#pragma once

#include <cstdint>

#include "base/status.h"
#include "fabric/arena.h"

namespace weave::fabric {

constexpr int32_t kCountBits = 24;

__device__ __forceinline__ uint64_t signal_word(uint64_t epoch, uint32_t count) {
    return epoch << kCountBits | count;
}

__device__ __forceinline__ uint32_t count_in(uint64_t word) {
    return static_cast<uint32_t>(word & ((1u << kCountBits) - 1));
}

__device__ __forceinline__ void signal(uint64_t* word, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// The first one of an epoch takes the word there, and all add: both are atomic, and those of one thread on one word
// keep their order, so no addition is lost and none counts in the epoch before. Needs atomics at the peer: NVLink, not
// PCIe.
__device__ __forceinline__ void signal_add(uint64_t* word, uint64_t epoch, uint32_t count) {
    asm volatile("red.relaxed.sys.global.max.u64 [%0], %1;" ::"l"(word), "l"(signal_word(epoch, 0)) : "memory");
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(static_cast<uint64_t>(count)) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint64_t* word, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Both halves of signal() for several words: fence() once, then store_relaxed() each.
__device__ __forceinline__ void fence() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// What a wait needs to end, and to say why.
struct Watch {
    const GroupView& group;
    uint64_t tag;  // of the running call, see tag_word()
};

// A peer that gave up because ranks differ is seen to differ as well, if that is looked at first.
constexpr uint64_t kHearsFirstNs = 10'000'000;
constexpr uint64_t kHostReadsWithinNs = 2'000'000'000;

// Writes why into host memory, signals the peers, waits until the host has read it, and ends the kernel. Does not
// return. Takes values: a reference would put what it refers to into local memory, and every use of it with that.
[[noreturn]] static __device__ __noinline__ void report_and_trap(ArenaHeader* header, const uint32_t* lost, Record* to,
                                                                 uint64_t own_tag, Code code, int32_t peer, Slot slot,
                                                                 uint64_t expected, uint64_t seen, uint64_t peer_tag) {
    volatile Record* record = to;
    const uint64_t begin = nanoseconds();
    if (code == Code::kPeerFailed) {
        peer = static_cast<int32_t>(*const_cast<const volatile uint32_t*>(lost) >> kCodeBits);
        while (nanoseconds() - begin < kHearsFirstNs)
            __nanosleep(1000);
    }
    if (atomicExch(&header->failed, 1u) == 0) {
        record->peer = peer;
        record->slot = static_cast<uint32_t>(slot);
        record->expected = expected;
        record->seen = seen;
        record->own_tag = own_tag;
        record->peer_tag = peer_tag;
        __threadfence_system();
        record->code = static_cast<uint32_t>(code);
        __threadfence_system();
        const volatile Peers* peers = record->peers;
        for (uint32_t i = 0; peers != nullptr && i < peers->count; ++i) {
            volatile uint32_t* word = reinterpret_cast<volatile uint32_t*>(peers->word[i]);
            if (word != nullptr) *word = peers->value[i];
        }
    }
    while (record->acknowledged == 0 && nanoseconds() - begin < kHostReadsWithinNs)
        __nanosleep(1000);
    __trap();
    __builtin_unreachable();
}

// Nothing that the caller holds in registers has to live on after it.
[[noreturn]] __device__ __forceinline__ void give_up(const Watch& watch, Code code, int32_t peer, Slot slot,
                                                     uint64_t expected, uint64_t seen, uint64_t peer_tag) {
    report_and_trap(watch.group.own, watch.group.lost_peer, watch.group.record, watch.tag, code, peer, slot, expected,
                    seen, peer_tag);
}

// When a thread that polls gives up: after the timeout, because the host says so, or because a peer gave up. Looks
// only once in 1024 polls.
class Deadline {
  public:
    // True once the wait is to end; `code` says why.
    __device__ __forceinline__ bool has_passed(const Watch& watch) {
        if ((++num_polls_ & 0x3ff) != 0) return false;
        const uint64_t now = nanoseconds();
        if (begin_ == 0) begin_ = now;
        // Signed: the clock of another SM may be slightly behind.
        if (static_cast<int64_t>(now - begin_) > static_cast<int64_t>(watch.group.timeout_ns)) {
            code_ = Code::kTimeout;
            return true;
        }
        // In turn: two words in a row would cost registers where data is awaited.
        const uint32_t* why = (num_polls_ & 0x400) != 0 ? &watch.group.record->abort : watch.group.lost_peer;
        const uint32_t word = *const_cast<const volatile uint32_t*>(why);
        code_ = static_cast<Code>(word & kCodeMask);
        return word != 0;
    }
    __device__ Code code() const { return code_; }

  private:
    uint64_t begin_ = 0;
    uint32_t num_polls_ = 0;
    Code code_ = Code::kOk;
};

// Returns what it saw.
__device__ __forceinline__ uint64_t wait(const uint64_t* word, uint64_t value, const Watch& watch, int32_t peer,
                                         Slot slot) {
    Deadline deadline;
    uint64_t seen;
    while ((seen = load_acquire(word)) < value) {
        if (deadline.has_passed(watch)) give_up(watch, deadline.code(), peer, slot, value, seen, 0);
    }
    return seen;
}

}  // namespace weave::fabric
