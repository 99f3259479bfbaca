// Recursive doubling between GPUs of several hosts: what a kernel reads of the exchange, and where messages are. Plain
// C++. The protocol: doubling.cuh; how rows travel: doubling_rows.cuh.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/host_device.h"
#include "fabric/arena.h"
#include "fabric/buffer_need.h"

namespace weave::hosts {

// How rows travel. Equal on all ranks in every call.
enum class Transfer : int32_t {
    kPacket = 0,      // words, each with the number of its call
    kFlaggedRow = 1,  // rows as they are, and a flag after each
};

// What a message begins with: one pair of packets that says what its sender runs.
constexpr int64_t kHeaderBytesOfMessage = 16;
constexpr int32_t kMostHosts = 1024;
// Of them log2 add; where hosts are no power of two, one more comes before those and one after.
constexpr int32_t kMostSteps = 12;
// Ranks of one host.
constexpr int32_t kMostOfHost = fabric::kMaxWorld;
// Buffers of messages, which calls use in turn.
constexpr int32_t kNumHalves = 2;

// A message to one rank, and one from it; either may be missing.
struct HostStep {
    char* direct;  // the peer's arena, mapped here; nullptr: only puts reach it
    int32_t peer;  // rank in the group
    int32_t slot;  // where messages of this step are, in every arena
    bool sends, receives;
    bool sends_wide, receives_wide;  // fp32 words of sums, else the activations as they are
    bool is_finished;                // what is received is the sum over all hosts
};

// A message to another rank of this host, and one from it. They are in slots of their own.
struct WithinHost {
    HostStep to, from;
};

// The exchange as one rank's kernel sees it. Offsets count from the first byte of an arena, equal on all ranks, and so
// are sizes: they are of all calls of a channel. There are kNumHalves halves of everything but sums, each of num_slots
// slots.
struct Doubling {
    int64_t inbox;           // messages of packets from other hosts
    int64_t outbox;          // the same to hosts that only puts reach
    int64_t slot_bytes;      // of both
    int64_t row_inbox;       // rows as they are from other hosts
    int64_t row_outbox;      // the same to hosts that only puts reach
    int64_t row_slot_bytes;  // of both
    int64_t flags;           // a word for every row of the row inbox: the number of the call that it is of
    int64_t flag_rows;       // of a slot
    int64_t sums;            // fp32 [rows that this rank adds, hidden], of this rank alone: sums of the hosts so far
    int32_t num_steps;
    int32_t num_slots;      // of messages in a half, equal on all ranks
    int32_t first_added;    // the first step whose message is added
    int32_t last_received;  // the step that brings the last message
    HostStep step[kMostSteps];

    // The ranks of this host, and this one among them. What they exchange has no outbox: they have to be mapped.
    int32_t num_of_host;
    int32_t rank_of_host;
    WithinHost parts[kMostOfHost];     // partial rows, to the rank that adds them; this rank's own entry says nothing
    WithinHost finished[kMostOfHost];  // finished rows, from that rank
};

// Of a row in a message.
WEAVE_HOST_DEVICE inline int64_t row_bytes_of_message(Transfer transfer, int64_t hidden, int64_t element_bytes,
                                                      bool wide) {
    return hidden * (wide ? 4 : element_bytes) * (transfer == Transfer::kPacket ? 2 : 1);
}

// Of the rows of a message of the call, with room for the widest.
WEAVE_HOST_DEVICE inline int64_t rows_bytes(Transfer transfer, int64_t rows, int64_t hidden) {
    return rows * row_bytes_of_message(transfer, hidden, 4, true);
}

// The first row that rank `rank_of_host` adds; that of the next rank is where its rows end.
WEAVE_HOST_DEVICE inline int32_t first_row(int32_t tokens, int32_t rank_of_host, int32_t num_of_host) {
    return static_cast<int32_t>(static_cast<int64_t>(tokens) * rank_of_host / num_of_host);
}

// Rows of the longest message of a call.
WEAVE_HOST_DEVICE inline int64_t most_rows(int64_t tokens, int32_t num_of_host) {
    return (tokens + num_of_host - 1) / num_of_host;
}

// Which rank of the group each rank of each host is, and where this one is among them. Every host has equally many.
struct HostRanks {
    std::vector<std::vector<int32_t>> ranks;
    int32_t host = 0;
    int32_t rank_of_host = 0;

    int32_t num_hosts() const { return static_cast<int32_t>(ranks.size()); }
    int32_t num_of_host() const { return static_cast<int32_t>(ranks.empty() ? 0 : ranks[0].size()); }
};

// The rank `rank` of a group whose hosts have these ranks. Throws std::invalid_argument for fewer than two hosts or
// more than kMostHosts, hosts of different or too many ranks, and ranks that are not 0, 1, ... in some order.
HostRanks host_ranks(std::vector<std::vector<int32_t>> ranks, int32_t rank);

// Slots of a half, equal on all ranks.
int32_t num_slots(int32_t hosts, int32_t num_of_host);

// The steps of a rank, without the addresses of peers' arenas.
Doubling doubling(const HostRanks& at);

// A range of every arena; of no bytes where no call needs it.
struct Place {
    int64_t offset = 0, num_bytes = 0;
};

// Where an exchange's buffers are.
struct Places {
    Place inbox, outbox, row_inbox, row_outbox, flags, sums;
};

// `exchange` in buffers at `places`. Throws std::invalid_argument where inbox and outbox differ in size.
Doubling placed(Doubling exchange, const Places& places);

// Whether a call fits the buffers that `exchange` is in.
bool fits(const Doubling& exchange, Transfer transfer, int64_t tokens, int64_t hidden);

// What calls of up to `tokens` tokens need of every arena: "host_inbox" and "host_outbox", which hold packets and what
// messages of either transfer begin with; for rows as they are "host_row_inbox", "host_row_outbox" and "host_flags";
// among more than two hosts, or where hosts have several ranks, "host_sums". All begin as zeros.
std::vector<fabric::BufferNeed> doubling_needs(Transfer transfer, int64_t tokens, int64_t hidden, int32_t hosts,
                                               int32_t num_of_host);

}  // namespace weave::hosts
