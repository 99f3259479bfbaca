// Messages between CPU ranks of several hosts: one TCP connection for each pair of ranks.
//
// A call is an epoch: its ranks post what they send and what they expect, then make progress until all of it has moved.
// A message has a slot, which distinguishes the messages of one pair in one epoch; a connection keeps their order.
// Nothing is acknowledged beyond TCP, so a rank may return from a call while its last bytes are still in flight, and a
// peer that is a call ahead is read no further than its next header: what it sent waits in the connection.
//
//   what                       written by                        read by, and why it may be
//   header, payload            the sender, into its socket       the receiver, in the connection's order: a header says
//                                                                whose epoch, call (tag), slot and bytes follow, and
//                                                                all four have to be what was posted
//   the caller's parts         the caller, before send()         sendmsg, until progress() has returned: the caller may
//                                                                not touch them before
//   parts to be received       readv, within progress()          the caller, once `arrived` was called for their slot
//
// Connections are made and authenticated before (weaveopt/fabrics/tcp.py).
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "base/status.h"

namespace weave::fabric::tcp {

// What goes before every message. Both ends have one byte order (ranks compare their machines before).
struct Header {
    uint32_t magic = 0;
    uint32_t epoch = 0;
    uint64_t tag = 0;
    uint32_t slot = 0;
    uint32_t reserved = 0;
    uint64_t num_bytes = 0;
};

// A piece of the caller's memory.
struct Part {
    void* data;
    int64_t num_bytes;
};

// The connections of one rank to all others of its group. One call at a time.
class Group {
  public:
    // `sockets[i]` is connected to rank i; of this rank, and of those that no exchange is with, -1. Takes them over.
    // `num_processes`: ranks of this host, of all groups: with a core for each of them waits poll before they sleep.
    Group(std::vector<int> sockets, int32_t rank, int32_t num_processes, uint32_t first_epoch);
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    int32_t world() const { return static_cast<int32_t>(peers_.size()); }
    int32_t rank() const { return rank_; }
    uint32_t epoch() const { return epoch_; }
    const Status& status() const { return status_; }
    bool is_connected(int32_t index) const { return peers_[index].socket >= 0; }

    // Takes `socket`, which is connected to rank `index`, over. Between calls.
    void add(int32_t index, int socket);
    // Takes the group for the call `tag` (equal on all ranks). Its progress() gives up when no message was completed,
    // in or out, for `timeout_s`: a single message may take no longer.
    Status begin(uint64_t tag, double timeout_s);
    // Between begin() and leave(), also from `arrived`.
    void send(int32_t peer, uint32_t slot, std::vector<Part> parts);
    void receive(int32_t peer, uint32_t slot, std::vector<Part> parts);
    // Until everything that was posted is sent and received.
    Status progress(const std::function<void(int32_t peer, uint32_t slot)>& arrived);
    void leave() { busy_.clear(std::memory_order_release); }
    // Keeps the first failure and closes the connections: peers that wait hear of it.
    Status poison(const Status& status);

  private:
    // Header and parts as one sequence of bytes, of which some have moved.
    struct Message {
        Header header;
        std::vector<Part> parts;
        std::size_t part = 0;  // 0: the header, then parts[part - 1]
        int64_t moved = 0;     // bytes of that part
    };
    struct Expected {
        uint32_t slot;
        std::vector<Part> parts;
    };
    struct Peer {
        int socket = -1;
        std::deque<Message> outgoing;
        std::vector<Expected> expected;
        Message incoming;
        bool has_header = false;  // of `incoming`
        bool is_a_call_ahead = false;

        // Whether something of this call has yet to come from it.
        bool is_awaited() const { return num_awaited() > 0; }
        std::size_t num_awaited() const { return expected.size() + (incoming.part > 0 ? 1 : 0); }
    };

    using Clock = std::chrono::steady_clock;
    // In one turn over all connections.
    struct Moved {
        bool bytes = false;
        bool message = false;  // the last byte of one
    };

    Status write_some(int32_t index, Moved* moved);
    Status read_some(int32_t index, Moved* moved, const std::function<void(int32_t, uint32_t)>& arrived);
    // What the header of `peer` belongs to. It is valid, of the next call, or an error.
    Status match(int32_t index);
    Status lost(int32_t index, Code code) const;
    bool is_done() const;
    int32_t most_awaited() const;
    void sleep(Clock::time_point deadline) const;
    static int gather(Message& message, Header& header, iovec* out, int count);
    static void advance(Message& message, int64_t num_bytes);
    static bool is_complete(const Message& message) { return message.part == message.parts.size() + 1; }

    std::vector<Peer> peers_;
    int32_t rank_;
    uint32_t epoch_;
    uint64_t tag_ = 0;
    double timeout_s_ = 0;
    int64_t spin_us_;
    pid_t maker_ = getpid();
    Status status_;
    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace weave::fabric::tcp
