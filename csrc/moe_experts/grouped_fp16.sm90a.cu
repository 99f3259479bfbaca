#include "moe_experts/launch.cuh"

namespace weave::moe_experts {

int enqueue_fp16(const Work& work, Product product, bool transposed, int32_t num_ctas, void* stream) {
    return launch_product<__half>(work, product, transposed, num_ctas, stream);
}

}  // namespace weave::moe_experts
