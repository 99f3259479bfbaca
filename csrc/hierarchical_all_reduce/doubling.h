// Recursive doubling between GPUs of several hosts, one of each: what a kernel knows of the exchange, and where packets
// lie. Plain C++. The protocol: doubling.cuh.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/host_device.h"
#include "fabric/buffer_need.h"

namespace weave::hosts {

// What a message begins with: one pair of packets that says what its sender runs.
constexpr int64_t kHeaderBytesOfMessage = 16;
constexpr int32_t kMostHosts = 1024;
// Of them log2 add; where hosts are no power of two, one more comes before those and one after.
constexpr int32_t kMostSteps = 12;
// Buffers of messages, which calls use in turn.
constexpr int32_t kNumHalves = 2;

// A message to one host, and one from it; either may be missing.
struct HostStep {
    char* direct;  // the peer's arena, mapped here; nullptr: only puts reach it
    int32_t peer;  // rank in the group
    int32_t slot;  // where messages of this step lie, in every arena
    bool sends, receives;
    bool sends_wide, receives_wide;  // fp32 words of sums, else the activations as they are
    bool is_finished;                // what is received is the sum over all hosts
};

// The exchange as one rank's kernel sees it. Offsets count from the first byte of an arena, equal on all ranks.
struct Doubling {
    int64_t inbox;       // messages from other hosts: kNumHalves halves of `half_bytes`
    int64_t outbox;      // the same of messages to hosts that only puts reach
    int64_t half_bytes;  // equal for all sites of a channel
    int64_t sums;        // fp32 [tokens, hidden], of this rank alone: sums of the hosts so far
    int32_t channel;
    int32_t num_steps;
    int32_t num_slots;      // of messages in a half, equal on all ranks
    int32_t first_added;    // the first step whose message is added
    int32_t last_received;  // the step that brings the last message
    HostStep step[kMostSteps];
};

// Of a row in a message: a packet for every 4 bytes.
WEAVE_HOST_DEVICE inline int64_t row_bytes_of_message(int64_t hidden, int64_t element_bytes, bool wide) {
    return hidden * (wide ? 4 : element_bytes) * 2;
}

// Of a message of the call: slots of one half lie one behind the other, each with room for the widest.
WEAVE_HOST_DEVICE inline int64_t slot_bytes(int64_t tokens, int64_t hidden) {
    return kHeaderBytesOfMessage + tokens * row_bytes_of_message(hidden, 4, true);
}

// Slots of a half, equal on all hosts.
int32_t num_slots(int32_t hosts);

// The steps of `host`, without the addresses of peers' arenas. Throws std::invalid_argument for fewer than two hosts or
// more than kMostHosts, or a host that is none of them.
Doubling doubling(int32_t host, int32_t hosts);

// What calls of up to `tokens` tokens need of every arena: "host_inbox", "host_outbox", and among more than two hosts
// "host_sums". All begin as zeros.
std::vector<fabric::BufferNeed> doubling_needs(int64_t tokens, int64_t hidden, int32_t hosts);

}  // namespace weave::hosts
