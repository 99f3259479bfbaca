#include <cuda_runtime.h>
#include <unistd.h>

#include <utility>

#include "fabric/device.cuh"
#include "fabric/side_stream.h"

namespace weave::fabric {
namespace {

void* make_event() {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
}

int record(void* event, void* stream) {
    return cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream));
}

int wait(void* stream, void* event) {
    return cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0);
}

}  // namespace

SideStream::SideStream(int32_t device) : device_(device), maker_(getpid()) {
    const DeviceGuard guard(device);
    int lowest = 0, highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
    stream_ = stream;
}

// A forked process has no part in what belongs to its parent. Errors: after a trap, or where the driver is gone.
SideStream::~SideStream() {
    if (getpid() == maker_) cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}

StreamCrossing::StreamCrossing(std::shared_ptr<SideStream> stream) : stream_(std::move(stream)), maker_(getpid()) {
    const DeviceGuard guard(stream_->device());
    begun_ = make_event();
    ended_ = make_event();
}

StreamCrossing::~StreamCrossing() {
    if (getpid() != maker_) return;
    cudaEventDestroy(static_cast<cudaEvent_t>(begun_));
    cudaEventDestroy(static_cast<cudaEvent_t>(ended_));
}

int StreamCrossing::fork(void* current) {
    const int error = record(begun_, current);
    return error != 0 ? error : wait(stream_->handle(), begun_);
}

int StreamCrossing::launched() {
    return record(ended_, stream_->handle());
}

int StreamCrossing::join(void* current) {
    return wait(current, ended_);
}

}  // namespace weave::fabric
