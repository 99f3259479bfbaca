// all_reduce_norm among the CPU ranks of several hosts: shared memory within a host, TCP between hosts.
//
// Rank l of host h takes the share l of the rows (of as many as a host has ranks), and there
//   one-shot  sends the partial results of its host's ranks to rank l of every other host, and computes the whole share
//   two-shot  sends each host the part of the share that it computes, and then the finished sums of its own part
// Partial results travel as they are and are summed in the order of the ranks, in fp32: the result is, bit for bit,
// that of the same ranks on one host, and the same on all of them. Normalized rows never travel between hosts: a host
// makes them of the sums. In the end ranks of a host hand their shares to each other (NVRAR, 4.1, with the reduction at
// the end of the way in place of one at each step).
#pragma once

#include <cstdint>
#include <vector>

#include "all_reduce_norm/shm.h"
#include "fabric/tcp.h"

namespace weave {

// Where the ranks of a group are.
struct HostMap {
    int32_t host = 0;
    // By host, in the order of the group's ranks: [host][rank on the host]. All hosts have equally many.
    std::vector<std::vector<int32_t>> ranks;

    int32_t num_hosts() const { return static_cast<int32_t>(ranks.size()); }
    int32_t world() const { return num_hosts() * static_cast<int32_t>(ranks.at(0).size()); }
};

class AllReduceNormOfHosts : public AllReduceNorm {
  public:
    // `local`: the ranks of this host. `wire`: rank l of every host, by host.
    AllReduceNormOfHosts(fabric::shm::Group& local, fabric::tcp::Group& wire, HostMap map,
                         const AllReduceNormSite& site, int32_t max_threads,
                         const RowFunctions& functions = choose_rows());

    // Of the last failure, its peer a rank of the whole group.
    const Status& status() const { return status_; }

  protected:
    Status exchange(int64_t tokens, const Rows& rows, int32_t num_threads) override;

  private:
    // Rows of `share` that `host` computes.
    Share part(const Share& share, int32_t host) const;
    Status between_hosts(const Share& share, bool one_shot, const Rows& local, const Rows& all, int32_t num_threads);
    Status kept(Status status, bool is_wire);

    fabric::tcp::Group& wire_;
    HostMap map_;
    std::vector<const void*> partials_of_all_;
    std::vector<char> received_;
    std::vector<char> sums_;
    Status status_;
};

}  // namespace weave
