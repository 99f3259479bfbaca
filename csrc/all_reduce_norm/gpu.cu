// The one way into the GPU kernels of all_reduce_norm.
#include <cuda_runtime.h>

#include "all_reduce_norm/gpu.h"

namespace weave::gpu {

const char* unsupported(Form form, DType dtype, int64_t hidden, int32_t world, bool fp8, int32_t device) {
    if (world < 2 || world > fabric::kMaxWorld) return "the kernels join 2 to 8 ranks";
    if (hidden % 8 != 0) return "rows need a multiple of 8 elements";
    switch (form) {
        case Form::kMailOneShot:
        case Form::kMailTwoShot:
            return mail_unsupported(dtype, hidden, device);
        case Form::kBulk:
            return bulk_unsupported(dtype, hidden, fp8, device);
        case Form::kDirect:
            return direct_unsupported(dtype, hidden);
    }
    return "";
}

int run(const Call& asked, const Launch& launch) {
    if (asked.tokens == 0) return cudaSuccess;
    Call call = asked;
    for (int32_t rank = 0; rank <= call.world; ++rank)
        call.begin[rank] = static_cast<int32_t>(static_cast<int64_t>(call.tokens) * rank / call.world);
    call.share = (call.tokens + call.world - 1) / call.world;
    switch (launch.form) {
        case Form::kMailOneShot:
        case Form::kMailTwoShot:
            return run_mail(call, launch);
        case Form::kBulk:
            return run_bulk(call, launch);
        case Form::kDirect:
            return call.multicast != nullptr ? run_direct_multimem(call, launch) : run_direct_peer(call, launch);
    }
    return cudaErrorInvalidValue;
}

}  // namespace weave::gpu
