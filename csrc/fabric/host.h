// The arenas of a group of GPUs of one host that do not reach each other's memory: segments of the host's memory, which
// every process registers with CUDA and maps for its GPU. A rank's arena is the segment that the rank itself made, on
// the memory node of its GPU: it reads there, and its peers write.
//
// The header of such an arena is split. Words by which ranks signal are in the segment. What only a rank's own kernels
// touch (ChannelState, ArenaHeader::failed) is in memory of its GPU, see GroupView::own: these words are changed by
// atomic operations, which are not atomic on host memory unless the link has PCIe atomics.
//
// What kernels may do with the segments, on any PCIe link: loads and stores of up to 16 aligned bytes, of which each
// aligned word of 4 bytes arrives whole; fences, releases and acquires at system scope. Not: red and atom (signal_add).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fabric/peer.h"
#include "fabric/shm.h"

namespace weave::fabric {

// Why `device` cannot use memory of the host that processes share; empty where it can.
std::string why_no_host_memory(int32_t device);

// Whether `device` supports native atomics on the memory of `peer`: over NVLink, not over PCIe.
bool has_peer_atomics(int32_t device, int32_t peer);

// Segments that are registered for one GPU, and the words of the header that are in its own memory.
class RegisteredSegments {
  public:
    // Throws std::runtime_error on CUDA errors, which name the rank of the segment and the limit of locked memory.
    RegisteredSegments(std::vector<std::shared_ptr<shm::Segment>> segments, int32_t device);
    ~RegisteredSegments();
    RegisteredSegments(const RegisteredSegments&) = delete;
    RegisteredSegments& operator=(const RegisteredSegments&) = delete;

    // Where the GPU finds each segment's data, in group order.
    const std::vector<uint64_t>& bases() const { return bases_; }
    ArenaHeader* own() const { return own_; }
    int64_t num_bytes() const { return static_cast<int64_t>(segments_.front()->data_bytes()); }

  private:
    void release();

    std::vector<std::shared_ptr<shm::Segment>> segments_;
    std::vector<uint64_t> bases_;
    ArenaHeader* own_ = nullptr;
    int32_t device_;
    int32_t maker_;  // pid of the process that made it
};

// The only base class is PeerGroup, at the same address: bindings take one for the other.
class HostGroup : public PeerGroup {
  public:
    // One segment of each rank, all of one size, whose headers are zeros and whose buffers are filled already.
    HostGroup(std::vector<std::shared_ptr<shm::Segment>> segments, int32_t rank, int32_t device);
    ~HostGroup();

  private:
    HostGroup(std::unique_ptr<RegisteredSegments> segments, int32_t rank, int32_t device);

    std::unique_ptr<RegisteredSegments> segments_;
};

}  // namespace weave::fabric
