#include "all_gather_gemm/multiply.cuh"

namespace weave::gpu {

int enqueue_gathered_fp16(const GatheredWork& given, int32_t tile_columns, int32_t num_ctas, void* stream) {
    if (tile_columns == 256) return gemm::enqueue<256>(multiply_gathered<__half, 256>, given, num_ctas, stream);
    if (tile_columns == 160) return gemm::enqueue<160>(multiply_gathered<__half, 160>, given, num_ctas, stream);
    if (tile_columns == 128) return gemm::enqueue<128>(multiply_gathered<__half, 128>, given, num_ctas, stream);
    return cudaErrorInvalidValue;
}

}  // namespace weave::gpu
