// all_reduce_norm on GPUs of one host: what a call is, and the kernels that run it. Meaning and arguments:
// weaveopt/ops/all_reduce_norm.py.
#pragma once

#include <cstdint>

#include "all_reduce_norm/rows.h"
#include "base/dtype.h"
#include "base/host_device.h"
#include "fabric/peer.h"

namespace weave::gpu {

// How the ranks' rows meet.
enum class Form : int32_t {
    // Rows go to peers' mailboxes as words that carry their own arrival: no barrier, no flag. Every rank computes all.
    kMailOneShot = 0,
    // The same in two steps: partial rows to their owners, finished rows to everyone.
    kMailTwoShot = 1,
    // Two steps of bulk copies (TMA) through shared memory, with a signal behind each: few CTAs fill the link.
    kBulk = 2,
    // Owners read all ranks' partial rows where they are (reduce_load) and write finished rows everywhere
    // (broadcast_store); two signals. On NVLink multicast the switch sums and copies.
    kDirect = 3,
};

enum class OutKind : int32_t { kSame = 0, kFloat32 = 1, kFp8 = 2 };

// Of one element of normed.
inline int32_t out_bytes_of(OutKind kind, DType dtype) {
    if (kind == OutKind::kSame) return static_cast<int32_t>(size_of(dtype));
    return kind == OutKind::kFloat32 ? 4 : 1;
}

// Of normed: e4m3 needs a scale, one for all rows given in advance, or one a row made from its largest value.
enum class QuantKind : int32_t { kNone = 0, kStatic = 1, kPerToken = 2 };

// A vector of `hidden` values, or one value; nullptr: there is none.
struct Parameter {
    const void* data;
    int32_t is_fp32;  // else of the activations' type
};

// A norm as kernels take it; weight and bias are read from memory in every call.
struct GpuNorm {
    NormForm form;
    Parameter weight;
    Parameter bias;
};

// Everything a kernel needs, by value. Rows are `hidden` elements, contiguous.
struct Call {
    char* base[fabric::kMaxWorld];  // every rank's arena
    char* multicast;                // all of them at once
    fabric::Record* record;
    fabric::Regions regions;
    int32_t world;
    int32_t rank;
    int32_t tokens;
    int32_t hidden;
    uint64_t timeout_ns;
    uint32_t tag;  // equal on all ranks if they run the same
    OutKind out_kind;
    QuantKind quant;
    const void* partial;  // [tokens, hidden]; for kDirect it lies in the arena at `partial_offset`
    int64_t partial_offset;
    const void* residual;  // nullptr: none
    void* normed;          // nullptr: not wanted; kBulk may write to the output region itself
    void* sum;             // nullptr: not wanted
    void* row_scale;       // fp32 [tokens], kPerToken only
    int32_t sum_whole;     // every rank needs every row of sum; else only its own rows after two steps
    float scale;
    Parameter scale_value;  // multiplied with `scale`
    Parameter quant_scale;  // kStatic: what a value of 1 in e4m3 stands for
    Parameter reduced_bias;
    GpuNorm post;
    GpuNorm norm;

    // Filled by run(): where each rank's share of the token rows begins, and the rows of the largest share.
    int32_t begin[fabric::kMaxWorld + 1];
    int32_t share;
};

// Where and how a kernel runs.
struct Launch {
    Form form;
    DType dtype;
    int32_t num_ctas;  // 0: as many as fit
    void* stream;
};

// Whether `device` can run the form for such rows: a line that says why not, or an empty one.
const char* unsupported(Form form, DType dtype, int64_t hidden, int32_t world, bool fp8, int32_t device);
const char* mail_unsupported(DType dtype, int64_t hidden, int32_t device);
const char* bulk_unsupported(DType dtype, int64_t hidden, bool fp8, int32_t device);
const char* direct_unsupported(DType dtype, int64_t hidden);

// Enqueues the call. Returns a CUDA error code; 0 is success. Runs nothing for 0 tokens.
int run(const Call& call, const Launch& launch);

int run_mail(const Call& call, const Launch& launch);
int run_bulk(const Call& call, const Launch& launch);
int run_direct_peer(const Call& call, const Launch& launch);
int run_direct_multimem(const Call& call, const Launch& launch);

}  // namespace weave::gpu
