// LL packets (Lamport packets): data whose every word says itself whether it has arrived, so nothing comes between a
// store and the peer's first load of it: no flag, no fence, no barrier.
//
// A word is empty (kEmptyWord) until a peer writes it, and data never hold that value: put() makes a pair of 2-byte
// elements (+0, -0), or a float -0, into zeros. Elements are not touched otherwise; a rank treats its own data in the
// same way (without_empty), so all sum the same bits.
//
// Memory order, by what is shared:
//
//   data in a mailbox
//     store   the source, relaxed at system scope
//     fence   none: each 4-byte word arrives whole
//     flag    every word itself
//     wait    the owner polls with relaxed loads until no word is empty
//     again   two calls with LL packets later, into words that are empty
//   empty words in a mailbox
//     store   the owner, plain, once it has taken the data
//     fence   the end of the kernel, then that of the owner's tag of its next call (call.cuh)
//     flag    that tag
//     wait    the source, acquire, before it ends that call; it puts in the one after
//
// A channel has kNumMailboxes = 2 mailboxes, which its calls with LL packets use in turn. A rank that has ended call k
// has every peer's tag of k, whatever else the peer sent it: with one token, no norm and a sum that stays sharded, all
// but the token's owner get nothing else. So every peer has ended k - 1, all of its taking included, and call k + 1
// puts into a mailbox that its owner emptied in k - 1, or before if calls without LL packets came in between.
#pragma once

#include "fabric/arena.h"
#include "fabric/signal.cuh"
#include "fabric/vector.cuh"

namespace weave::fabric {

__device__ __forceinline__ Vec16 without_empty(Vec16 v) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        v.word[i] = v.word[i] == kEmptyWord ? 0u : v.word[i];
    return v;
}

__device__ __forceinline__ bool has_arrived(const Vec16& v) {
    return v.word[0] != kEmptyWord && v.word[1] != kEmptyWord && v.word[2] != kEmptyWord && v.word[3] != kEmptyWord;
}

__device__ __forceinline__ Vec16 empty_vector() {
    return Vec16{{kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord}};
}

// Polls 16 bytes until they have arrived.
static __device__ __noinline__ Vec16 await_packet(const char* at, const Watch& watch, int32_t source) {
    Deadline deadline;
    for (;;) {
        Vec16 seen;
        load_relaxed(seen, at);
        if (has_arrived(seen)) return seen;
        if (deadline.has_passed(watch)) give_up(watch, deadline.code(), source, Slot::kLLPacket, 1, 0, 0);
    }
}

// Rows of one kind in the mailboxes of a group: in every rank's arena, from `offset` on, a slot of `slot_rows` rows for
// each source. A rank sends to the rank `step` after it, around the ring, in slot world - 1 - step of that rank; so it
// finds what the rank `step` after itself sent in its own slot step - 1. Offsets inside fit 32 bits.
struct Mailbox {
    const GroupView& group;
    int64_t offset;
    uint32_t first;  // bytes before the first slot
    uint32_t slot_rows;
    uint32_t row_bytes;

    // Where this rank's row `row` for the rank `step` after it goes; that rank's row `row` for this one.
    __device__ __forceinline__ char* outgoing(uint32_t step, uint32_t row) const {
        return group.base[group.after(step)] + offset +
               (first + ((group.world - 1 - step) * slot_rows + row) * row_bytes);
    }
    __device__ __forceinline__ char* incoming(uint32_t step, uint32_t row) const {
        return group.base[group.rank] + offset + (first + ((step - 1) * slot_rows + row) * row_bytes);
    }
    // 16 bytes of a row, `byte` bytes into it. `v` holds no empty word.
    __device__ __forceinline__ void put(uint32_t step, uint32_t row, uint32_t byte, const Vec16& v) const {
        store_relaxed(outgoing(step, row) + byte, v);
    }
    // What is there now, some of its words perhaps still empty.
    __device__ __forceinline__ Vec16 peek(uint32_t step, uint32_t row, uint32_t byte) const {
        Vec16 v;
        load_relaxed(v, incoming(step, row) + byte);
        return v;
    }
    // Empties what was read.
    __device__ __forceinline__ void clear(uint32_t step, uint32_t row, uint32_t byte) const {
        store(incoming(step, row) + byte, empty_vector());
    }
    // Waits for what peek() has not found whole, and empties it.
    __device__ __forceinline__ Vec16 take(uint32_t step, uint32_t row, uint32_t byte, const Vec16& peeked,
                                          const Watch& watch) const {
        char* at = incoming(step, row) + byte;
        const Vec16 v = has_arrived(peeked) ? peeked : await_packet(at, watch, group.after(step));
        store(at, empty_vector());
        return v;
    }
};

}  // namespace weave::fabric
