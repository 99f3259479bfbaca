#include "gemm_comm/all_gather/multiply.cuh"

namespace weave::gpu {

template <typename T>
int enqueue_gathered(const GatheredWork& given, int32_t tile_columns, int32_t num_ctas, void* stream) {
    if (tile_columns == 256) return gemm::enqueue<256>(multiply_gathered<T, 256>, given, num_ctas, stream);
    if (tile_columns == 160) return gemm::enqueue<160>(multiply_gathered<T, 160>, given, num_ctas, stream);
    if (tile_columns == 128) return gemm::enqueue<128>(multiply_gathered<T, 128>, given, num_ctas, stream);
    return cudaErrorInvalidValue;
}

template int enqueue_gathered<WEAVE_ELEMENT>(const GatheredWork& given, int32_t tile_columns, int32_t num_ctas,
                                             void* stream);

}  // namespace weave::gpu
