// The kernels of recursive doubling over NVSHMEM between hosts of several ranks.
#include "reduction/hosts/launch_doubling.cuh"

namespace weave::hosts {

int run_doubling_of_several(const Call& call, const Doubling& exchange, Transfer transfer, const Launch& launch) {
    return with_dtype<true>(call, exchange, transfer, launch);
}

}  // namespace weave::hosts
