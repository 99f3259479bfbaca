// Arenas of GPUs on several hosts, in NVSHMEM's symmetric heap, and what a kernel that waits in them says when it gives
// up. Part of the module `weaveopt._nvshmem` alone, which is built and loaded where the package is.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "fabric/arena.h"

namespace weave::fabric::nvshmem {

// The version that this module was built with.
std::string version();

// What one rank makes and all others need to start.
std::string unique_id();

// Joins `world` ranks, which all call it; once in a process. Throws std::runtime_error where another one has started
// NVSHMEM in this process, and where NVSHMEM cannot start.
void start(int32_t rank, int32_t world, const std::string& id, int32_t device);

class Group {
  public:
    // `hosts`: the names of the ranks' hosts, for what status() says.
    //
    // All ranks that were started call it at the same point. Throws std::runtime_error if NVSHMEM has not so much
    // memory. All of the arena is zero; peers may write to it once all ranks are through. It stays until the process
    // ends: giving it back needs all ranks at once.
    Group(int32_t device, int64_t num_bytes, std::vector<std::string> hosts);
    // Rank `rank` of a group whose arenas, `bases`, are all of this process, zeros, and somebody else's: nothing but
    // loads and stores reaches them. For tests.
    Group(int32_t device, int64_t num_bytes, int32_t rank, std::vector<char*> bases);
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    int32_t rank() const { return rank_; }
    int32_t world() const { return world_; }
    int64_t num_bytes() const { return num_bytes_; }
    char* base() const { return base_; }
    // The arena of `peer` where loads and stores reach it; nullptr: only puts do.
    char* direct(int32_t peer) const;
    // A group of this rank alone, for kernels on `channel`: peers are reached by put(), or where they are mapped.
    // Throws std::invalid_argument if there is no such channel.
    GroupView view(int32_t channel, uint64_t timeout_ns) const;

    // What the kernels said; code kOk if nothing. Its slot, step and host, is good until the next call. Reading it lets
    // a kernel that gave up end.
    Status status() const;
    void acknowledge();
    // Ends every wait of this rank's kernels with `code`.
    void abort(Code code);

  private:
    void make_record();

    int32_t rank_, world_;
    int64_t num_bytes_;
    std::vector<std::string> hosts_;
    std::vector<char*> bases_;  // of all ranks, where they are of one process
    mutable std::string slot_;  // what status() points to
    char* base_ = nullptr;
    Record* record_ = nullptr;         // host address
    Record* device_record_ = nullptr;  // the same for kernels
    int32_t maker_;                    // pid of the process that made it
};

}  // namespace weave::fabric::nvshmem
