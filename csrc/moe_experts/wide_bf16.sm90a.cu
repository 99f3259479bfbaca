#include "moe_experts/launch_wide.cuh"

namespace weave::moe_experts {

int enqueue_wide_bf16(const Work& work, Product product, int32_t num_ctas, void* stream) {
    return launch_wide<__nv_bfloat16>(work, product, num_ctas, stream);
}

}  // namespace weave::moe_experts
