#include "gemm/gemm.cuh"

namespace weave::gemm {

int enqueue_fp16(const Work& work, int32_t tile_columns, int32_t num_ctas, void* stream) {
    if (tile_columns == 256) return enqueue<256>(compute<__half, 256>, work, num_ctas, stream);
    if (tile_columns == 160) return enqueue<160>(compute<__half, 160>, work, num_ctas, stream);
    if (tile_columns == 128) return enqueue<128>(compute<__half, 128>, work, num_ctas, stream);
    return cudaErrorInvalidValue;
}

}  // namespace weave::gemm
