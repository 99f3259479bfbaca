// Copies of experts' weights out of peers' memory by copy engines, concurrent with the kernels of other streams.
//
// A PullMark is a point in the work of a GPU: all that a stream had, or a pull. What it consists of depends on where it
// was made:
//
//   outside of a capture   events. Pulls are on streams of their own (lanes), which wait for the events that they
//   follow under capture          nodes of the graph under capture. Pulls are memcpy nodes that are added to that graph
//   with
//                          their dependencies; a stream that waits gets the nodes as dependencies of what it captures
//                          next. No stream is drawn into the capture, so there is none to join, and the graph may end
//                          anywhere: it ends when all of its nodes have
//
// Marks of one kind, and of one capture, go together: see weaveopt/ops/experts/prefetch/slots.py, which says what
// follows what. Nothing here waits for the host but settle().
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace weave::moe_experts {

struct PullMark;

struct PulledBytes {
    void* to;
    const void* from;
    std::size_t bytes;
};

using PullMarks = std::vector<std::shared_ptr<PullMark>>;

class PullStreams : public std::enable_shared_from_this<PullStreams> {
  public:
    // `lanes` copies are in flight at a time. Throws std::runtime_error on CUDA errors, as all of the following.
    PullStreams(int32_t device, int32_t lanes);
    ~PullStreams();
    PullStreams(const PullStreams&) = delete;
    PullStreams& operator=(const PullStreams&) = delete;

    // Identifies the capture that `stream` is part of; 0: none.
    static uint64_t capture_of(void* stream);
    // All that `stream` has.
    std::shared_ptr<PullMark> mark(void* stream);
    // What `stream` gets from here on runs after `mark`.
    void wait(void* stream, const PullMark& mark);
    // Copies that follow `after`; part of the capture of `stream`, if it is part of one. Its end is returned.
    std::shared_ptr<PullMark> pull(void* stream, const std::vector<PulledBytes>& copies, const PullMarks& after);
    // Waits on the host until marks that were made outside of a capture have been reached; also while one is going on.
    void settle(const PullMarks& marks);

  private:
    friend struct PullMark;
    void* take_event();
    void give_event(void* event);
    std::shared_ptr<PullMark> enqueue(const std::vector<PulledBytes>& copies, const PullMarks& after);

    int32_t device_;
    std::vector<void*> lanes_;
    std::mutex lock_;
    std::vector<void*> free_events_;
    pid_t maker_;
};

struct PullMark {
    PullMark(std::shared_ptr<PullStreams> owner, uint64_t capture) : owner(std::move(owner)), capture(capture) {}
    ~PullMark();
    PullMark(const PullMark&) = delete;
    PullMark& operator=(const PullMark&) = delete;

    std::shared_ptr<PullStreams> owner;
    uint64_t capture;
    std::vector<void*> parts;  // events, or nodes of that capture's graph
};

}  // namespace weave::moe_experts
