// all_gather_gemm on GPUs: copy engines push every rank's shard into the arenas of all others, while a GEMM begins with
// the rows that are here already. Meaning and arguments: weaveopt/ops/gemm_comm/all_gather/op.py.
//
// A call is, in this order of launches (`main` is the caller's stream, `side` a concurrent one):
//
//   open_gather    main   a barrier of all ranks: after it peers may be written to
//   push_shard     side   after open_gather: a copy to each peer, a signal after each
//   multiply       main   GEMMs that wait for rows as they need them (multiply.h); or
//   await_shards   main   all rows are here; then any kernel may read them
//   hand_out       side   all rows are here; copies them out
//
// and at last `main` waits for `side`. Nothing of the group may be launched on another stream meanwhile.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "fabric/arena.h"

namespace weave::gpu {

// One call, by value. Gathered rows are [outer, world, block], a shard [outer, block].
struct Gather {
    fabric::GroupView group;
    int64_t rows_offset;  // of the gathered rows, in every arena, from its first byte
    int64_t outer;
    int64_t block_bytes;
    const void* shard;
    int32_t tokens;  // of all ranks together
    uint32_t site;   // equal on all ranks if they run the same
};

// Each enqueues and returns a CUDA error code; 0 is success. None is for an empty shard.
int open_gather(const Gather& given, void* main);
int push_shard(const Gather& given, void* side);
// This rank's shard into its own gathered rows.
int keep_shard(const Gather& given, void* main);
int await_shards(const Gather& given, void* main);
// All rows to `to`, those of this rank from its shard; `outer` is 1.
int hand_out(const Gather& given, void* to, void* side);

// Has streams wait for one another.
class Follower {
  public:
    Follower() = default;
    ~Follower();
    Follower(const Follower&) = delete;
    Follower& operator=(const Follower&) = delete;
    // What is launched on `later` from now on waits for what is on `earlier`. Of the current device, always the same.
    int follow(void* earlier, void* later);

  private:
    void* event_ = nullptr;
};

}  // namespace weave::gpu
