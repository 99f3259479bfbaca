// The kernels of recursive doubling over NVSHMEM between hosts of one rank, and the entry for all.
#include "reduction/hosts/launch_doubling.cuh"

namespace weave::hosts {

const char* doubling_unsupported(DType dtype, int64_t hidden, int32_t device) {
    if (hidden < 8 || hidden % 8 != 0) return "rows need a multiple of 8 elements";
    if (hidden * size_of(dtype) / 16 > int64_t{kMostThreads} * kMostVecs) return "rows are too long for one CTA";
    // All kernels of this module were compiled for the same architectures: one of them stands for the others.
    using Any = By<Transfer::kPacket, NoPuts, false>;
    const bool missing = fabric::code_of<host_doubling<float, 1, false, Any>>(device) == KernelCode::kMissing;
    return missing ? "the kernels between hosts were not built for this GPU" : "";
}

int run_doubling(const Call& call, const Doubling& exchange, Transfer transfer, const Launch& launch) {
    if (call.tokens == 0) return cudaSuccess;
    if (!fits(exchange, transfer, call.tokens, call.hidden)) return cudaErrorInvalidValue;
    if (exchange.num_of_host > 1) return run_doubling_of_several(call, exchange, transfer, launch);
    return with_dtype<false>(call, exchange, transfer, launch);
}

}  // namespace weave::hosts
