// all_reduce_norm among the CPU ranks of several hosts: shared memory within a host, TCP between hosts (NVRAR, 4.1).
//
// Rank l of host h takes the share l of the rows (of as many as a host has ranks), and exchanges it with rank l of
// other hosts. What travels, by the exchange that the site's table names for the token count:
//
//   one-shot  partial results of all of a host's ranks, as they are, to every host, which computes the whole share
//   two-shot  the same to the host that computes those rows, and then its finished sums to every host
//   doubling  sums of the hosts so far, in fp32, to one host a step (schedule.h); as they are, where a host has one
//   rank
//             and adds nothing before it sends
//   halving   the same with half as many rows every step, then finished sums
//
// With the direct ones a row is summed in the order of the ranks, where it is computed: bit for bit the result of the
// same ranks on one host. With the recursive ones sums of two halves of the hosts are added, in fp32 and never rounded
// in between; a sum of two does not depend on their order, so all hosts get the same bits. Normalized rows never travel
// between hosts: a host makes them of the sums. In the end ranks of a host exchange their shares.
//
// Buffers of one rank, in addition to the arena: what comes from other hosts lands in a buffer of its own for every
// message of a call, and sums are made there, so that nothing is written while it is still being sent.
#pragma once

#include <cstdint>
#include <vector>

#include "fabric/tcp.h"
#include "reduction/hosts/schedule.h"
#include "reduction/shm.h"

namespace weave::hosts {

// Where the ranks of a group are.
struct HostMap {
    int32_t host = 0;
    // By host, in the order of the group's ranks: [host][rank on the host]. All hosts have equally many.
    std::vector<std::vector<int32_t>> ranks;

    int32_t num_hosts() const { return static_cast<int32_t>(ranks.size()); }
    int32_t world() const { return num_hosts() * static_cast<int32_t>(ranks.at(0).size()); }
};

// How calls of up to `max_tokens` tokens are exchanged.
struct TableRow {
    int64_t max_tokens;
    Exchange exchange;
};

// By token count, ascending; the last row serves what is beyond it. Equal on all ranks.
using Table = std::vector<TableRow>;

class AllReduceNormOfHosts : public AllReduceNorm {
  public:
    // `local`: the ranks of this host. `wire`: rank l of every host, by host.
    AllReduceNormOfHosts(fabric::shm::Group& local, fabric::tcp::Group& wire, HostMap map, Table table,
                         const AllReduceNormSite& site, int32_t max_threads,
                         const RowFunctions& functions = choose_rows());

    // Of the last failure, its peer a rank of the whole group.
    const Status& status() const { return status_; }

    // Of this rank's memory, the arena not counted: what messages need.
    int64_t message_bytes() const;

  protected:
    Status exchange(int64_t tokens, const Rows& rows, int32_t num_threads) override;

  private:
    // Rows of this rank and where they are: row r at data + r * hidden elements.
    struct Source {
        const void* data;
        DType dtype;
    };
    // A recursive exchange in flight.
    struct Progress;

    // Rows of `share` that `host` computes.
    Share part(const Share& share, int32_t host) const;
    Exchange chosen(int64_t tokens) const;
    Status direct(const Share& share, bool one_shot, const Rows& local, const Rows& all, int32_t num_threads);
    Status recursive(const Share& share, Exchange exchange, const Rows& local, const Rows& all, int32_t num_threads);
    // As far as what has arrived allows.
    void advance(Progress& progress);
    // Finishes rows whose sums over ranks are at `total`, or, without, in order at all.partials.
    void finish(const Rows& all, const float* total, const Share& rows, int32_t num_threads);
    // Normalizes rows of finished sums that came from other hosts.
    void normalize(const Rows& all, const Share& rows, int32_t num_threads);
    Share rows_of(const Share& share, const Parts& parts, int32_t num_parts) const;
    Status kept(Status status, bool is_wire);

    fabric::tcp::Group& wire_;
    HostMap map_;
    Table table_;
    std::vector<const void*> partials_of_all_;
    std::vector<char> received_;  // partial results, as they are
    std::vector<float> wide_;     // fp32 sums: of this host's ranks, then one for every message
    std::vector<char> sums_;
    Status status_;
};

}  // namespace weave::hosts
