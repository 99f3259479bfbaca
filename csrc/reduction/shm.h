// all_reduce_norm over shared memory: sum of all ranks' partial results, residual and norms in one pass over the
// tokens. Meaning and arguments: weaveopt/ops/reduction/op.py.
#pragma once

#include <cstdint>
#include <vector>

#include "fabric/buffer_need.h"
#include "fabric/shm.h"
#include "rows/rows.h"

namespace weave {

enum class SumOut : int32_t { kNone = 0, kWhole = 1, kSharded = 2 };

// What is constant over the calls of a site.
struct AllReduceNormSite {
    uint32_t tag = 0;
    int64_t hidden = 0;
    DType dtype = DType::kFloat32;
    DType out_dtype = DType::kFloat32;
    fabric::shm::Layout layout;
    int64_t max_tokens = 0;
    int64_t one_shot_max_tokens = 0;
    NormSpec post;
    NormSpec norm;
    SumOut sum_out = SumOut::kWhole;
    double timeout_s = 120;
};

// Arrays of one call; nullptr where there is none.
struct AllReduceNormArrays {
    const void* partial;  // nullptr: is in the arena already
    const void* residual;
    const void* reduced_bias;
    const void* post_weight;
    const void* post_bias;
    const void* weight;
    const void* bias;
    void* normalized;
    void* sum;
    // Bit i: parameter i of (reduced_bias, post_weight, post_bias, weight, bias) is fp32; else the site's dtype.
    uint32_t fp32_parameters;
    float scale;
};

// A site bound to its group. Owns the scratch memory: a call allocates nothing.
class AllReduceNorm {
  public:
    AllReduceNorm(fabric::shm::Group& group, const AllReduceNormSite& site, int32_t max_threads,
                  const RowFunctions& functions = choose_rows());
    virtual ~AllReduceNorm() = default;

    // Bytes of the output buffer for `max_tokens`: one rank's share of rows, normalized and then sum.
    static int64_t output_bytes(const AllReduceNormSite& site, int32_t world);
    // "partial" (both buffers, one after the other) and "output".
    static std::vector<fabric::BufferNeed> buffer_needs(int64_t max_tokens, int64_t hidden, DType dtype,
                                                        DType out_dtype, int32_t world);

    // Takes the group. Afterwards this rank may write its partial result at partial(), then must call run().
    Status enter(int64_t tokens);
    void* partial() const;
    int32_t next_parity() const { return static_cast<int32_t>((group_.epoch() + 1) & 1); }

    // After enter(): reduces `tokens` rows with up to `num_threads` threads, and gives the group back.
    Status run(int64_t tokens, const AllReduceNormArrays& arrays, int32_t num_threads);

    const AllReduceNormSite& site() const { return site_; }

  protected:
    struct Share {
        int64_t begin, end;
    };
    Share share(int64_t tokens, int32_t rank) const {
        return {tokens * rank / group_.world(), tokens * (rank + 1) / group_.world()};
    }
    static int64_t max_share(const AllReduceNormSite& site, int32_t world);
    Rows rows(const AllReduceNormArrays& arrays);
    // Between signal(ready) and the end of the call.
    virtual Status exchange(int64_t tokens, const Rows& rows, int32_t num_threads);
    Status one_shot(int64_t tokens, const Rows& rows, int32_t num_threads);
    Status two_shot(int64_t tokens, const Rows& rows, int32_t num_threads);
    // This rank's share is in its output buffer: the peers' shares come from theirs.
    Status hand_out(int64_t tokens, const Rows& rows, int32_t num_threads);
    Status wait_all_ready(uint64_t tag);
    void reduce(const Rows& rows, int64_t begin, int64_t end, int32_t num_threads);
    const float* parameter(int32_t index, const void* source, const AllReduceNormArrays& arrays, float offset);
    char* output_normalized(int32_t rank) const { return group_.data(rank) + site_.layout.output_offset; }
    char* output_sum(int32_t rank) const;

    fabric::shm::Group& group_;
    const AllReduceNormSite site_;
    const RowFunctions& functions_;
    int32_t max_threads_;
    std::vector<const void*> partials_;
    std::vector<float> parameters_;  // the five parameter rows in fp32, offsets added
    std::vector<float> scratch_;     // one row a thread
};

}  // namespace weave
