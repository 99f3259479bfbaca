#include "moe_experts/launch_both.cuh"

namespace weave::moe_experts {

int enqueue_both_bf16(const BothWork& work, Product first, bool transposed, int32_t num_ctas, void* stream) {
    return launch_both<__nv_bfloat16>(work, first, transposed, num_ctas, stream);
}

}  // namespace weave::moe_experts
