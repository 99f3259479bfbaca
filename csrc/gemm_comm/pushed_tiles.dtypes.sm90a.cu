#include "gemm_comm/pushed_tiles.cuh"

namespace weave::gpu {

template <typename T>
int enqueue_pushed_tiles(const PushedTiles& given, int32_t tile_columns, int32_t num_ctas, void* stream) {
    if (tile_columns == 256) return gemm::enqueue<256>(push_tiles<T, 256>, given, num_ctas, stream);
    if (tile_columns == 128) return gemm::enqueue<128>(push_tiles<T, 128>, given, num_ctas, stream);
    return cudaErrorInvalidValue;
}

template int enqueue_pushed_tiles<WEAVE_ELEMENT>(const PushedTiles& given, int32_t tile_columns, int32_t num_ctas,
                                                 void* stream);

}  // namespace weave::gpu
