// The direct kernel of all_reduce_norm: owners read all ranks' partial rows where they are, finish them in registers
// and store them to everyone, between two rounds of signals (TokenWeave, section 4.3, where the switch sums and
// copies).
//
// The body is written once over a fabric with two operations, reduce_load and broadcast_store: `peer` does them with
// loads and stores to each rank in turn, `multimem` with one instruction on a multicast address.
//
// Memory order, by what is shared (fence.proxy.alias on multimem only, where the same bytes have two addresses):
//
//   partial rows in every rank's arena
//     store   kernels before this one in the stream
//     fence   griddepcontrol.wait; release, in signal
//     flag    partial[source][CTA]
//     wait    CTA c of each owner, acquire; fence.proxy.alias; __syncthreads
//     again   after this kernel: it ends with `rows` of every peer's CTAs, signalled after they have read
//   finished rows in every rank's output buffer
//     store   CTA c of the owner, broadcast_store
//     fence   fence.proxy.alias; __syncthreads; release, in signal
//     flag    rows[owner][CTA]
//     wait    CTA c of every rank, acquire; fence.proxy.alias; __syncthreads
//     again   in the owner's next call, after `partial` of that call from here: this kernel has ended then
#pragma once

#include <algorithm>

#include "fabric/call.cuh"
#include "fabric/kernel_code.cuh"
#include "reduction/block_team.cuh"
#include "reduction/row.cuh"

namespace weave::gpu {

using fabric::KernelCode;
using fabric::kMaxCtas;
using fabric::Watch;

constexpr int kDirectThreads = 512;
constexpr int kDirectWarps = kDirectThreads / 32;
constexpr int kMostDirectVecs = 8;

template <class Fabric, typename T, int kVecs>
__global__ void __launch_bounds__(kDirectThreads, 1)
    direct(const __grid_constant__ Call call, const __grid_constant__ OutputLayout layout) {
    constexpr int E = kElements<T>;
    __shared__ float parts[2][kDirectWarps];
    const fabric::CallState state = fabric::begin_call<false>(call.group);
    __syncthreads();
    const Watch watch{call.group, fabric::tag_word(state.epoch(), call.tokens, call.site)};
    const uint64_t word = fabric::signal_word(state.epoch(), 1);
    const int peer = threadIdx.x;
    const bool has_peer = peer < call.group.world && peer != call.group.rank;
    fabric::send_tags(watch, state, peer);
    fabric::end_call<false>(watch, state, peer);
    const fabric::Channel* own = call.group.channel(call.group.rank);
    if (has_peer) {
        // The partial rows were written by kernels before this one.
        fabric::signal(&call.group.channel(peer)->partial[call.group.rank][blockIdx.x], word);
        fabric::wait(&own->partial[peer][blockIdx.x], word, watch, peer, fabric::Slot::kPartial);
    }
    Fabric::order_addresses();
    __syncthreads();

    const Lanes lanes{static_cast<int>(threadIdx.x), kDirectThreads, call.hidden / E};
    BlockTeam<kDirectWarps> team{parts};
    for (int32_t row = call.begin[call.group.rank] + blockIdx.x; row < call.begin[call.group.rank + 1];
         row += gridDim.x) {
        float x[kVecs][E];
        Vec16 residual[kVecs];
        const int64_t row_at = static_cast<int64_t>(row) * layout.row_bytes;
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] = 0;
            if (!lanes.has(j)) continue;
            Fabric::template reduce_load<T>(call, call.partial_offset + row_at + lanes.at(j) * 16, x[j]);
            if (call.residual != nullptr)
                residual[j] = fabric::load(static_cast<const char*>(call.residual) + row_at + lanes.at(j) * 16);
        }
        finish_and_hand_out<T>(x, residual, call, layout, lanes, row, team,
                               [&](int64_t at, const auto& piece) { Fabric::broadcast_store(call, at, piece); });
    }
    Fabric::order_addresses();
    __syncthreads();
    if (has_peer) {
        fabric::signal(&call.group.channel(peer)->rows[call.group.rank][blockIdx.x], word);
        fabric::wait(&own->rows[peer][blockIdx.x], word, watch, peer, fabric::Slot::kRows);
    }
    Fabric::order_addresses();
    __syncthreads();
    // What everyone stored here, into the caller's tensors.
    for (int32_t owner = 0; owner < call.group.world; ++owner)
        for (int32_t row = call.begin[owner] + blockIdx.x; row < call.begin[owner + 1]; row += gridDim.x)
            copy_row_out(call, layout, row, threadIdx.x, kDirectThreads);
}

template <class Fabric, typename T, int kVecs>
int enqueue_direct(const Call& call, const Launch& launch) {
    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    const OutputLayout layout = output_layout(row_kind(call, launch.dtype), call.tokens);
    if (layout.num_bytes > call.buffers.output_bytes) return cudaErrorInvalidValue;
    // CTAs wait for each other through peers: all of them must be resident at once, which is one on each SM.
    int32_t num_ctas = std::min({num_sms, kMaxCtas, call.share});
    if (launch.num_ctas > 0) num_ctas = std::min(num_ctas, launch.num_ctas);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = num_ctas;
    config.blockDim = kDirectThreads;
    config.stream = static_cast<cudaStream_t>(launch.stream);
    config.attrs = &attribute;
    config.numAttrs = fabric::code_of<direct<Fabric, T, kVecs>>(device) == KernelCode::kSm90 ? 1 : 0;
    return cudaLaunchKernelEx(&config, direct<Fabric, T, kVecs>, call, layout);
}

template <class Fabric, typename T>
int run_direct_as(const Call& call, const Launch& launch) {
    const int32_t vecs = (call.hidden / kElements<T> + kDirectThreads - 1) / kDirectThreads;
    if (vecs <= 2) return enqueue_direct<Fabric, T, 2>(call, launch);
    if (vecs <= kMostDirectVecs) return enqueue_direct<Fabric, T, kMostDirectVecs>(call, launch);
    return cudaErrorInvalidValue;
}

template <class Fabric>
int run_direct(const Call& call, const Launch& launch) {
    switch (launch.dtype) {
        case DType::kFloat32:
            return run_direct_as<Fabric, float>(call, launch);
        case DType::kBFloat16:
            return run_direct_as<Fabric, __nv_bfloat16>(call, launch);
        case DType::kFloat16:
            return run_direct_as<Fabric, __half>(call, launch);
    }
    return cudaErrorInvalidValue;
}

}  // namespace weave::gpu
