// A rank's arena on a GPU, as its own kernels and those of its peers see it. Plain C++: host code reads it too.
//
// Every rank of a group owns one arena of the same layout, mapped by all peers: a header, then the buffers of the plan.
// The header holds channels. A channel serves the calls of one stream, one after another: it counts them and has the
// words by which ranks signal each other. Calls on different channels know nothing of each other, so they may run at
// the same time; a buffer belongs to the calls of one channel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "base/status.h"

namespace weave::fabric {

constexpr int32_t kMaxWorld = 8;
constexpr int32_t kMaxCtas = 256;
constexpr int32_t kNumMailboxes = 2;
constexpr int32_t kNumChannels = 4;

// What the owner's kernels keep from call to call. Nobody else touches it.
struct ChannelState {
    uint64_t num_calls;          // of every kind
    uint32_t num_mailbox_calls;  // of those that used a mailbox, modulo kNumMailboxes: the mailbox of the next one
    uint32_t num_arrived;        // CTAs of the running kernel that have read this state
};

// All words but `state` are written by peers: [source rank].
struct Channel {
    alignas(128) ChannelState state;
    alignas(128) uint64_t tag[2][kMaxWorld];             // what a source runs, by parity of its call: see tag_word()
    alignas(128) uint64_t partial[kMaxWorld][kMaxCtas];  // its partial rows for CTA c have come
    alignas(128) uint64_t rows[kMaxWorld][kMaxCtas];     // its finished rows from CTA c have come
};

// Record of a rank that gave up, for its peers: a Code, and who it is.
constexpr int32_t kCodeBits = 8;
constexpr uint32_t kCodeMask = (1u << kCodeBits) - 1;
WEAVE_HOST_DEVICE inline uint32_t lost_word(int32_t rank) {
    return static_cast<uint32_t>(rank) << kCodeBits | static_cast<uint32_t>(Code::kPeerFailed);
}

// The first bytes of an arena.
struct ArenaHeader {
    alignas(128) uint32_t failed;  // a kernel of this rank has given up
    uint32_t lost_peer;            // lost_word() of a peer that gave up, written by that one; 0: none did
    Channel channel[kNumChannels];
};
constexpr std::size_t kHeaderBytes = 132 << 10;
static_assert(sizeof(ArenaHeader) <= kHeaderBytes);

// What a rank runs, as one word: the number of the call (16 bits), its tokens and its site (24 bits each). Words of two
// calls that follow one another are in different slots, so a peer that is a call ahead is not taken for another site.
constexpr int32_t kTagFieldBits = 24;
WEAVE_HOST_DEVICE inline uint64_t tag_word(uint64_t epoch, int64_t tokens, uint32_t site) {
    constexpr uint64_t kField = (uint64_t{1} << kTagFieldBits) - 1;
    return epoch << (2 * kTagFieldBits) | (static_cast<uint64_t>(tokens) & kField) << kTagFieldBits | (site & kField);
}

// What a wait was for.
enum class Slot : uint32_t { kTag = 0, kPartial = 1, kRows = 2, kLLPacket = 3, kHostStep = 16 };

// Packets from another host; `step` says which of an exchange's messages they are of.
WEAVE_HOST_DEVICE constexpr Slot slot_of_host_step(int32_t step) {
    return static_cast<Slot>(static_cast<uint32_t>(Slot::kHostStep) + step);
}

// In host memory: the words `lost_peer` in the arenas of all peers, in every group that this process is in, as the
// kernel that gives up ends those of the other groups too.
struct Peers {
    static constexpr uint32_t kMost = 1024;  // those beyond hear of it by their own timeout
    uint32_t count;                          // places that were ever taken
    uint32_t value[kMost];                   // what to write
    uint64_t word[kMost];                    // 0: a place that is free
};

// In host memory that kernels write: why they gave up. Only the first one is kept.
struct Record {
    uint32_t code;  // Code, written last
    int32_t peer;
    uint32_t slot;
    uint32_t abort;  // Code, written by the host: waits end with it
    uint64_t expected;
    uint64_t seen;
    uint64_t own_tag;
    uint64_t peer_tag;
    uint32_t acknowledged;  // written by the host
    const Peers* peers;     // for kernels; nullptr: none
};

// A word of an LL packet that has not arrived: as a pair of 2-byte elements (+0, -0), as a float -0.
constexpr uint32_t kEmptyWord = 0x80000000u;

// A group as one rank's kernels see it: what is the same for every operation on one channel.
struct GroupView {
    char* base[kMaxWorld];   // every rank's arena
    char* multicast;         // all of them at once; nullptr: not mapped
    ArenaHeader* own;        // what only this rank's kernels touch: in its arena, or in its GPU's memory, see host.h
    uint32_t* lost_peer;     // of this rank's arena: ArenaHeader::lost_peer
    Record* record;          // where a kernel that gives up says why
    uint64_t timeout_ns;     // of every wait
    int64_t channel_offset;  // in every arena
    int32_t world;
    int32_t rank;

    WEAVE_HOST_DEVICE Channel* channel(int32_t of) const {
        return reinterpret_cast<Channel*>(base[of] + channel_offset);
    }
    // What this rank's kernels keep from call to call.
    WEAVE_HOST_DEVICE ChannelState* state() const {
        return &reinterpret_cast<Channel*>(reinterpret_cast<char*>(own) + channel_offset)->state;
    }
    // The rank `step` after this one, around the ring.
    WEAVE_HOST_DEVICE int32_t after(int32_t step) const {
        const int32_t next = rank + step;
        return next < world ? next : next - world;
    }
    // How far after this rank `other` is: after(step_to(other)) == other.
    WEAVE_HOST_DEVICE int32_t step_to(int32_t other) const {
        return other > rank ? other - rank : other - rank + world;
    }
};

}  // namespace weave::fabric
