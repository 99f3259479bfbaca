#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>

#include "fabric/device.cuh"

namespace weave::fabric {
namespace {

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

class DeviceGuard {
  public:
    explicit DeviceGuard(int32_t device) {
        cudaGetDevice(&before_);
        check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~DeviceGuard() { cudaSetDevice(before_); }

  private:
    int before_ = 0;
};

__global__ void fill(uint32_t* words, int64_t count, uint32_t value) {
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x)
        words[i] = value;
}

const char* name_of(Slot slot) {
    switch (slot) {
        case Slot::kTag:
            return "tag";
        case Slot::kPartial:
            return "partial";
        case Slot::kRows:
            return "rows";
        case Slot::kMail:
            return "mail";
    }
    return "";
}

}  // namespace

const char* error_text(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

PeerGroup::PeerGroup(std::vector<uint64_t> bases, uint64_t multicast, int32_t rank, int32_t device,
                     const Regions& regions)
    : bases_(std::move(bases)), multicast_(multicast), rank_(rank), device_(device), regions_(regions) {
    if (bases_.size() < 2 || bases_.size() > kMaxWorld)
        throw std::runtime_error("a peer group has 2 to " + std::to_string(kMaxWorld) + " ranks");
    const DeviceGuard guard(device);
    char* own = reinterpret_cast<char*>(bases_[rank]);
    check(cudaMemset(own, 0, kHeaderBytes), "cudaMemset");
    const int64_t num_words = kNumMailboxes * regions.mailbox_bytes / 4;
    if (num_words > 0) fill<<<512, 512>>>(reinterpret_cast<uint32_t*>(own + regions.mailbox(0)), num_words, kAbsent);
    check(cudaGetLastError(), "fill");
    check(cudaDeviceSynchronize(), "fill");
    check(
        cudaHostAlloc(reinterpret_cast<void**>(&record_), sizeof(Record), cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
    std::memset(static_cast<void*>(record_), 0, sizeof(Record));
    check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_record_), record_, 0), "cudaHostGetDevicePointer");
}

PeerGroup::~PeerGroup() {
    // Fails where a kernel ended with a trap or the driver is gone already; the process is about to end then.
    if (record_ != nullptr) cudaFreeHost(record_);
}

Status PeerGroup::status() const {
    const volatile Record* record = record_;
    Status status;
    status.code = static_cast<Code>(record->code);
    if (status.ok()) return status;
    __sync_synchronize();
    status.peer = record->peer;
    status.slot = name_of(static_cast<Slot>(record->slot));
    status.expected = record->expected;
    status.seen = record->seen;
    status.own_tag = record->own_tag;
    status.peer_tag = record->peer_tag;
    return status;
}

void PeerGroup::acknowledge() {
    const_cast<volatile Record*>(record_)->acknowledged = 1;
}

void PeerGroup::abort(Code code) {
    const_cast<volatile Record*>(record_)->abort = static_cast<uint32_t>(code);
}

}  // namespace weave::fabric
