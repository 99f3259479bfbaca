// Who sends what to whom, in which order, in an all-reduce between hosts that are connected in pairs: plain data.
//
// Every host holds rows, divided into parts. Recursive doubling (NVRAR, Algorithm 1) exchanges all rows with the host
// whose number differs in bit 0, then in bit 1, and so on: log2 steps, each as long as the message. Recursive halving
// exchanges halves, quarters, ... of the rows, which leaves every host with the sum of one part; doubling then hands
// the finished sums out: twice as many steps, and each row is sent but three times. Both need a power of two: of the
// hosts beyond the last one below, each gives its rows to a partner first, and gets the finished sums in the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace weave::hosts {

enum class Exchange : int32_t {
    kOneShot = 0,   // partial results to every host, which computes all rows
    kTwoShot = 1,   // partial results to the host that computes their rows, and its sums to every host
    kDoubling = 2,  // sums of more and more hosts, all rows
    kHalving = 3,   // sums of more and more hosts, fewer and fewer rows; then finished sums
};

// Parts [begin, end) of a host's rows.
struct Parts {
    int32_t begin = 0, end = 0;
    bool empty() const { return begin == end; }
};

// A message to one host, and one from it; either may be of no parts, which is no message.
struct Step {
    int32_t peer;
    bool is_finished;  // finished sums, to be kept as they are; else sums to be added to one's own
    Parts sent, received;
};

// Parts that the rows are divided into.
int32_t num_parts(Exchange exchange, int32_t hosts);

// The steps of `host`, sums to be added first. Of kDoubling and kHalving; for the direct ones none.
std::vector<Step> schedule(Exchange exchange, int32_t host, int32_t hosts);

// The parts whose sums `host` finishes itself, after its last step that adds; none where it only gets them.
Parts finishes(Exchange exchange, int32_t host, int32_t hosts);

// Whether what is sent at `steps[index]` is what the host began with.
bool is_untouched(const std::vector<Step>& steps, std::size_t index);

// The hosts that `host` exchanges messages with, ascending.
std::vector<int32_t> peers(Exchange exchange, int32_t host, int32_t hosts);

}  // namespace weave::hosts
