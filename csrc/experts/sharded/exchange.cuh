// The kernels of exchange.h. Each is a call of the channel (fabric/call.cuh): a call of the operation has two epochs,
// the even one of dispatch and the odd one of combine, and the experts run between them.
//
// Layout: layout.h; ids and rows of a source at the tokens' own numbers, so nothing is counted before it
// is sent. All ranks have the same grid and give the same tokens to a CTA, which waits for its like on every peer: when
// the grid ends, all has come.
//
// Memory order, by what is shared:
//
//   ids and rows of a source, in the owner's arena
//     store   dispatch of the source, all threads of a CTA, plain
//     fence   __syncthreads; release, in signal
//     flag    partial[source][CTA]
//     wait    the same CTA of the owner's dispatch, acquire; its end
//     reader  the next kernels: routing, first GEMM
//     again   in the source's next dispatch: it comes after its combine, which ended with every peer's tag of that
//             call, sent when that peer's GEMMs had ended
//   combine rows, in the memory of the token's rank
//     store   second GEMM of the expert's rank, plain, after that rank's dispatch, which ended with the tag and with
//             `partial` of the token's rank
//     fence   its end; acq_rel at system scope, in send_tags of the combine kernel after it
//     flag    rows[expert's rank][0], by the thread that fenced
//     wait    every CTA of the token's combine, acquire; __syncthreads
//     reader  that CTA
//     again   in the next call, after `partial` of the token's rank in it: its combine has ended by then
//   state and tags: fabric/call.cuh
#pragma once

#include "experts/sharded/exchange.h"
#include "fabric/call.cuh"

namespace weave::moe {

using fabric::Vec16;
using fabric::Vec8;

constexpr int32_t kDispatchThreads = 512;
constexpr int32_t kCombineThreads = 512;
constexpr int32_t kVecsInFlight = 4;  // of a lane, or rows of a thread
constexpr uint32_t kAllLanes = 0xffffffff;
constexpr int64_t kNobody = -1;

__device__ __forceinline__ int32_t owner_of(const Exchange& exchange, int64_t id) {
    if (id < 0 || id >= int64_t{exchange.num_experts} * exchange.group.world) return -1;
    return static_cast<int32_t>(id) / exchange.num_experts;
}

// What a warp adds to the counters.
struct Counted {
    uint32_t pushed = 0;
    uint32_t returned = 0;
};

// One warp: the ids of a token to all ranks, by its first part, and which ranks need its row, as bits.
__device__ __forceinline__ uint32_t push_ids(const Dispatch& work, int32_t token, bool is_first, Counted& counted) {
    const Exchange& exchange = work.exchange;
    const fabric::GroupView& group = exchange.group;
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    uint32_t needed = 0;
    for (int32_t first = 0; first < exchange.choices; first += 32) {
        const int32_t choice = first + lane;
        const bool there = token < exchange.tokens && choice < exchange.choices;
        const int64_t id = there ? work.experts[int64_t{token} * exchange.choices + choice] : kNobody;
        const int32_t owner = owner_of(exchange, id);
        for (int32_t rank = 0; rank < group.world; ++rank) {
            const uint32_t here = __ballot_sync(kAllLanes, owner == rank);
            if (here != 0) needed |= 1u << rank;
            if (is_first && rank != group.rank) counted.returned += __popc(here);
            if (!is_first || choice >= exchange.choices) continue;
            const int64_t place = int64_t{group.rank} * exchange.slot_tokens + token;
            const int64_t local = owner == rank ? id - int64_t{rank} * exchange.num_experts : kNobody;
            char* to = group.base[rank] + exchange.ids_offset + (place * exchange.choices + choice) * 8;
            fabric::store(to, Vec8{{static_cast<uint32_t>(local), static_cast<uint32_t>(local >> 32)}});
        }
    }
    if (is_first) counted.pushed += __popc(needed & ~(1u << group.rank));
    return needed;
}

// One warp: a part of a token's row to the ranks that need it.
__device__ __forceinline__ void push_row(const Dispatch& work, int32_t token, int32_t part, uint32_t needed) {
    const Exchange& exchange = work.exchange;
    const fabric::GroupView& group = exchange.group;
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t each = (exchange.row_vecs + work.parts - 1) / work.parts, begin = part * each;
    const int32_t end = begin + each < exchange.row_vecs ? begin + each : exchange.row_vecs;
    const int64_t place = int64_t{group.rank} * exchange.slot_tokens + token;
    const int64_t to = exchange.rows_offset + place * exchange.row_vecs * kVecBytes;
    for (int32_t first = begin + lane; first < end; first += 32 * kVecsInFlight) {
        Vec16 row[kVecsInFlight];
#pragma unroll
        for (int32_t i = 0; i < kVecsInFlight; ++i)
            if (first + i * 32 < end)
                row[i] = fabric::load(work.x + token * work.x_stride + (first + i * 32) * kVecBytes);
        for (int32_t step = 0; step < group.world; ++step) {
            const int32_t rank = group.after(step);
            if ((needed >> rank & 1) == 0) continue;
#pragma unroll
            for (int32_t i = 0; i < kVecsInFlight; ++i)
                if (first + i * 32 < end) fabric::store(group.base[rank] + to + (first + i * 32) * kVecBytes, row[i]);
        }
    }
}

__device__ __forceinline__ void dispatch_rows(const Dispatch& work) {
    const Exchange& exchange = work.exchange;
    const fabric::GroupView& group = exchange.group;
    const fabric::CallState state = fabric::begin_call<false>(group);
    __syncthreads();
    const fabric::Watch watch{group, fabric::tag_word(state.epoch(), exchange.slot_tokens, exchange.site)};
    const int32_t peer = static_cast<int32_t>(threadIdx.x);
    fabric::send_tags(watch, state, peer);
    const int32_t warps = static_cast<int32_t>(blockDim.x) / 32, warp = static_cast<int32_t>(threadIdx.x) / 32;
    Counted counted;
    const int64_t items = int64_t{exchange.slot_tokens} * work.parts;
    for (int64_t item = blockIdx.x * warps + warp; item < items; item += int64_t{gridDim.x} * warps) {
        const int32_t token = static_cast<int32_t>(item / work.parts), part = static_cast<int32_t>(item % work.parts);
        const uint32_t needed = push_ids(work, token, part == 0, counted);
        if (needed != 0) push_row(work, token, part, needed);
    }
    if (threadIdx.x % 32 == 0 && work.traffic != nullptr) {
        if (counted.pushed != 0) atomicAdd(&work.traffic->pushed, counted.pushed);
        if (counted.returned != 0) atomicAdd(&work.traffic->returned, counted.returned);
    }
    __syncthreads();
    if (peer < group.world && peer != group.rank) {
        const uint64_t word = fabric::signal_word(state.epoch(), 1);
        fabric::signal(&group.channel(peer)->partial[group.rank][blockIdx.x], word);
        fabric::wait(&group.channel(group.rank)->partial[peer][blockIdx.x], word, watch, peer, fabric::Slot::kPartial);
    }
    fabric::end_call<false>(watch, state, peer);
}

__device__ __forceinline__ float weight_at(const Combine& work, int64_t place) {
    if (work.weights_dtype == DType::kBFloat16)
        return static_cast<float>(static_cast<const __nv_bfloat16*>(work.weights)[place]);
    if (work.weights_dtype == DType::kFloat16)
        return static_cast<float>(static_cast<const __half*>(work.weights)[place]);
    return static_cast<const float*>(work.weights)[place];
}

// 16 bytes of a token's result: its choices in their order, each product rounded to fp32.
template <typename T>
__device__ __forceinline__ void sum_choices(const Combine& work, int32_t token, int32_t vec) {
    constexpr int E = fabric::kElements<T>;
    const Exchange& exchange = work.exchange;
    const T* type = nullptr;
    const char* rows = exchange.group.base[exchange.group.rank] + exchange.combine_offset + int64_t{vec} * kVecBytes;
    float sum[E] = {};
    for (int32_t first = 0; first < exchange.choices; first += kVecsInFlight) {
        Vec16 row[kVecsInFlight];
        float weight[kVecsInFlight];
        bool there[kVecsInFlight];
#pragma unroll
        for (int32_t i = 0; i < kVecsInFlight; ++i) {
            const int64_t place = int64_t{token} * exchange.choices + first + i;
            there[i] = first + i < exchange.choices && owner_of(exchange, work.experts[place]) >= 0;
            // The row of a choice outside all ranks' experts was not written, and its weight may be anything.
            if (!there[i]) continue;
            row[i] = fabric::load(rows + place * exchange.row_vecs * kVecBytes);
            weight[i] = weight_at(work, place);
        }
#pragma unroll
        for (int32_t i = 0; i < kVecsInFlight; ++i) {
            if (!there[i]) continue;
            float x[E];
            fabric::widen(row[i], x, type);
#pragma unroll
            for (int32_t e = 0; e < E; ++e)
                sum[e] = __fadd_rn(sum[e], __fmul_rn(weight[i], x[e]));
        }
    }
    fabric::store(work.out + (int64_t{token} * exchange.row_vecs + vec) * kVecBytes, fabric::narrow(sum, type));
}

template <typename T>
__device__ __forceinline__ void combine_rows(const Combine& work) {
    const Exchange& exchange = work.exchange;
    const fabric::GroupView& group = exchange.group;
    const fabric::CallState state = fabric::begin_call<false>(group);
    __syncthreads();
    const fabric::Watch watch{group, fabric::tag_word(state.epoch(), exchange.slot_tokens, exchange.site)};
    const uint64_t word = fabric::signal_word(state.epoch(), 1);
    const int32_t peer = static_cast<int32_t>(threadIdx.x);
    fabric::send_tags(watch, state, peer);
    if (peer < group.world && peer != group.rank) {
        // Rows that went to peers were stored by kernels before this one. The tag was fenced by this same thread: the
        // word after it is a release too.
        if (blockIdx.x == 0) fabric::store_relaxed(&group.channel(peer)->rows[group.rank][0], word);
        fabric::wait(&group.channel(group.rank)->rows[peer][0], word, watch, peer, fabric::Slot::kRows);
    }
    fabric::end_call<false>(watch, state, peer);
    __syncthreads();
    const int64_t vecs = int64_t{exchange.tokens} * exchange.row_vecs;
    for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < vecs; at += int64_t{gridDim.x} * blockDim.x)
        sum_choices<T>(work, static_cast<int32_t>(at / exchange.row_vecs),
                       static_cast<int32_t>(at % exchange.row_vecs));
}

}  // namespace weave::moe
