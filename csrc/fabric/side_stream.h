// A second stream of a GPU, and the pairs of events by which work leaves the current stream for it and comes back.
//
// Memory order, by what is shared between the two streams:
//
//   operands of a call, results that were allocated for it
//     store   whatever ran before on the current stream
//     flag    the event of fork(), recorded on the current stream
//     wait    the side stream, before the call's first kernel
//     again   memory of theirs that others get is written after join() on the current stream: who begins a call holds
//             its tensors until then
//   results of the call
//     store   its kernels, on the side stream
//     flag    the event of launched(), recorded on the side stream after the call's last kernel
//     wait    the current stream, in join()
//   buffers of the arena that calls of the side stream use
//     store, flag, wait as fabric/call.cuh says for kernels of one stream, which is this one
//     again   in the next call of the side stream; calls of other streams have buffers and a channel of their own
//
// All of it can be captured into a CUDA graph: fork() draws the side stream into the capture of the current stream, and
// join() brings it back, as a capture has to end. Nothing is allocated here but when a stream or a pair of events is
// made, and nothing waits for the host.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

namespace weave::fabric {

class SideStream {
  public:
    // Of the highest priority that `device` has: its few CTAs get their SMs as soon as CTAs of other kernels end, not
    // after those that wait already. Throws std::runtime_error on CUDA errors.
    explicit SideStream(int32_t device);
    ~SideStream();
    SideStream(const SideStream&) = delete;
    SideStream& operator=(const SideStream&) = delete;

    void* handle() const { return stream_; }
    int32_t device() const { return device_; }

  private:
    void* stream_ = nullptr;
    int32_t device_;
    pid_t maker_;
};

// The two events of one call site, made once. Its calls follow one another: fork, launched, join. Each returns a CUDA
// error code; 0 is success.
class StreamCrossing {
  public:
    explicit StreamCrossing(std::shared_ptr<SideStream> stream);
    ~StreamCrossing();
    StreamCrossing(const StreamCrossing&) = delete;
    StreamCrossing& operator=(const StreamCrossing&) = delete;

    // What is launched on the side stream from here on runs after all that `current` has.
    int fork(void* current);
    // All that the side stream has belongs to this call.
    int launched();
    // What is launched on `current` from here on runs after that.
    int join(void* current);

  private:
    std::shared_ptr<SideStream> stream_;
    void* begun_ = nullptr;
    void* ended_ = nullptr;
    pid_t maker_;
};

}  // namespace weave::fabric
