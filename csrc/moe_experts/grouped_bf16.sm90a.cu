#include "moe_experts/launch.cuh"

namespace weave::moe_experts {

int enqueue_bf16(const Work& work, Product product, int32_t num_ctas, void* stream) {
    return launch_product<__nv_bfloat16>(work, product, num_ctas, stream);
}

int enqueue_few_bf16(const Work& work, Product product, int32_t splits, void* stream) {
    return launch_few_product<__nv_bfloat16>(work, product, splits, stream);
}

}  // namespace weave::moe_experts
