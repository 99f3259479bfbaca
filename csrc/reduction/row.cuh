// One row of all_reduce_norm that its owner has summed, before it reaches all ranks: finished in the registers of the
// threads that share it and returned, and at last copied from the output buffer into the caller's tensors.
#pragma once

#include "reduction/finish.cuh"
#include "reduction/layout.h"

namespace weave::gpu {

// `x` holds the sum, `residual` the row's own vectors if there is one. `broadcast(at, piece)` stores a piece of 4 to 16
// bytes at `at` in every rank's arena.
template <typename T, bool kPlain = false, int kVecs, class Team, class Broadcast>
__device__ __forceinline__ void finish_and_hand_out(float (&x)[kVecs][kElements<T>], const Vec16 (&residual)[kVecs],
                                                    const Call& call, const OutputLayout& layout, const Lanes& lanes,
                                                    int32_t row, Team& team, const Broadcast& broadcast) {
    const int64_t row_at = static_cast<int64_t>(row) * layout.row_bytes;
    const int64_t output = call.buffers.output_offset;
    const int64_t out_at = output + static_cast<int64_t>(row) * layout.out_row_bytes;
    const int32_t out_vector_size = out_vector_bytes<T, kPlain>(call.out_kind);
    LateWeight<T, kVecs, kPlain> weight;
    const auto before = [&](int j) { return residual[j]; };
    finish<T, kPlain>(x, call, lanes, call.residual != nullptr, before, team, weight, [&](int j, const Vec16& sum) {
        if (!kPlain && call.sum_whole)
            broadcast(output + layout.sum_offset + row_at + lanes.at(j) * 16, sum);
        else if (call.sum != nullptr)
            fabric::store(static_cast<char*>(call.sum) + row_at + lanes.at(j) * 16, sum);
    });
    float scale;
    const float inverse = inverse_scale<T, kPlain>(x, call, lanes, scale, team);
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
        if (!lanes.has(j) || call.normalized == nullptr) continue;
        OutVector out = out_vector<T, kPlain>(x[j], call.out_kind, inverse);
        const int64_t at = out_at + static_cast<int64_t>(lanes.at(j)) * out_vector_size;
        for_each_piece(out, out_vector_size, [&](const auto& piece, int32_t offset) { broadcast(at + offset, piece); });
    }
    if (!kPlain && call.quant == QuantKind::kPerToken && lanes.first == 0) {
        const uint32_t bits = __float_as_uint(scale);
        broadcast(out_at + layout.out_row_bytes - kScaleBytes, Vec16{{bits, bits, bits, bits}});
    }
}

// `thread` of `threads` that copy `bytes`, in 16 at a time and several loads at once: one after the other they would
// wait for memory each time. All addresses and sizes are multiples of 16.
__device__ __forceinline__ void copy_vectors(char* to, const char* from, int32_t bytes, int32_t thread,
                                             int32_t threads) {
    constexpr int kAtOnce = 4;
    for (int32_t first = thread * 16; first < bytes; first += threads * 16 * kAtOnce) {
        Vec16 raw[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            if (first + j * threads * 16 < bytes) raw[j] = fabric::load(from + first + j * threads * 16);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            if (first + j * threads * 16 < bytes) fabric::store(to + first + j * threads * 16, raw[j]);
    }
}

// `thread` of `threads` that copy a row. What was stored to this rank's output buffer has arrived.
__device__ __forceinline__ void copy_row_out(const Call& call, const OutputLayout& layout, int32_t row, int32_t thread,
                                             int32_t threads) {
    const char* from = call.group.base[call.group.rank] + call.buffers.output_offset;
    const char* out_row = from + static_cast<int64_t>(row) * layout.out_row_bytes;
    if (call.normalized != nullptr && call.normalized != from) {
        char* to = static_cast<char*>(call.normalized) + static_cast<int64_t>(row) * layout.out_bytes;
        // Quantized rows may be of a multiple of 8 bytes.
        if (layout.out_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0)
            copy_vectors(to, out_row, layout.out_bytes, thread, threads);
        else
            for (int32_t at = thread * 4; at < layout.out_bytes; at += threads * 4)
                *reinterpret_cast<uint32_t*>(to + at) = *reinterpret_cast<const volatile uint32_t*>(out_row + at);
    }
    if (call.quant == QuantKind::kPerToken && thread == 0)
        static_cast<float*>(call.row_scale)[row] =
            *reinterpret_cast<const volatile float*>(out_row + layout.out_row_bytes - kScaleBytes);
    if (!call.sum_whole) return;
    const int64_t row_at = static_cast<int64_t>(row) * layout.row_bytes;
    copy_vectors(static_cast<char*>(call.sum) + row_at, from + layout.sum_offset + row_at, layout.row_bytes, thread,
                 threads);
}

}  // namespace weave::gpu
