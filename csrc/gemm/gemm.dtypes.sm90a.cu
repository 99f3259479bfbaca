#include "gemm/gemm.cuh"

namespace weave::gemm {

template <typename T>
int enqueue_gemm(const Work& work, int32_t tile_columns, int32_t num_ctas, void* stream) {
    if (tile_columns == 256) return enqueue<256>(compute<T, 256>, work, num_ctas, stream);
    if (tile_columns == 160) return enqueue<160>(compute<T, 160>, work, num_ctas, stream);
    if (tile_columns == 128) return enqueue<128>(compute<T, 128>, work, num_ctas, stream);
    return cudaErrorInvalidValue;
}

template int enqueue_gemm<WEAVE_ELEMENT>(const Work& work, int32_t tile_columns, int32_t num_ctas, void* stream);

}  // namespace weave::gemm
