#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "experts/pulls.h"
#include "fabric/device.cuh"

namespace weave::moe_experts {
namespace {

using fabric::check;
using fabric::DeviceGuard;

cudaStream_t as_stream(void* stream) {
    return static_cast<cudaStream_t>(stream);
}

struct Capture {
    uint64_t id = 0;  // 0: the stream is not part of one
    cudaGraph_t graph = nullptr;
    std::vector<cudaGraphNode_t> last;  // what the stream's next node depends on
};

Capture capture_info(void* stream) {
    Capture found;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    const cudaGraphNode_t* nodes = nullptr;
    const cudaGraphEdgeData* edges = nullptr;  // asked for, as a kernel that is launched early leaves some
    std::size_t count = 0;
#if CUDART_VERSION >= 13000
    check(cudaStreamGetCaptureInfo(as_stream(stream), &status, &id, &found.graph, &nodes, &edges, &count),
          "cudaStreamGetCaptureInfo");
#else
    check(cudaStreamGetCaptureInfo_v3(as_stream(stream), &status, &id, &found.graph, &nodes, &edges, &count),
          "cudaStreamGetCaptureInfo");
#endif
    if (status == cudaStreamCaptureStatusInvalidated) check(cudaErrorStreamCaptureInvalidated, "a capture");
    if (status != cudaStreamCaptureStatusActive) return {};
    found.id = id;
    found.last.assign(nodes, nodes + count);
    return found;
}

void set_dependencies(void* stream, std::vector<cudaGraphNode_t>& nodes) {
#if CUDART_VERSION >= 13000
    check(cudaStreamUpdateCaptureDependencies(as_stream(stream), nodes.data(), nullptr, nodes.size(),
                                              cudaStreamSetCaptureDependencies),
          "cudaStreamUpdateCaptureDependencies");
#else
    check(cudaStreamUpdateCaptureDependencies(as_stream(stream), nodes.data(), nodes.size(),
                                              cudaStreamSetCaptureDependencies),
          "cudaStreamUpdateCaptureDependencies");
#endif
}

void add_once(std::vector<cudaGraphNode_t>& nodes, const std::vector<void*>& more) {
    for (void* each : more) {
        auto* node = static_cast<cudaGraphNode_t>(each);
        if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
    }
}

void expect_of(const PullMark& mark, uint64_t capture) {
    if (mark.capture != capture)
        throw std::runtime_error("a mark of capture " + std::to_string(mark.capture) + " is used in capture " +
                                 std::to_string(capture));
}

// A copy waits for the one that is `in_flight` places before it, so that as many are in flight.
std::vector<void*> add_copies(const Capture& capture, const std::vector<PulledBytes>& copies, const PullMarks& after,
                              std::size_t in_flight) {
    std::vector<cudaGraphNode_t> first;
    for (const auto& mark : after) {
        expect_of(*mark, capture.id);
        add_once(first, mark->parts);
    }
    std::vector<cudaGraphNode_t> made;
    for (std::size_t i = 0; i < copies.size(); ++i) {
        const auto& each = copies[i];
        const bool waits = i >= in_flight;
        const cudaGraphNode_t* before = waits ? &made[i - in_flight] : first.data();
        cudaGraphNode_t node = nullptr;
        check(cudaGraphAddMemcpyNode1D(&node, capture.graph, before, waits ? 1 : first.size(), each.to, each.from,
                                       each.bytes, cudaMemcpyDeviceToDevice),
              "cudaGraphAddMemcpyNode1D");
        made.push_back(node);
    }
    if (made.empty()) return {first.begin(), first.end()};
    return {made.end() - static_cast<std::ptrdiff_t>(std::min(in_flight, made.size())), made.end()};
}

}  // namespace

PullStreams::PullStreams(int32_t device, int32_t lanes) : device_(device), maker_(getpid()) {
    const DeviceGuard guard(device);
    for (int32_t lane = 0; lane < lanes; ++lane) {
        cudaStream_t stream = nullptr;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        lanes_.push_back(stream);
    }
}

// A forked process has no part in what belongs to its parent.
PullStreams::~PullStreams() {
    if (getpid() != maker_) return;
    for (void* event : free_events_)
        cudaEventDestroy(static_cast<cudaEvent_t>(event));
    for (void* lane : lanes_)
        cudaStreamDestroy(as_stream(lane));
}

PullMark::~PullMark() {
    if (capture != 0) return;
    for (void* event : parts)
        owner->give_event(event);
}

void* PullStreams::take_event() {
    {
        const std::lock_guard<std::mutex> held(lock_);
        if (!free_events_.empty()) {
            void* event = free_events_.back();
            free_events_.pop_back();
            return event;
        }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
}

// Whoever waits for the event has enqueued that already, and a wait is for the record before it.
void PullStreams::give_event(void* event) {
    const std::lock_guard<std::mutex> held(lock_);
    free_events_.push_back(event);
}

uint64_t PullStreams::capture_of(void* stream) {
    return capture_info(stream).id;
}

std::shared_ptr<PullMark> PullStreams::mark(void* stream) {
    const DeviceGuard guard(device_);
    const Capture capture = capture_info(stream);
    auto made = std::make_shared<PullMark>(shared_from_this(), capture.id);
    if (capture.id != 0) {
        made->parts.assign(capture.last.begin(), capture.last.end());
        return made;
    }
    made->parts.push_back(take_event());
    check(cudaEventRecord(static_cast<cudaEvent_t>(made->parts.front()), as_stream(stream)), "cudaEventRecord");
    return made;
}

void PullStreams::wait(void* stream, const PullMark& mark) {
    const DeviceGuard guard(device_);
    const Capture capture = capture_info(stream);
    expect_of(mark, capture.id);
    if (capture.id == 0) {
        for (void* event : mark.parts)
            check(cudaStreamWaitEvent(as_stream(stream), static_cast<cudaEvent_t>(event), 0), "cudaStreamWaitEvent");
        return;
    }
    // One node that is no kernel joins them: a kernel that is launched early may not begin before it.
    std::vector<cudaGraphNode_t> joined = capture.last;
    add_once(joined, mark.parts);
    cudaGraphNode_t node = nullptr;
    check(cudaGraphAddEmptyNode(&node, capture.graph, joined.data(), joined.size()), "cudaGraphAddEmptyNode");
    std::vector<cudaGraphNode_t> only{node};
    set_dependencies(stream, only);
}

std::shared_ptr<PullMark> PullStreams::pull(void* stream, const std::vector<PulledBytes>& copies,
                                            const PullMarks& after) {
    const DeviceGuard guard(device_);
    const Capture capture = capture_info(stream);
    if (capture.id == 0) return enqueue(copies, after);
    auto made = std::make_shared<PullMark>(shared_from_this(), capture.id);
    made->parts = add_copies(capture, copies, after, lanes_.size());
    return made;
}

std::shared_ptr<PullMark> PullStreams::enqueue(const std::vector<PulledBytes>& copies, const PullMarks& after) {
    for (const auto& mark : after) {
        expect_of(*mark, 0);
        for (void* lane : lanes_)
            for (void* event : mark->parts)
                check(cudaStreamWaitEvent(as_stream(lane), static_cast<cudaEvent_t>(event), 0), "cudaStreamWaitEvent");
    }
    for (std::size_t i = 0; i < copies.size(); ++i) {
        const auto& each = copies[i];
        check(cudaMemcpyAsync(each.to, each.from, each.bytes, cudaMemcpyDeviceToDevice,
                              as_stream(lanes_[i % lanes_.size()])),
              "cudaMemcpyAsync");
    }
    auto made = std::make_shared<PullMark>(shared_from_this(), 0);
    for (void* lane : lanes_) {
        made->parts.push_back(take_event());
        check(cudaEventRecord(static_cast<cudaEvent_t>(made->parts.back()), as_stream(lane)), "cudaEventRecord");
    }
    return made;
}

void PullStreams::settle(const PullMarks& marks) {
    const DeviceGuard guard(device_);
    // Another stream's capture forbids waits of the host unless this thread says that it knows what it does.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    cudaError_t error = cudaSuccess;
    for (const auto& mark : marks)
        for (void* event : mark->parts)
            if (error == cudaSuccess && mark->capture == 0)
                error = cudaEventSynchronize(static_cast<cudaEvent_t>(event));
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    check(error, "cudaEventSynchronize");
}

}  // namespace weave::moe_experts
