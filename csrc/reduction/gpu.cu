// The entry to the GPU kernels of all_reduce_norm.
#include <cuda_runtime.h>

#include "reduction/gpu.h"
#include "reduction/layout.h"

namespace weave::gpu {

const char* unsupported(GpuKernel kernel, DType dtype, int64_t hidden, int32_t world, bool fp8, int32_t device) {
    if (world < 2 || world > fabric::kMaxWorld) return "the kernels join 2 to 8 ranks";
    if (hidden % 8 != 0) return "rows need a multiple of 8 elements";
    switch (kernel) {
        case GpuKernel::kLLPacketOneShot:
        case GpuKernel::kLLPacketTwoShot:
            return ll_packet_unsupported(dtype, hidden, device);
        case GpuKernel::kBulk:
            return bulk_unsupported(dtype, hidden, fp8, device);
        case GpuKernel::kDirect:
            return direct_unsupported(dtype, hidden);
        case GpuKernel::kPosted:
            return posted_unsupported(dtype, hidden);
    }
    return "";
}

int run(const Call& asked, const Launch& launch) {
    if (asked.tokens == 0) return cudaSuccess;
    Call call = asked;
    for (int32_t rank = 0; rank <= call.group.world; ++rank)
        call.begin[rank] = static_cast<int32_t>(static_cast<int64_t>(call.tokens) * rank / call.group.world);
    call.share = static_cast<int32_t>(share_of(call.tokens, call.group.world));
    switch (launch.kernel) {
        case GpuKernel::kLLPacketOneShot:
        case GpuKernel::kLLPacketTwoShot:
            return run_ll_packet(call, launch);
        case GpuKernel::kBulk:
            return run_bulk(call, launch);
        case GpuKernel::kDirect:
            return call.group.multicast != nullptr ? run_direct_multimem(call, launch) : run_direct_peer(call, launch);
        case GpuKernel::kPosted:
            return run_posted(call, launch);
    }
    return cudaErrorInvalidValue;
}

}  // namespace weave::gpu
