// all_reduce_norm on GPUs of one host: what a call is, and the kernels that run it. Meaning and arguments:
// weaveopt/ops/reduction/op.py.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "fabric/arena.h"
#include "rows/rows.h"

namespace weave::gpu {

// How rows travel between ranks, and in how many steps.
enum class GpuKernel : int32_t {
    // Rows go to peers' mailboxes as LL packets, words that carry their own arrival: no barrier, no flag. Every rank
    // computes all rows.
    kLLPacketOneShot = 0,
    // The same in two steps: partial rows to their owners, finished rows to everyone.
    kLLPacketTwoShot = 1,
    // Two steps of bulk copies (TMA) through shared memory, with a signal after each: few CTAs fill the link.
    kBulk = 2,
    // Owners read all ranks' partial rows where they are (reduce_load) and write finished rows everywhere
    // (broadcast_store); two signals. On NVLink multicast the switch sums and copies.
    kDirect = 3,
    // Two steps of plain stores that only push, with a signal after each unit of rows: for memory of the host, where
    // they are posted writes.
    kPosted = 4,
};

enum class OutKind : int32_t { kSame = 0, kFloat32 = 1, kFp8 = 2 };

// Of one element of normalized.
inline int32_t out_bytes_of(OutKind kind, DType dtype) {
    if (kind == OutKind::kSame) return static_cast<int32_t>(size_of(dtype));
    return kind == OutKind::kFloat32 ? 4 : 1;
}

// Of normalized: e4m3 needs a scale, one for all rows given in advance, or one a row made from its largest value.
enum class QuantKind : int32_t { kNone = 0, kStatic = 1, kPerToken = 2 };

// A vector of `hidden` values, or one value; nullptr: there is none.
struct Parameter {
    const void* data;
    int32_t is_fp32;  // else of the activations' type
};

// A norm as kernels take it; weight and bias are read from memory in every call.
struct GpuNorm {
    NormSpec spec;
    Parameter weight;
    Parameter bias;
};

// Where the buffers of a site begin in every arena, and how large they are. Equal for all sites of a channel, whatever
// each of them needs: with mailboxes of another size the second one would begin inside another site's.
struct Buffers {
    int64_t mailbox_offset;  // of the first of kNumMailboxes, one after the other
    int64_t mailbox_bytes;   // of one
    int64_t staging_offset;
    int64_t staging_bytes;
    int64_t output_offset;
    int64_t output_bytes;
};

// Everything a kernel needs, by value. Rows are `hidden` elements, contiguous.
//
// Kernels read it from the constant cache, in lines of 64 bytes that are cold when a kernel begins: a call of a few
// rows waits for every line it touches. So fields that all calls need come first, and those of one line together.
struct Call {
    fabric::GroupView group;
    const void* partial;  // [tokens, hidden]; for kDirect it is in the arena at `partial_offset`
    int32_t tokens;
    int32_t hidden;
    const void* residual;  // nullptr: none
    void* normalized;      // nullptr: not wanted; kBulk may write to the output buffer itself
    void* sum;             // nullptr: not wanted
    uint32_t site;         // equal on all ranks if they run the same
    int32_t sum_whole;     // every rank needs every row of sum; else only its own rows after two steps
    OutKind out_kind;
    QuantKind quant;
    Buffers buffers;
    GpuNorm norm;
    GpuNorm post;
    float scale;
    Parameter scale_value;  // multiplied with `scale`
    Parameter quant_scale;  // kStatic: what a value of 1 in e4m3 stands for
    Parameter reduced_bias;
    void* row_scale;  // fp32 [tokens], kPerToken only
    int64_t partial_offset;

    // Filled by run(): where each rank's share of the token rows begins, and the rows of the largest share.
    int32_t begin[fabric::kMaxWorld + 1];
    int32_t share;
};

// Where and how a kernel runs.
struct Launch {
    GpuKernel kernel;
    DType dtype;
    int32_t num_ctas;  // 0: as many as fit
    void* stream;
};

// Whether `device` can run the kernel for such rows: a line that says why not, or an empty one.
const char* unsupported(GpuKernel kernel, DType dtype, int64_t hidden, int32_t world, bool fp8, int32_t device);
const char* ll_packet_unsupported(DType dtype, int64_t hidden, int32_t device);
const char* bulk_unsupported(DType dtype, int64_t hidden, bool fp8, int32_t device);
const char* direct_unsupported(DType dtype, int64_t hidden);
const char* posted_unsupported(DType dtype, int64_t hidden);

// Enqueues the call. Returns a CUDA error code; 0 is success. Runs nothing for 0 tokens.
int run(const Call& call, const Launch& launch);

int run_ll_packet(const Call& call, const Launch& launch);
int run_bulk(const Call& call, const Launch& launch);
int run_direct_peer(const Call& call, const Launch& launch);
int run_direct_multimem(const Call& call, const Launch& launch);
int run_posted(const Call& call, const Launch& launch);

}  // namespace weave::gpu
