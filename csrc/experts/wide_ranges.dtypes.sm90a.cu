#include "experts/launch_wide.cuh"

namespace weave::moe_experts {

template int launch_wide<WEAVE_ELEMENT>(const RangedWork& work, Product product, int32_t num_ctas, void* stream);

}  // namespace weave::moe_experts
