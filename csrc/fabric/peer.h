// The arenas of a group of GPUs of one host that reach each other (CUDA peer access), and what a kernel that waits in
// them says when it gives up. It is independent of operations' buffers: those are offsets into the arena, set by the
// plan.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "fabric/arena.h"

namespace weave::fabric {

// Words to write once, before any call: `num_bytes` from `offset` on.
struct Fill {
    int64_t offset;
    int64_t num_bytes;
    uint32_t word;
};

// What a CUDA error code stands for.
const char* error_text(int code);

// Whether this build has kernels that `device` can run, as machine code or as PTX.
bool has_code(int32_t device);

class PeerGroup {
  public:
    // `bases[r]` is where rank r's arena of `num_bytes` is mapped here, `multicast` all of them at once (0: not
    // mapped). Clears this rank's header and writes its `fills`; peers may write to the arena once all ranks are
    // through. Throws std::runtime_error for fills that do not fit, and on CUDA errors.
    PeerGroup(std::vector<uint64_t> bases, uint64_t multicast, int32_t rank, int32_t device, int64_t num_bytes,
              const std::vector<Fill>& fills);
    ~PeerGroup();
    PeerGroup(const PeerGroup&) = delete;
    PeerGroup& operator=(const PeerGroup&) = delete;

    int32_t world() const { return static_cast<int32_t>(bases_.size()); }
    int64_t num_bytes() const { return num_bytes_; }
    // The group as kernels on `channel` see it. Throws std::invalid_argument if there is no such channel.
    GroupView view(int32_t channel, uint64_t timeout_ns) const;

    // What the kernels said; code kOk if nothing. Reading it lets a kernel that gave up end.
    Status status() const;
    void acknowledge();
    // Ends every wait of this rank's kernels with `code`.
    void abort(Code code);
    // Before the arena is given back: peers are no longer signalled that a kernel of this process gave up.
    void retire();

  protected:
    // The same of arenas that are cleared and filled already. `own`: where the rank keeps what only its kernels touch;
    // nullptr: in its arena.
    PeerGroup(std::vector<uint64_t> bases, int32_t rank, int32_t device, int64_t num_bytes, ArenaHeader* own,
              uint64_t multicast = 0);

  private:
    uint64_t lost_peer_of(int32_t peer) const;

    std::vector<uint64_t> bases_;
    uint64_t multicast_;
    int32_t rank_;
    int64_t num_bytes_;
    ArenaHeader* own_;
    Record* record_ = nullptr;         // host address
    Record* device_record_ = nullptr;  // the same for kernels
    Peers* peers_ = nullptr;           // of this device: that its kernels signal when they give up
    int32_t maker_;                    // pid of the process that made it
};

}  // namespace weave::fabric
