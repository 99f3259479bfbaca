// The entry to the kernel that computes the product itself.
#include <cuda_runtime.h>

#include "gemm/gemm.h"
#include "gemm/tensor_map.h"
#include "gemm_comm/pushed_tiles.cuh"

namespace weave::gpu {
namespace {

static_assert(kMostProductHidden == kMostRowBytes / 2, "what a team holds of a row");

int64_t slot_bytes(int64_t tokens, int64_t hidden, DType dtype, int32_t world) {
    return share_of(tokens, world) * hidden * size_of(dtype);
}

// What teams know to make of a row.
bool takes(const Call& call) {
    return call.post.spec.kind == NormKind::kNone && call.norm.spec.kind != NormKind::kLayer &&
           call.norm.bias.data == nullptr && call.out_kind == OutKind::kSame && call.quant == QuantKind::kNone;
}

int make_maps(PushedTiles& given, const Product& product, const TileConfig& tiles, DType dtype) {
    const Call& call = given.call;
    gemm::Work& work = given.work;
    int error =
        gemm::make_map(work.a, product.a, dtype, call.tokens, product.weight.k, product.a_stride, gemm::kPanelRows);
    if (error == 0)
        error = gemm::make_map(work.b, product.weight.data, dtype, call.hidden, product.weight.k, product.weight.stride,
                               tiles.tile_columns / gemm::kClusterCtas);
    for (int32_t owner = 0; owner < call.group.world && error == 0; ++owner) {
        const int32_t rows = call.begin[owner + 1] - call.begin[owner];
        if (rows == 0) continue;
        const char* slot = call.group.base[owner] + call.buffers.staging_offset + call.group.rank * given.slot_bytes;
        error = gemm::make_map(work.c[owner], slot, dtype, rows, call.hidden, call.hidden, gemm::kConsumerRows);
    }
    return error;
}

}  // namespace

const char* pushed_tiles_unsupported(DType dtype, int64_t hidden, int64_t k, int32_t world, int32_t device) {
    if (world < 2 || world > fabric::kMaxWorld) return "the kernels join 2 to 8 ranks";
    if (hidden > kMostProductHidden) return "rows are too long for the kernel that computes the product";
    return gemm::unsupported(dtype, hidden, k, device);
}

int run_pushed_tiles(const Call& asked, const Product& product, const TileConfig& tiles, NormalizedRows rows,
                     DType dtype, void* stream) {
    if (asked.tokens == 0) return cudaSuccess;
    const int32_t world = asked.group.world;
    if (asked.tokens > pushed_tiles_most_tokens(world) || asked.hidden > kMostProductHidden || product.weight.k < 1)
        return cudaErrorInvalidValue;
    const bool sharded = rows == NormalizedRows::kSharded;
    if (!takes(asked) || (sharded && asked.sum_whole != 0)) return cudaErrorInvalidValue;
    PushedTiles given{};
    given.call = asked;
    given.rows = rows;
    Call& call = given.call;
    for (int32_t rank = 0; rank <= world; ++rank)
        call.begin[rank] = static_cast<int32_t>(static_cast<int64_t>(call.tokens) * rank / world);
    call.share = static_cast<int32_t>(share_of(call.tokens, world));
    given.layout = output_layout(row_kind(call, dtype), call.tokens);
    given.slot_bytes = slot_bytes(call.tokens, call.hidden, dtype, world);
    const bool hands_out = (call.normalized != nullptr && !sharded) || call.sum_whole != 0;
    if (hands_out && given.layout.num_bytes > call.buffers.output_bytes) return cudaErrorInvalidValue;
    if (given.slot_bytes * world > call.buffers.staging_bytes) return cudaErrorInvalidValue;

    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    given.work.order = pushed_tiles_order(call.tokens, call.hidden, tiles, call.group.rank, world);
    given.work.k_blocks = gemm::ceiling(product.weight.k, gemm::kBlockK);
    // Rows wait for tiles of their own grid: all CTAs must be resident at once, which is one on each SM.
    const int32_t num_ctas = num_sms / gemm::kClusterCtas * gemm::kClusterCtas;
    given.work.num_clusters = pushed_tiles_clusters(tiles, num_sms);
    const int error = make_maps(given, product, tiles, dtype);
    if (error != 0) return error;
    if (dtype == DType::kBFloat16)
        return enqueue_pushed_tiles<__nv_bfloat16>(given, tiles.tile_columns, num_ctas, stream);
    if (dtype == DType::kFloat16) return enqueue_pushed_tiles<__half>(given, tiles.tile_columns, num_ctas, stream);
    return cudaErrorInvalidValue;
}

}  // namespace weave::gpu
