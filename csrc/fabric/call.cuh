// The calls of a channel, which are kernels that follow one another in a stream: their number, and whether all ranks
// make the same one.
//
//   begin_call   every thread of every CTA, before it reads or writes what others share: waits for the kernel before
//                this one, and reads how many calls there were
//   send_tags    `world` threads of CTA 0, after they have begun, the sooner the better: says what is run to every peer
//   end_call     `world` + 1 threads of every CTA, after all its threads have begun: the grid's last CTA counts the
//                call, and CTA 0 compares with every peer what is run
//
// A tag says more: its source's call before has ended, as kernels of a stream follow one another. So a rank whose call
// has ended knows that every peer has begun that call and is through with all that it did in the one before, whatever
// data the two exchange, if any; and no rank is more than one call ahead of another.
//
// Memory order, by what is shared:
//
//   state (num_calls, num_mailbox_calls)
//     store   the last CTA of the owner's grid, plain
//     fence   __threadfence, in one thread of each CTA after all its threads have read the state
//     flag    num_arrived, by atomicAdd: it only says which CTA is the last
//     wait    griddepcontrol.wait of the next kernel in the stream, the only reader
//   tag[parity of the epoch][source]
//     store   the source, relaxed at system scope
//     fence   acq_rel at system scope before it, in the thread that stores: with the store it is a release. What all
//             threads of the source's kernels before did is part of it: griddepcontrol.wait, or the launch, comes after
//             their end
//     flag    every word itself
//     wait    the owner, acquire, in the same call. All threads of its kernels after this one come after it
//     again   two calls later: the source's call in between ended only with this rank's tag of that call, which
//             this rank wrote after its own call before, comparison included, had ended
#pragma once

#include <cstddef>
#include <cstdint>

#include "fabric/signal.cuh"
#include "fabric/vector.cuh"

namespace weave::fabric {

// One call of a channel.
struct CallState {
    uint64_t num_calls;  // before it
    uint32_t mailbox;    // which of the mailboxes it uses, in turn; 0 for calls that use none

    // Its number, from 1. Made where it is used: begin_call() does not wait for what it loads.
    __device__ __forceinline__ uint64_t epoch() const { return num_calls + 1; }
};

// The kernel before this one in the stream may still run until here (programmatic dependent launch); its results are
// there afterwards. The kernel after this one may be launched from here on, and waits the same way. What needs nothing
// from memory is better done before.
template <bool kUsesMailbox>
__device__ __forceinline__ CallState begin_call(const GroupView& group) {
    const ChannelState* state = computed_here(group.state());
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    // Both in one load. Nobody writes them before all CTAs have read them.
    static_assert(offsetof(ChannelState, num_calls) == 0 && offsetof(ChannelState, num_mailbox_calls) == 8);
    Vec16 words;
    load_relaxed(words, state);
    const uint64_t num_calls = static_cast<uint64_t>(words.word[1]) << 32 | words.word[0];
    return CallState{num_calls, kUsesMailbox ? words.word[2] : 0};
}

// `helper` is 0 .. world - 1, one thread each, and stands for a peer. The fence waits for what its SM has in flight and
// not for the state, so it costs least where nothing else was begun.
__device__ __forceinline__ void send_tags(const Watch& watch, const CallState& call, int32_t helper) {
    const GroupView& group = watch.group;
    if (blockIdx.x != 0 || helper < 0 || helper >= group.world || helper == group.rank) return;
    fence();
    store_relaxed(&group.channel(helper)->tag[call.epoch() & 1][group.rank], watch.tag);
}

// Compares what this rank runs with what the peer runs: `watch.tag` on both, or neither goes on.
__device__ __forceinline__ void compare_tags(const Watch& watch, const CallState& call, int32_t peer) {
    constexpr int32_t kEpochShift = 2 * kTagFieldBits;
    const uint64_t* word = &watch.group.channel(watch.group.rank)->tag[call.epoch() & 1][peer];
    Deadline deadline;
    uint64_t theirs;
    while ((theirs = load_acquire(word)) >> kEpochShift != watch.tag >> kEpochShift) {
        if (deadline.has_passed(watch))
            give_up(watch, deadline.code(), peer, Slot::kTag, watch.tag >> kEpochShift, theirs >> kEpochShift, 0);
    }
    if (theirs != watch.tag) give_up(watch, Code::kSiteMismatch, peer, Slot::kTag, watch.tag, theirs, theirs);
}

// `helper` is 0 .. world, one thread each: the last one counts this CTA, the others stand for a peer.
template <bool kUsesMailbox>
__device__ __forceinline__ void end_call(const Watch& watch, const CallState& call, int32_t helper) {
    const GroupView& group = watch.group;
    if (helper == group.world) {
        ChannelState* state = group.state();
        __threadfence();
        if (atomicAdd(&state->num_arrived, 1u) == gridDim.x - 1) {
            state->num_arrived = 0;
            if (kUsesMailbox) state->num_mailbox_calls = (call.mailbox + 1) % kNumMailboxes;
            state->num_calls = call.epoch();
        }
    } else if (blockIdx.x == 0 && helper < group.world && helper != group.rank) {
        compare_tags(watch, call, helper);
    }
}

}  // namespace weave::fabric
