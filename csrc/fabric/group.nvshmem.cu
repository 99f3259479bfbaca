#include <cuda_runtime.h>
#include <nvshmem.h>
#include <nvshmemx.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>

#include "fabric/nvshmem.h"

namespace weave::fabric::nvshmem {
namespace {

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// What a wait was for: a step of the exchange, or what the peer runs.
std::string name_of(uint32_t slot) {
    if (slot == static_cast<uint32_t>(Slot::kTag)) return "tag";
    return "host step " + std::to_string(slot - static_cast<uint32_t>(Slot::kHostStep));
}

}  // namespace

std::string version() {
    return std::to_string(NVSHMEM_VENDOR_MAJOR_VERSION) + "." + std::to_string(NVSHMEM_VENDOR_MINOR_VERSION) + "." +
           std::to_string(NVSHMEM_VENDOR_PATCH_VERSION);
}

std::string unique_id() {
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    if (nvshmemx_get_uniqueid(&id) != 0) throw std::runtime_error("nvshmemx_get_uniqueid failed");
    return std::string(reinterpret_cast<const char*>(&id), sizeof id);
}

void start(int32_t rank, int32_t world, const std::string& id, int32_t device) {
    if (nvshmemx_init_status() >= NVSHMEM_STATUS_IS_INITIALIZED)
        throw std::runtime_error("NVSHMEM has been started in this process by something else");
    nvshmemx_uniqueid_t unique = NVSHMEMX_UNIQUEID_INITIALIZER;
    if (id.size() != sizeof unique) throw std::runtime_error("a unique id of " + std::to_string(id.size()) + " bytes");
    std::memcpy(static_cast<void*>(&unique), id.data(), sizeof unique);
    check(cudaSetDevice(device), "cudaSetDevice");
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    if (nvshmemx_set_attr_uniqueid_args(rank, world, &unique, &attributes) != 0)
        throw std::runtime_error("nvshmemx_set_attr_uniqueid_args failed");
    // Not nvshmemx_init_attr(): that ends the process where this fails.
    int provided = 0;
    const nvshmemi_version_t built_with = {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                           NVSHMEM_VENDOR_PATCH_VERSION};
    const int code = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID,
                                          &attributes, built_with);
    if (code != 0) throw std::runtime_error("NVSHMEM could not start: code " + std::to_string(code));
    if (nvshmem_my_pe() != rank || nvshmem_n_pes() != world)
        throw std::runtime_error("NVSHMEM started as rank " + std::to_string(nvshmem_my_pe()) + " of " +
                                 std::to_string(nvshmem_n_pes()) + ", expected " + std::to_string(rank) + " of " +
                                 std::to_string(world));
}

Group::Group(int32_t device, int64_t num_bytes, std::vector<std::string> hosts)
    : num_bytes_(num_bytes), hosts_(std::move(hosts)), maker_(getpid()) {
    if (nvshmemx_init_status() < NVSHMEM_STATUS_IS_INITIALIZED) throw std::runtime_error("NVSHMEM was not started");
    rank_ = nvshmem_my_pe();
    world_ = nvshmem_n_pes();
    check(cudaSetDevice(device), "cudaSetDevice");
    if (num_bytes < static_cast<int64_t>(kHeaderBytes))
        throw std::runtime_error("an arena of " + std::to_string(num_bytes) + " bytes has no room for its header");
    base_ = static_cast<char*>(nvshmem_align(256, static_cast<size_t>(num_bytes)));
    if (base_ == nullptr)
        throw std::runtime_error("NVSHMEM has no " + std::to_string(num_bytes) +
                                 " bytes left: set NVSHMEM_SYMMETRIC_SIZE");
    check(cudaMemset(base_, 0, static_cast<size_t>(num_bytes)), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaMemset");
    make_record();
}

Group::Group(int32_t device, int64_t num_bytes, int32_t rank, std::vector<char*> bases)
    : rank_(rank),
      world_(static_cast<int32_t>(bases.size())),
      num_bytes_(num_bytes),
      bases_(std::move(bases)),
      base_(bases_.at(rank)),
      maker_(getpid()) {
    check(cudaSetDevice(device), "cudaSetDevice");
    make_record();
}

void Group::make_record() {
    check(
        cudaHostAlloc(reinterpret_cast<void**>(&record_), sizeof(Record), cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
    std::memset(static_cast<void*>(record_), 0, sizeof(Record));
    check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_record_), record_, 0), "cudaHostGetDevicePointer");
}

Group::~Group() {
    // Fails where a kernel ended with a trap or the driver is gone already; the process is about to end then.
    if (getpid() == maker_ && record_ != nullptr) cudaFreeHost(record_);
}

char* Group::direct(int32_t peer) const {
    if (!bases_.empty()) return bases_.at(peer);
    return static_cast<char*>(nvshmem_ptr(base_, peer));
}

GroupView Group::view(int32_t channel, uint64_t timeout_ns) const {
    if (channel < 0 || channel >= kNumChannels)
        throw std::invalid_argument("channel " + std::to_string(channel) + ": an arena has " +
                                    std::to_string(kNumChannels));
    GroupView view{};
    view.base[0] = base_;
    view.own = reinterpret_cast<ArenaHeader*>(base_);
    view.lost_peer = &view.own->lost_peer;
    view.record = device_record_;
    view.timeout_ns = timeout_ns;
    view.channel_offset = static_cast<int64_t>(offsetof(ArenaHeader, channel) + channel * sizeof(Channel));
    view.world = 1;
    return view;
}

Status Group::status() const {
    const volatile Record* record = record_;
    Status status;
    status.code = static_cast<Code>(record->code);
    if (status.ok()) return status;
    __sync_synchronize();
    status.peer = record->peer;
    slot_ = name_of(record->slot);
    if (status.peer >= 0 && status.peer < static_cast<int32_t>(hosts_.size())) slot_ += " of " + hosts_[status.peer];
    status.slot = slot_.c_str();
    status.expected = record->expected;
    status.seen = record->seen;
    status.own_tag = record->own_tag;
    status.peer_tag = record->peer_tag;
    return status;
}

void Group::acknowledge() {
    const_cast<volatile Record*>(record_)->acknowledged = 1;
}

void Group::abort(Code code) {
    const_cast<volatile Record*>(record_)->abort = static_cast<uint32_t>(code);
}

}  // namespace weave::fabric::nvshmem
