#include "experts/launch_both.cuh"

namespace weave::moe_experts {

template int launch_both<WEAVE_ELEMENT>(const BothWork& work, Product first, bool transposed, int32_t num_ctas,
                                        void* stream);

}  // namespace weave::moe_experts
