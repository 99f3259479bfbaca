#include <cuda_runtime.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "fabric/device.cuh"
#include "fabric/kernel_code.cuh"
#include "fabric/peer.h"

namespace weave::fabric {
namespace {

__global__ void fill_words(uint32_t* words, int64_t count, uint32_t value) {
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x)
        words[i] = value;
}

// Memory of the host that kernels of a device use too.
template <typename T>
T* mapped(T** device_address) {
    T* memory = nullptr;
    check(cudaHostAlloc(reinterpret_cast<void**>(&memory), sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc");
    std::memset(static_cast<void*>(memory), 0, sizeof(T));
    check(cudaHostGetDevicePointer(reinterpret_cast<void**>(device_address), memory, 0), "cudaHostGetDevicePointer");
    return memory;
}

// Peers that kernels of a device signal when one gives up. Lives as long as the process: a kernel may read it at any
// time.
struct PeersOfDevice {
    Peers* peers = nullptr;
    Peers* device_peers = nullptr;
};

std::mutex peers_mutex;

PeersOfDevice& peers_of(int32_t device) {
    static std::map<int32_t, PeersOfDevice> all;
    PeersOfDevice& found = all[device];
    if (found.peers == nullptr) found.peers = mapped(&found.device_peers);
    return found;
}

void add(Peers* to, uint64_t word, uint32_t value) {
    volatile Peers* peers = to;
    uint32_t place = 0;
    while (place < peers->count && peers->word[place] != 0)
        ++place;
    if (place == Peers::kMost) return;
    peers->value[place] = value;
    __sync_synchronize();
    peers->word[place] = word;
    __sync_synchronize();
    if (place == peers->count) peers->count = place + 1;
}

const char* name_of(Slot slot) {
    switch (slot) {
        case Slot::kTag:
            return "tag";
        case Slot::kPartial:
            return "partial";
        case Slot::kRows:
            return "rows";
        case Slot::kLLPacket:
            return "ll_packet";
        case Slot::kHostStep:  // and above: no kernel of one host
            break;
    }
    return "";
}

void expect_inside(const Fill& fill, int64_t num_bytes) {
    if (fill.offset >= static_cast<int64_t>(kHeaderBytes) && fill.offset <= num_bytes && fill.num_bytes >= 0 &&
        fill.num_bytes <= num_bytes - fill.offset && (fill.offset | fill.num_bytes) % 4 == 0)
        return;
    throw std::runtime_error(std::to_string(fill.num_bytes) + " bytes of words to fill at " +
                             std::to_string(fill.offset) + ": expected whole words after the header of " +
                             std::to_string(kHeaderBytes) + " bytes, in an arena of " + std::to_string(num_bytes) +
                             " bytes");
}

// `bases`, if all fills fit.
std::vector<uint64_t> checked(std::vector<uint64_t> bases, const std::vector<Fill>& fills, int64_t num_bytes) {
    for (const Fill& fill : fills)
        expect_inside(fill, num_bytes);
    return bases;
}

}  // namespace

const char* error_text(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

bool has_code(int32_t device) {
    // All kernels of a build were compiled for the same architectures: one of them stands for the others.
    return code_of<fill_words>(device) != KernelCode::kMissing;
}

PeerGroup::PeerGroup(std::vector<uint64_t> bases, uint64_t multicast, int32_t rank, int32_t device, int64_t num_bytes,
                     const std::vector<Fill>& fills)
    : PeerGroup(checked(std::move(bases), fills, num_bytes), rank, device, num_bytes, nullptr, multicast) {
    const DeviceGuard guard(device);
    char* own = reinterpret_cast<char*>(bases_[rank]);
    check(cudaMemset(own, 0, kHeaderBytes), "cudaMemset");
    for (const Fill& fill : fills) {
        if (fill.num_bytes == 0) continue;
        fill_words<<<512, 512>>>(reinterpret_cast<uint32_t*>(own + fill.offset), fill.num_bytes / 4, fill.word);
        check(cudaGetLastError(), "fill");
    }
    check(cudaDeviceSynchronize(), "fill");
}

PeerGroup::PeerGroup(std::vector<uint64_t> bases, int32_t rank, int32_t device, int64_t num_bytes, ArenaHeader* own,
                     uint64_t multicast)
    : bases_(std::move(bases)), multicast_(multicast), rank_(rank), num_bytes_(num_bytes), own_(own), maker_(getpid()) {
    if (bases_.empty() || bases_.size() > kMaxWorld || rank < 0 || rank >= world())
        throw std::runtime_error("rank " + std::to_string(rank) + " of " + std::to_string(bases_.size()) +
                                 ": a peer group has 1 to " + std::to_string(kMaxWorld) + " ranks");
    if (num_bytes < static_cast<int64_t>(kHeaderBytes) || bases_[rank] == 0)
        throw std::runtime_error("an arena of " + std::to_string(num_bytes) + " bytes has no room for its header");
    if (own_ == nullptr) own_ = reinterpret_cast<ArenaHeader*>(bases_[rank]);
    const DeviceGuard guard(device);
    record_ = mapped(&device_record_);
    const std::lock_guard lock(peers_mutex);
    const PeersOfDevice& of_device = peers_of(device);
    peers_ = of_device.peers;
    for (int32_t peer = 0; peer < world(); ++peer)
        if (peer != rank) add(peers_, lost_peer_of(peer), lost_word(rank));
    record_->peers = of_device.device_peers;
}

PeerGroup::~PeerGroup() {
    if (getpid() != maker_) return;
    retire();
    // Fails where a kernel ended with a trap or the driver is gone already; the process is about to end then.
    if (record_ != nullptr) cudaFreeHost(record_);
}

uint64_t PeerGroup::lost_peer_of(int32_t peer) const {
    return bases_[peer] + offsetof(ArenaHeader, lost_peer);
}

// A forked process has no part in what belongs to its parent: not even that memory need be mapped there.
void PeerGroup::retire() {
    if (getpid() != maker_) return;
    const std::lock_guard lock(peers_mutex);
    if (peers_ == nullptr) return;
    for (int32_t peer = 0; peer < world(); ++peer)
        for (uint32_t place = 0; place < peers_->count && peer != rank_; ++place)
            if (peers_->word[place] == lost_peer_of(peer) && peers_->value[place] == lost_word(rank_))
                const_cast<volatile Peers*>(peers_)->word[place] = 0;
    peers_ = nullptr;
}

GroupView PeerGroup::view(int32_t channel, uint64_t timeout_ns) const {
    if (channel < 0 || channel >= kNumChannels)
        throw std::invalid_argument("channel " + std::to_string(channel) + ": an arena has " +
                                    std::to_string(kNumChannels));
    GroupView view{};
    for (int32_t rank = 0; rank < world(); ++rank)
        view.base[rank] = reinterpret_cast<char*>(bases_[rank]);
    view.multicast = reinterpret_cast<char*>(multicast_);
    view.own = own_;
    view.lost_peer = reinterpret_cast<uint32_t*>(lost_peer_of(rank_));
    view.record = device_record_;
    view.timeout_ns = timeout_ns;
    view.channel_offset = static_cast<int64_t>(offsetof(ArenaHeader, channel) + channel * sizeof(Channel));
    view.world = world();
    view.rank = rank_;
    return view;
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
