// Memory of the GPUs of one host that reach each other (CUDA peer access), and what a kernel that waits in it says when
// it gives up.
//
// Every rank owns one arena of the same layout, mapped by all peers: a header with its words, two mailboxes, the
// staging region and the output region. The three regions have a fixed place for as long as the arena lives, so that no
// two calls ever see the same bytes in two roles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/host_device.h"
#include "base/status.h"

namespace weave::fabric {

constexpr int32_t kMaxWorld = 8;
constexpr int32_t kMaxCtas = 256;
constexpr int32_t kNumMailboxes = 2;

// What the owner's kernels keep from call to call. Nobody else touches it.
struct DeviceState {
    uint64_t num_calls;       // of every kind
    uint32_t num_mail_calls;  // of those that used a mailbox, modulo kNumMailboxes: the mailbox of the next one
    uint32_t num_arrived;     // CTAs of the running kernel that have read this state
    uint32_t failed;
    uint32_t padding;
};

// The first bytes of an arena. All words but `state` are written by peers: [source rank].
struct Header {
    alignas(128) DeviceState state;
    alignas(128) uint64_t tag[2][kMaxWorld];             // what a source runs, by parity of its call: see tag_word()
    alignas(128) uint64_t partial[kMaxWorld][kMaxCtas];  // its partial rows for CTA c have come
    alignas(128) uint64_t rows[kMaxWorld][kMaxCtas];     // its finished rows from CTA c have come
};
constexpr std::size_t kHeaderBytes = 64 << 10;
static_assert(sizeof(Header) <= kHeaderBytes);

// What a rank runs, as one word: the number of the call (16 bits), its tokens and its site (24 bits each). Words of two
// calls that follow one another lie in different slots, so a peer that is a call ahead is not taken for another site.
constexpr int32_t kTagFieldBits = 24;
WEAVE_HOST_DEVICE inline uint64_t tag_word(uint64_t call, int64_t tokens, uint32_t site) {
    constexpr uint64_t kField = (uint64_t{1} << kTagFieldBits) - 1;
    return call << (2 * kTagFieldBits) | (static_cast<uint64_t>(tokens) & kField) << kTagFieldBits | (site & kField);
}

enum class Slot : uint32_t { kTag = 0, kPartial = 1, kRows = 2, kMail = 3 };

// In host memory that kernels write: why they gave up. Only the first one is kept.
struct Record {
    uint32_t code;  // Code, written last
    int32_t peer;
    uint32_t slot;
    uint32_t abort;  // Code, written by the host: waits end with it
    uint64_t expected;
    uint64_t seen;
    uint64_t own_tag;
    uint64_t peer_tag;
    uint32_t acknowledged;  // written by the host
};

// Bytes of the regions; equal on all ranks.
struct Regions {
    int64_t mailbox_bytes = 0;  // of one of the two
    int64_t staging_bytes = 0;
    int64_t output_bytes = 0;

    WEAVE_HOST_DEVICE int64_t mailbox(int32_t index) const {
        return static_cast<int64_t>(kHeaderBytes) + index * mailbox_bytes;
    }
    WEAVE_HOST_DEVICE int64_t staging() const { return mailbox(kNumMailboxes); }
    WEAVE_HOST_DEVICE int64_t output() const { return staging() + staging_bytes; }
    WEAVE_HOST_DEVICE int64_t total() const { return output() + output_bytes; }
};

// What a CUDA error code stands for.
const char* error_text(int code);

// The arenas of a group as this rank's kernels see them.
class PeerGroup {
  public:
    // `bases[r]` is where rank r's arena is mapped here, `multicast` all of them at once (0: not mapped). Clears this
    // rank's arena; peers may write to it once all ranks are through. Throws std::runtime_error on CUDA errors.
    PeerGroup(std::vector<uint64_t> bases, uint64_t multicast, int32_t rank, int32_t device, const Regions& regions);
    ~PeerGroup();
    PeerGroup(const PeerGroup&) = delete;
    PeerGroup& operator=(const PeerGroup&) = delete;

    int32_t world() const { return static_cast<int32_t>(bases_.size()); }
    int32_t rank() const { return rank_; }
    int32_t device() const { return device_; }
    const Regions& regions() const { return regions_; }
    uint64_t base(int32_t rank) const { return bases_[rank]; }
    uint64_t multicast() const { return multicast_; }
    Record* device_record() const { return device_record_; }

    // What the kernels said; code kOk if nothing. Reading it lets a kernel that gave up end.
    Status status() const;
    void acknowledge();
    // Ends every wait of this rank's kernels with `code`.
    void abort(Code code);

  private:
    std::vector<uint64_t> bases_;
    uint64_t multicast_;
    int32_t rank_;
    int32_t device_;
    Regions regions_;
    Record* record_ = nullptr;         // host address
    Record* device_record_ = nullptr;  // the same for kernels
};

}  // namespace weave::fabric
