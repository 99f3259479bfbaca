#include "all_reduce_norm/pushed_tiles.cuh"

namespace weave::gpu {

int enqueue_pushed_tiles_bf16(const PushedTiles& given, int32_t tile_columns, int32_t num_ctas, void* stream) {
    if (tile_columns == 256) return gemm::enqueue<256>(push_tiles<__nv_bfloat16, 256>, given, num_ctas, stream);
    if (tile_columns == 128) return gemm::enqueue<128>(push_tiles<__nv_bfloat16, 128>, given, num_ctas, stream);
    return cudaErrorInvalidValue;
}

}  // namespace weave::gpu
