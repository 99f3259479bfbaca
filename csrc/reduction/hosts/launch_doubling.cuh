// The launch of recursive doubling over NVSHMEM, for sources that have its kernels.
#pragma once

#include <algorithm>
#include <type_traits>

#include "fabric/kernel_code.cuh"
#include "fabric/nvshmem.cuh"
#include "reduction/hosts/doubling.cuh"
#include "reduction/hosts/gpu.h"

namespace weave::hosts {

using fabric::KernelCode;
using gpu::Launch;

// How a kernel's rows travel. Code of puts costs registers even where it never runs, so kernels that need none have
// none.
template <Transfer kTransfer, class Remote, bool kSeveralOfHost>
struct By {
    static constexpr bool kFlagged = kTransfer == Transfer::kFlaggedRow, kPuts = Remote::kPuts;
    static constexpr bool kSeveral = kSeveralOfHost;
    template <typename T, int kVecs>
    using Travel =
        std::conditional_t<kTransfer == Transfer::kPacket, PacketRows<T, kVecs, Remote>, FlaggedRows<T, kVecs, Remote>>;
};

// At 64 registers two CTAs of kMostThreads fit an SM. Where a thread holds one vector that costs no spills, but for
// packets of calls of any kind.
template <int kVecs, bool kPlain, class By>
constexpr int kCtasOfSm = kVecs == 1 && !By::kPuts && !By::kSeveral && (kPlain || By::kFlagged) ? 2 : 1;

template <typename T, int kVecs, bool kPlain, class By>
__global__ void __launch_bounds__(kMostThreads, (kCtasOfSm<kVecs, kPlain, By>))
    host_doubling(const __grid_constant__ Call call, const __grid_constant__ Doubling exchange) {
    __shared__ float parts[2][kMostWarps];
    doubling_kernel<T, kVecs, kPlain, By::kSeveral, typename By::template Travel<T, kVecs>>(call, exchange, parts);
}

template <typename T, int kVecs, bool kPlain, class By>
int enqueue(const Call& call, const Doubling& exchange, const Launch& launch, int num_threads) {
    const auto kernel = host_doubling<T, kVecs, kPlain, By>;
    int device = 0, num_sms = 0, per_sm = 0;
    cudaGetDevice(&device);
    const KernelCode code = fabric::code_of<host_doubling<T, kVecs, kPlain, By>>(device);
    if (code == KernelCode::kMissing) return cudaErrorNoKernelImageForDevice;
    // CTAs wait for those of other hosts, which wait for these: all of them must be resident at once.
    struct Fit {
        int device = -1, num_threads = 0, num_ctas = 0;
    };
    thread_local Fit fit;
    if (fit.device != device || fit.num_threads != num_threads) {
        cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
        const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, num_threads, 0);
        if (error != cudaSuccess) return error;
        fit = {device, num_threads, per_sm * num_sms};
    }
    if (fit.num_ctas < 1) return cudaErrorLaunchOutOfResources;
    const int asked = launch.num_ctas > 0 ? std::min(launch.num_ctas, fit.num_ctas) : fit.num_ctas;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = std::min(asked, static_cast<int>(call.tokens));
    config.blockDim = num_threads;
    config.stream = static_cast<cudaStream_t>(launch.stream);
    config.attrs = &attribute;
    config.numAttrs = code == KernelCode::kSm90 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, call, exchange);
}

// As few vectors a thread as the most threads allow: a row is waited for by all of them.
template <typename T, class By, int kVecs = 1>
int with_rows(const Call& call, const Doubling& exchange, const Launch& launch) {
    const int vecs = call.hidden / kElements<T>, num_threads = ((vecs + kVecs - 1) / kVecs + 31) / 32 * 32;
    if (num_threads <= kMostThreads) {
        // Where hosts have several ranks one kernel serves calls of any kind.
        if constexpr (!By::kSeveral)
            if (gpu::is_plain(call)) return enqueue<T, kVecs, true, By>(call, exchange, launch, num_threads);
        return enqueue<T, kVecs, false, By>(call, exchange, launch, num_threads);
    }
    if constexpr (kVecs < kMostVecs) return with_rows<T, By, 2 * kVecs>(call, exchange, launch);
    return cudaErrorInvalidValue;
}

template <typename T, bool kSeveral>
int with_transfer(const Call& call, const Doubling& exchange, Transfer transfer, const Launch& launch) {
    using fabric::NvshmemRemote;
    const HostStep* end = exchange.step + exchange.num_steps;
    const bool puts = std::any_of(exchange.step, end, [](const HostStep& step) { return step.direct == nullptr; });
    if (transfer == Transfer::kPacket) {
        if (puts) return with_rows<T, By<Transfer::kPacket, NvshmemRemote, kSeveral>>(call, exchange, launch);
        return with_rows<T, By<Transfer::kPacket, NoPuts, kSeveral>>(call, exchange, launch);
    }
    if (puts) return with_rows<T, By<Transfer::kFlaggedRow, NvshmemRemote, kSeveral>>(call, exchange, launch);
    return with_rows<T, By<Transfer::kFlaggedRow, NoPuts, kSeveral>>(call, exchange, launch);
}

template <bool kSeveral>
int with_dtype(const Call& call, const Doubling& exchange, Transfer transfer, const Launch& launch) {
    switch (launch.dtype) {
        case DType::kFloat32:
            return with_transfer<float, kSeveral>(call, exchange, transfer, launch);
        case DType::kBFloat16:
            return with_transfer<__nv_bfloat16, kSeveral>(call, exchange, transfer, launch);
        case DType::kFloat16:
            return with_transfer<__half, kSeveral>(call, exchange, transfer, launch);
    }
    return cudaErrorInvalidValue;
}

}  // namespace weave::hosts
