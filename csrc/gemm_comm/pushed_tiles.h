// All-reduce and norm of a GEMM in the same kernel: tiles go to the owners of their rows as they are finished, and rows
// to everyone as their tiles are complete. Meaning and arguments:
// weaveopt/ops/gemm_comm/all_reduce/op.py.
#pragma once

#include <cstdint>
#include <vector>

#include "fabric/buffer_need.h"
#include "gemm/order.h"
#include "reduction/gpu.h"

namespace weave::gpu {

// The weight of a GEMM, [hidden, k] with k as its fast axis; the stride in elements.
struct Matrix {
    const void* data;
    int64_t stride;
    int64_t k;
};

// A GEMM: `a` [tokens, k] times the transposed weight. k is the fast axis of `a` too.
struct Product {
    const void* a;
    int64_t a_stride;
    Matrix weight;
};

// How a GEMM is divided into tiles.
struct TileConfig {
    int32_t tile_columns;  // 128 or 256
    int32_t group_pairs;   // pairs of panels in a wave group
    int32_t reducer_ctas;  // that compute no tiles: an even number
};

// Who gets normalized rows.
enum class NormalizedRows : int32_t {
    kReplicated = 0,  // every rank gets all of them, through the output buffer: `call.normalized` [tokens, hidden]
    kSharded = 1,     // they stay with their owners: `call.normalized` [own rows, hidden], memory of the caller
};

// Whether `device` can run it: a line that says why not, or an empty one.
const char* pushed_tiles_unsupported(DType dtype, int64_t hidden, int64_t k, int32_t world, int32_t device);

// Elements of the longest row.
constexpr int64_t kMostProductHidden = 8192;

// Bytes of the staging buffer: partial rows of all ranks, this one included, for the rows that a rank owns.
int64_t pushed_tiles_staging_bytes(int64_t tokens, int64_t hidden, DType dtype, int32_t world);

// What calls of up to `tokens` tokens need of an arena: the staging buffer, and an output buffer as that of bulk
// copies.
std::vector<fabric::BufferNeed> pushed_tiles_needs(int64_t tokens, int64_t hidden, DType dtype, int32_t world);

// The most tokens of a call: an owner has at most kMaxCtas panels.
int64_t pushed_tiles_most_tokens(int32_t world);

// Which tile of a call comes when.
gemm::TileOrder pushed_tiles_order(int64_t tokens, int64_t hidden, const TileConfig& tiles, int32_t rank,
                                   int32_t world);

// Clusters of a GPU of `num_sms` SMs that compute tiles; its other ones only finish rows.
int32_t pushed_tiles_clusters(const TileConfig& tiles, int32_t num_sms);

// How many tiles the clusters that compute most of them compute, one after the other.
int32_t pushed_tiles_waves(int64_t tokens, int64_t hidden, int32_t tile_columns, int32_t reducer_ctas, int32_t world,
                           int32_t num_sms);

// Enqueues the call; `call.partial` is not used, nor an output buffer where no rows are returned. RMS norm or none,
// in the activations' type, no second norm; an unsharded sum only together with rows that every rank gets.
// Of `call.residual`, and of a sum that stays sharded, only this rank's rows are touched, counted from the group's
// first one. Returns a CUDA error code; 0 is success. Runs nothing for 0 tokens.
int run_pushed_tiles(const Call& call, const Product& product, const TileConfig& tiles, NormalizedRows rows,
                     DType dtype, void* stream);

}  // namespace weave::gpu
