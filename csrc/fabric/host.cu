#include <cuda_runtime.h>
#include <sys/resource.h>
#include <unistd.h>

#include <stdexcept>
#include <utility>

#include "fabric/device.cuh"
#include "fabric/host.h"

namespace weave::fabric {
namespace {

bool has(cudaDeviceAttr attribute, int32_t device) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess && value != 0;
}

// The limit of `ulimit -l`, where it is below `num_bytes`: some drivers count registered memory against it.
std::string memory_lock_limit(std::size_t num_bytes) {
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= num_bytes)
        return "";
    return " (ulimit -l allows " + std::to_string(limit.rlim_cur) + " bytes of locked memory)";
}

}  // namespace

std::string why_no_host_memory(int32_t device) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        cudaGetLastError();  // or the next launch's check would find it
        return cudaGetErrorString(error);
    }
    if (device < 0 || device >= count) return "there is no such GPU";
    if (!has(cudaDevAttrUnifiedAddressing, device)) return "the GPU shares no address space with the host";
    if (!has(cudaDevAttrCanMapHostMemory, device)) return "the GPU cannot map memory of the host";
    if (!has(cudaDevAttrHostRegisterSupported, device)) return "the driver cannot register memory of the host";
    return "";
}

bool has_peer_atomics(int32_t device, int32_t peer) {
    int value = 0;
    if (cudaDeviceGetP2PAttribute(&value, cudaDevP2PAttrNativeAtomicSupported, device, peer) == cudaSuccess)
        return value != 0;
    cudaGetLastError();
    return false;
}

RegisteredSegments::RegisteredSegments(std::vector<std::shared_ptr<shm::Segment>> segments, int32_t device)
    : segments_(std::move(segments)), device_(device), maker_(getpid()) {
    if (segments_.empty()) throw std::runtime_error("a group has at least one segment");
    const DeviceGuard guard(device);
    try {
        for (const auto& segment : segments_) {
            const std::size_t num_bytes = segment->data_bytes();
            if (num_bytes != segments_.front()->data_bytes()) throw std::runtime_error("segments of different sizes");
            const std::string what = std::to_string(num_bytes) + " bytes of rank " + std::to_string(bases_.size());
            cudaError_t error =
                cudaHostRegister(segment->data(), num_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
            if (error != cudaSuccess) {
                cudaGetLastError();
                throw std::runtime_error("cannot register " + what + ": " + cudaGetErrorString(error) +
                                         memory_lock_limit(num_bytes));
            }
            bases_.push_back(0);
            void* address = nullptr;
            error = cudaHostGetDevicePointer(&address, segment->data(), 0);
            if (error != cudaSuccess) throw std::runtime_error("cannot map " + what + ": " + cudaGetErrorString(error));
            bases_.back() = reinterpret_cast<uint64_t>(address);
        }
        check(cudaMalloc(reinterpret_cast<void**>(&own_), kHeaderBytes), "cudaMalloc");
        check(cudaMemset(own_, 0, kHeaderBytes), "cudaMemset");
        check(cudaDeviceSynchronize(), "cudaMemset");
    } catch (...) {
        release();
        throw;
    }
}

// Kernels that still use the segments end first: each of their waits does. A forked process has no part in any of it.
// Fails where a kernel ended with a trap or the driver is gone already; the process is about to end then.
void RegisteredSegments::release() {
    if (getpid() != maker_) return;
    int before = 0;
    cudaGetDevice(&before);
    if (cudaSetDevice(device_) != cudaSuccess) return;
    cudaDeviceSynchronize();
    for (std::size_t index = 0; index < bases_.size(); ++index)
        cudaHostUnregister(segments_[index]->data());
    if (own_ != nullptr) cudaFree(own_);
    cudaGetLastError();
    cudaSetDevice(before);
    bases_.clear();
    own_ = nullptr;
}

RegisteredSegments::~RegisteredSegments() {
    release();
}

HostGroup::HostGroup(std::vector<std::shared_ptr<shm::Segment>> segments, int32_t rank, int32_t device)
    : HostGroup(std::make_unique<RegisteredSegments>(std::move(segments), device), rank, device) {}

HostGroup::HostGroup(std::unique_ptr<RegisteredSegments> segments, int32_t rank, int32_t device)
    : PeerGroup(segments->bases(), rank, device, segments->num_bytes(), segments->own()),
      segments_(std::move(segments)) {}

// Before the segments are unregistered: a kernel that gives up writes into them.
HostGroup::~HostGroup() {
    retire();
}

}  // namespace weave::fabric
