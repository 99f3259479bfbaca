#include <cuda_runtime.h>

#include <algorithm>

#include "gemm/tensor_map.h"
#include "gemm_comm/all_gather/multiply.cuh"

namespace weave::gpu {
namespace {

int make_maps(GatheredWork& made, const Gather& given, const GatheredProduct& product, const GatherCut& cut,
              DType dtype) {
    gemm::Work& work = made.work;
    const fabric::GroupView& group = given.group;
    const int64_t share = work.order.rows_of(group.rank);
    const char* rows = group.base[group.rank] + given.rows_offset;
    int error = gemm::make_map(work.a, rows, dtype, given.tokens, product.k, product.k, gemm::kPanelRows);
    if (error == 0)
        error = gemm::make_map(made.own_rows, given.shard, dtype, share, product.k, product.k, gemm::kPanelRows);
    if (error == 0)
        error = gemm::make_map(work.b, product.weight, dtype, product.n, product.k, product.weight_stride,
                               cut.tile_columns / gemm::kClusterCtas);
    for (int32_t owner = 0; owner < group.world && error == 0; ++owner) {
        const char* out = static_cast<const char*>(product.out) + work.order.begin[owner] * product.n * size_of(dtype);
        error = gemm::make_map(work.c[owner], out, dtype, share, product.n, product.n, gemm::kConsumerRows,
                               gemm::store_columns(cut.tile_columns));
    }
    return error;
}

}  // namespace

int run_gathered_product(const Gather& given, const GatheredProduct& product, const GatherCut& cut, DType dtype,
                         void* main) {
    const int32_t world = given.group.world;
    if (given.tokens == 0 || product.n == 0) return cudaSuccess;
    const int64_t row_bytes = product.k * size_of(dtype);
    if (given.outer != 1 || product.k < 1 || given.tokens % world != 0 ||
        given.block_bytes != given.tokens / world * row_bytes)
        return cudaErrorInvalidValue;
    GatheredWork made{};
    gemm::TileOrder& order = made.work.order;
    const int32_t share = given.tokens / world;
    for (int32_t owner = 0; owner <= world; ++owner)
        order.begin[owner] = share * owner;
    order.num_owners = world;
    order.rank = given.group.rank;
    order.pairs = gemm::ceiling(share, gemm::kPairRows);
    order.columns = gemm::ceiling(product.n, cut.tile_columns);
    order.group_pairs = std::max(cut.group_pairs, 1);
    order.owner_order = gemm::OwnerOrder::kOwnFirst;
    made.work.bias = product.bias;
    made.work.num_columns = static_cast<int32_t>(product.n);
    made.work.k_blocks = gemm::ceiling(product.k, gemm::kBlockK);
    made.group = given.group;
    made.tokens = given.tokens;
    made.site = given.site;
    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    constexpr int32_t kSpare = kGatherSpareCtas / gemm::kClusterCtas;
    made.work.num_clusters = std::min(std::max(num_sms / gemm::kClusterCtas - kSpare, 1), order.num_tiles());
    const int error = make_maps(made, given, product, cut, dtype);
    if (error != 0) return error;
    const int32_t num_ctas = made.work.num_clusters * gemm::kClusterCtas;
    if (dtype == DType::kBFloat16) return enqueue_gathered<__nv_bfloat16>(made, cut.tile_columns, num_ctas, main);
    if (dtype == DType::kFloat16) return enqueue_gathered<__half>(made, cut.tile_columns, num_ctas, main);
    return cudaErrorInvalidValue;
}

}  // namespace weave::gpu
