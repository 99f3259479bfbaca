// Shared memory of the ranks of one host.
//
// Every rank owns one segment: a header with its epoch words, then data. All peers map it. The vocabulary is the
// same on every fabric:
//
//   signal(word, epoch)          store, release: every store before it is seen by whoever waits for that epoch
//   store_relaxed(word, epoch)   only the word itself; orders nothing, wakes no waiter
//   wait(word, epoch)            acquire: pairs with signal
//   reached_relaxed(word, epoch) one load; orders nothing
//
// Memory order, by what is shared:
//
//   partial result (in the buffer of the epoch's parity) and tag[parity]
//     store   the owner, plain; the tag relaxed
//     fence   release, in signal(ready)
//     flag    ready
//     wait    every peer: acquire, in wait(ready)
//     again   two epochs later: by then this rank has every peer's `ready` of the epoch between, which a peer
//             signals after it has finished this one
//   output rows
//     store   the owner, plain, after wait(ready) of every peer
//     fence   release, in signal(rows)
//     flag    rows
//     wait    every peer: acquire, in wait(rows)
//     again   in the next epoch, after wait(ready) of every peer, which a peer signals after it has finished this one
//   num_waiters
//     store   a peer, seq_cst, before it sleeps on a word; the system compares the word once more then
//     fence   seq_cst, in signal(), between the word and the load of num_waiters: one of the two sees the other
//
// This speaks of buffers that are at the same place in all calls. A call whose buffers are elsewhere than those of the
// call before begins with a barrier (Group::enter).
//
// Epochs count the calls of a group and never reset, so nothing has to be cleared between calls. They are 32 bits
// wide and compared by distance, so they may wrap; for that every word must move at least once in 2^31 calls.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/process.h"
#include "base/status.h"
#include "fabric/buffer_need.h"

namespace weave::fabric::shm {

constexpr std::size_t kSegmentHeaderBytes = 4096;
// Of buffers, and of the parts of one.
constexpr int64_t kAlignment = 64;

inline int64_t aligned(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// The buffers of partial results, one for calls of even epochs and one for odd, of at most `bytes` in one call. All
// families share them: what a call puts there is read by all ranks until the call after the next one.
inline BufferNeed partial_need(int64_t bytes) {
    return {"partial", 2 * aligned(bytes), std::nullopt, true};
}

enum class State : uint32_t { kLive = 1, kFailed = 2, kClosed = 3 };

// The first page of a segment. Only its owner writes it, but for `num_waiters`.
struct SegmentHeader {
    uint64_t magic;
    uint64_t cookie;  // random; proves that /proc/<pid>/fd/<fd> is the segment that was announced
    uint64_t data_bytes;
    uint64_t pid_namespace;
    ProcessMark mark;  // of the owner's process, so that a reused pid is not taken for it
    int32_t pid;
    // `tag` and `ready` share a line: a peer that sees the epoch has the tag too.
    alignas(64) std::atomic<uint32_t> ready;  // this rank's partial result of that epoch is in its segment
    std::atomic<uint32_t> state;
    std::atomic<uint64_t> tag[2];                   // what the owner runs, by parity of the epoch
    alignas(64) std::atomic<uint32_t> rows;         // this rank's output rows of that epoch are in its segment
    alignas(64) std::atomic<uint32_t> num_waiters;  // peers asleep on a word of this segment
};
static_assert(sizeof(SegmentHeader) <= kSegmentHeaderBytes);
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// One mapped segment: the owner's after create(), a peer's after open(). Unmapped by the destructor.
class Segment {
  public:
    // Makes and touches `data_bytes` of fresh shared memory. It has no name from the start, so nothing is left behind
    // when the process dies. Throws std::runtime_error if the host has not that much.
    // `num_segments` of that size are made on this host at the same time; `root` is for available_memory().
    // `in_dev_shm`: where that has room, else as memfd; if false, always as memfd. `node`: the memory node where its
    // pages are placed, as far as the system allows it (-1: that of the thread that touches them, which is this one).
    static Segment* create(std::size_t data_bytes, uint64_t cookie, uint32_t first_epoch, int32_t num_segments = 1,
                           const std::string& root = "", bool in_dev_shm = true, int32_t node = -1);
    // Maps the segment that process `pid` has open as `fd`. Throws if it is not the one with `cookie`.
    static Segment* open(int32_t pid, int32_t fd, uint64_t cookie, std::size_t data_bytes);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    SegmentHeader* header() const { return static_cast<SegmentHeader*>(base_); }
    char* data() const { return static_cast<char*>(base_) + kSegmentHeaderBytes; }
    std::size_t data_bytes() const { return data_bytes_; }
    int32_t fd() const { return fd_; }
    void close_fd();
    // Does nothing in a process that was forked from the one that made it: the memory is that one's.
    void mark(State state);

  private:
    Segment(void* base, std::size_t data_bytes, int32_t fd) : base_(base), data_bytes_(data_bytes), fd_(fd) {}
    void* base_;
    std::size_t data_bytes_;
    int32_t fd_;
    pid_t maker_ = getpid();
};

// Where a call works in the data of every segment; equal on all ranks.
struct Layout {
    int64_t partial_offset = -1;  // two buffers of `partial_bytes` each
    int64_t partial_bytes = 0;
    int64_t output_offset = 0;  // -1: the call returns no output rows
    bool operator==(const Layout& other) const {
        return partial_offset == other.partial_offset && partial_bytes == other.partial_bytes &&
               output_offset == other.output_offset;
    }
};

// How a wait polls before it sleeps.
struct SpinPolicy {
    int64_t spin_us;     // with a pause between polls
    int64_t yield_us;    // then with sched_yield between them, for so long ...
    int32_t min_yields;  // ... and at least so often
};

// What a call is, for peers to compare: equal on all ranks or the data would not fit together.
inline uint64_t tag(uint32_t site, int64_t tokens) {
    return (static_cast<uint64_t>(site) << 32) | static_cast<uint32_t>(tokens);
}

// The segments of all ranks of a group, and the epoch of the last call. One call at a time.
class Group {
  public:
    Group(std::vector<Segment*> segments, int32_t rank, int32_t num_processes, uint32_t first_epoch);

    int32_t world() const { return static_cast<int32_t>(segments_.size()); }
    int32_t rank() const { return rank_; }
    uint32_t epoch() const { return epoch_; }
    char* data(int32_t rank) const { return segments_[rank]->data(); }
    const Status& status() const { return status_; }

    // Takes the group for a call at `asked`. If the last call had another layout, waits until all peers are through
    // with that one, since the buffers may overlap; without output rows only the partial buffers count. Afterwards the
    // partial buffer of epoch() + 1 may be written.
    Status enter(const Layout& asked, uint64_t tag, double timeout_s);
    // Takes it for a call whose buffers no call of another kind uses: where the last one's are is all the same.
    Status enter();
    // Starts the next epoch: publishes `tag` and signals `ready`.
    void signal_ready(uint64_t tag);
    void signal_rows();
    // For calls that return no rows: keeps the word within 2^31 of the epoch.
    void store_rows_relaxed();
    Status wait_ready(int32_t peer, uint64_t tag, double timeout_s);
    // Of every peer; the first failure is kept and marked.
    Status wait_all_ready(uint64_t tag, double timeout_s);
    Status wait_rows(int32_t peer, double timeout_s);
    // Keeps the first failure and marks it for the peers, so that they need not wait for their own timeout.
    Status poison(const Status& status);
    void leave() { holder_.store(0, std::memory_order_release); }
    // Whether this thread has taken the group for a call.
    bool is_held() const { return holder_.load(std::memory_order_relaxed) == this_thread(); }
    // Ends a call that this thread began and will not finish, as an exception came in between: peers that wait for it
    // are signalled. Does nothing where there is none, or while it waits: then the wait itself ends it.
    void abandon();

  private:
    using Word = std::atomic<uint32_t> SegmentHeader::*;
    Status wait(Word word, const char* slot, int32_t peer, double timeout_s);
    bool is_interrupted();
    static uintptr_t this_thread();
    Status lost_peer(int32_t peer) const;

    std::vector<Segment*> segments_;
    int32_t rank_;
    uint32_t epoch_;
    pid_t maker_;
    std::vector<Process> processes_;
    SpinPolicy spin_policy_;
    Layout layout_;
    Status status_;
    std::atomic<uintptr_t> holder_{0};  // this_thread() of the one whose call it is; 0: no thread's
    bool runs_handlers_ = false;        // of signals, while it waits: they may come here again
};

// Around what a call does: one that ends by an exception is abandoned.
class Held {
  public:
    explicit Held(Group& group) : group_(group) {}
    ~Held() { group_.abandon(); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

  private:
    Group& group_;
};

}  // namespace weave::fabric::shm
