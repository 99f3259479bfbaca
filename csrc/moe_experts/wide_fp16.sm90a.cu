#include "moe_experts/launch_wide.cuh"

namespace weave::moe_experts {

int enqueue_wide_fp16(const Work& work, Product product, int32_t num_ctas, void* stream) {
    return launch_wide<__half>(work, product, num_ctas, stream);
}

}  // namespace weave::moe_experts
