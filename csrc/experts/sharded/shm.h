// Mixtures whose tokens are sharded, over shared memory: rows go to the ranks of their experts, results are returned to
// the combine buffer. Meaning and arguments: weaveopt/ops/experts/sharded/op.py.
//
// A call of epoch e, on every rank:
//
//   enter -> dispatch -> [collect -> gather -> (the experts, elsewhere) -> return_results] for each batch -> finish
//
// Memory order:
//
//   header, routes, rows of a slot
//     store   the source, plain, in the owner's memory
//     fence   release, in signal(ready)
//     flag    ready of the source
//     wait    the owner: acquire, in wait(ready)
//     reader  the owner, in collect() and gather()
//     again   in the next call of any site: the source has the owner's `rows` of this epoch by then, which the owner
//             signals after its last gather(). Every call waits for `rows` of every peer, the abandoned ones too
//   combine rows
//     store   the owners of the experts, plain, in the memory of the tokens' rank, after its `ready` of this epoch
//     fence   release, in signal(rows)
//     flag    rows of the owner
//     wait    the tokens' rank: acquire, in wait(rows) of every peer
//     reader  the tokens' rank, in finish()
//     again   after its `ready` of the next such call, which it signals when it has read them
//
// Both buffers are where no other family's calls have theirs, so a call needs no barrier whatever ran before it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "experts/sharded/layout.h"
#include "fabric/shm.h"
#include "rows/rows.h"

namespace weave::moe {

// What is constant over the calls of a site; equal on all ranks.
struct Site {
    uint32_t tag = 0;
    int64_t dispatch_offset = 0;
    int64_t combine_offset = 0;
    int64_t max_tokens = 0;   // of a rank
    int64_t choices = 0;      // of a token
    int64_t num_experts = 0;  // of a rank
    int64_t hidden = 0;
    DType dtype = DType::kFloat32;
    double timeout_s = 120;
};

// Rows that this rank has sent to others since it was bound.
struct Traffic {
    int64_t dispatched = 0;
    int64_t returned = 0;
};

class ShardedMixture {
  public:
    // Throws std::invalid_argument if the buffers are not inside a segment of `data_bytes`.
    ShardedMixture(fabric::shm::Group& group, const Site& site, int64_t data_bytes, const RowFunctions& functions);

    fabric::shm::Group& group() const { return group_; }
    const Site& site() const { return site_; }
    const Traffic& traffic() const { return traffic_; }

    // Takes the group for a call.
    Status enter();
    // Pushes `x` [tokens, hidden] to the ranks of the experts that `experts` [tokens, choices] names, one row for each
    // of a token's destinations, and begins the epoch. Ids of no rank's experts have no destination. Both are read
    // again until the end of the call. With more tokens than were planned for nothing but their number is pushed.
    void dispatch(const void* x, const int64_t* experts, int64_t tokens, int32_t num_threads);
    // Waits for the ranks `first` to `last` steps after this one (0: itself) and sorts their routes by expert; the
    // same order in every run. `num_routes` is kOverflow where one of them has more tokens than were planned for.
    Status collect(int32_t first, int32_t last, int64_t& num_routes);
    static constexpr int64_t kOverflow = -1;
    // The rows of the collected routes [num_routes, hidden], and the experts that they go to.
    void gather(void* rows, int64_t* experts, int32_t num_threads) const;
    // What the experts made of them: to the ranks that they came from.
    void return_results(const void* results, int32_t num_threads);
    // out[t] = sum over choices, in their order, of weights[t][choice] * result, in fp32 and rounded once. Choices
    // without a destination add nothing. Gives the group back.
    Status finish(const float* weights, void* out, int32_t num_threads);
    // Ends a call in which some rank has too many tokens, on all ranks, and gives the group back.
    Status end_without_results();
    int64_t num_tokens() const { return tokens_; }
    int64_t num_collected() const { return static_cast<int64_t>(sorted_.size()); }
    bool is_dispatched() const { return is_dispatched_; }

  private:
    struct Sorted {
        const char* row;
        char* combine;
        int64_t expert;
        int32_t source;
    };
    struct Copy {
        char* to;
        int64_t token;
    };
    char* slot(int32_t owner, int32_t source) const {
        return group_.data(owner) + site_.dispatch_offset + layout_.slot(owner, source);
    }
    SlotHeader& header(int32_t owner, int32_t source) const {
        return *reinterpret_cast<SlotHeader*>(slot(owner, source));
    }
    uint64_t tag() const { return fabric::shm::tag(site_.tag, 0); }
    bool is_nobodys(int64_t expert) const { return expert < 0 || expert >= site_.num_experts * group_.world(); }
    void route(int64_t tokens);
    void add(int32_t source, const Route* routes, int64_t count, const char* rows);
    Status wait_results();

    fabric::shm::Group& group_;
    const Site site_;
    const Layout layout_;
    const int64_t row_bytes_;
    const RowFunctions& functions_;
    Traffic traffic_;

    // Of the call that runs.
    const char* x_ = nullptr;
    const int64_t* experts_ = nullptr;
    int64_t tokens_ = 0;
    bool is_dispatched_ = false;
    std::vector<Route> own_routes_;
    std::vector<Copy> copies_;
    std::vector<int64_t> last_token_;  // by destination
    std::vector<Sorted> unsorted_, sorted_;
    std::vector<int64_t> begins_;  // by expert
};

}  // namespace weave::moe
