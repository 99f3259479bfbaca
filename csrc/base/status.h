// What a native call says when it could not finish. A status is a value: native code throws only while binding.
#pragma once

#include <cstdint>

namespace weave {

enum class Code : int32_t {
    kOk = 0,
    kTimeout = 1,       // the peer is alive but did not signal in time
    kPeerExited = 2,    // the peer's process is gone
    kPeerFailed = 3,    // the peer gave up itself (its own wait ended without a signal)
    kSiteMismatch = 4,  // the peer is at another site, or at this one with another token count
    kPoisoned = 5,      // an earlier call of this group failed
    kBusy = 6,          // a second thread entered the same group
    kForked = 7,        // this process was forked from the one that is a rank of the group
    kInterrupted = 8,   // the handler of a signal raised in this process while it waited
    kAbandoned = 9,     // an exception ended the call in this process
};

struct Status {
    Code code = Code::kOk;
    int32_t peer = -1;      // rank in the group
    uint64_t expected = 0;  // epoch waited for
    uint64_t seen = 0;      // epoch last seen
    uint64_t own_tag = 0;   // (site, tokens) of this rank, see tag()
    uint64_t peer_tag = 0;  // the same of the peer, where they differ
    const char* slot = "";  // name of the word waited on

    bool ok() const { return code == Code::kOk; }
};

}  // namespace weave
