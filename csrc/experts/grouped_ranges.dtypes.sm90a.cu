#include "experts/launch.cuh"

namespace weave::moe_experts {

template int launch_product<WEAVE_ELEMENT>(const RangedWork& work, Product product, bool transposed, int32_t num_ctas,
                                           void* stream);

}  // namespace weave::moe_experts
