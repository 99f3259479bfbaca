// From a consumer's sums to rows of the result: bias, activation, and columns that become rows in shared memory.
#pragma once

#include "experts/activation.cuh"
#include "experts/multiplies.cuh"
#include "experts/parts.cuh"
#include "experts/work.cuh"

namespace weave::moe_experts {

constexpr int kBlockSums = kPanelRows / 2;  // of a thread, for a block of the weight
constexpr int kSums = 2 * kBlockSums;

// A thread's place in a block of the weight: its rows are this one and the one 8 rows further.
__device__ __forceinline__ int32_t own_block_row() {
    return static_cast<int32_t>(threadIdx.x) / 32 % 4 * 16 + static_cast<int32_t>(threadIdx.x) % 32 / 4;
}

// Sums are ordered by block, octet, row (own or 8 further), and row of the octet (of two).
__device__ __forceinline__ constexpr int32_t sum_at(int32_t block, int32_t octet, int32_t half) {
    return block * kBlockSums + octet * 4 + half * 2;
}

template <typename T, Product kProduct>
__device__ __forceinline__ void add_bias(const Work& work, const Part& part, int32_t consumer, float (&sum)[kSums]) {
    const T* bias = static_cast<const T*>(work.bias) + part.expert * work.bias_stride;
    const int32_t width = kProduct == Product::kPairs ? 2 * work.width : work.width;
#pragma unroll
    for (int block = 0; block < 2; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t row = own_block_row() + half * 8;
            const int32_t column = kProduct == Product::kGated
                                       ? part.column * (kWeightRows / 2) + consumer * kBlockRows + row
                                       : part.column * kWeightRows + (consumer * 2 + block) * kBlockRows + row;
            if (column >= width) continue;
            const int32_t at = column * work.bias_step + (kProduct == Product::kGated ? block * work.up_bias : 0);
            const float value = static_cast<float>(bias[at]);
#pragma unroll
            for (int octet = 0; octet < kOctets; ++octet) {
                sum[sum_at(block, octet, half)] += value;
                sum[sum_at(block, octet, half) + 1] += value;
            }
        }
}

// Rows of the weight are gate, up, gate, up: of two that follow one another lane l has one and lane l ^ 4 the other.
// The lane of the gate keeps the first of two rows of the octet, that of the up the second: gates come first then, ups
// in the second half, each by octet, block and half.
__device__ __forceinline__ void separate_pairs(float (&sum)[kSums]) {
    const bool has_up = threadIdx.x / 4 % 2 != 0;
    float found[kSums];
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float first = sum[sum_at(i / 2, octet, i % 2)], second = sum[sum_at(i / 2, octet, i % 2) + 1];
            const float other = __shfl_xor_sync(0xffffffffu, has_up ? first : second, 4);
            found[octet * 4 + i] = has_up ? other : first;
            found[kSums / 2 + octet * 4 + i] = has_up ? second : other;
        }
#pragma unroll
    for (int i = 0; i < kSums; ++i)
        sum[i] = found[i];
}

// Of octets with rows only: 6 at a time.
template <Product kProduct>
__device__ __forceinline__ void apply_activation(const Work& work, int32_t octets, float (&sum)[kSums]) {
    constexpr int kAtOnce = 24;
    static_assert(kBlockSums % kAtOnce == 0);
#pragma unroll
    for (int first = 0; first < kBlockSums; first += kAtOnce) {
        if (first >= octets * 4) break;
        float x[2 * kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            x[i] = sum[first + i];
            x[kAtOnce + i] = sum[kBlockSums + first + i];
        }
        if constexpr (is_gated(kProduct)) {
            if (work.limit > 0.0f) cut_gates(x, work.limit);
        }
        activate<is_gated(kProduct)>(work.activation, x, work.alpha);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            sum[first + i] = x[i];
            sum[kBlockSums + first + i] = x[kAtOnce + i];
        }
    }
}

// 64 columns of the part's rows from octet kFirst on into the consumer's shared memory, from sums of one block, or of
// pairs.
template <typename T, Product kProduct, int kBlock, int kFirst>
__device__ __forceinline__ void stage_columns(int32_t octets, uint8_t* staged, const float (&sum)[kSums]) {
    constexpr int kEnd = kFirst + kStagedOctets < kOctets ? kFirst + kStagedOctets : kOctets;
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if constexpr (kProduct == Product::kPairs) {
        const int32_t row = lane % 4 * 2 + lane / 4 % 2, column = warp * 8 + lane / 8;
#pragma unroll
        for (int i = kFirst * 4; i < kEnd * 4; ++i) {
            if (i >= octets * 4) break;
            const int32_t to_row = (i / 4 - kFirst) * 8 + row, to_column = i / 2 % 2 * 32 + i % 2 * 4 + column;
            *reinterpret_cast<T*>(staged + chunk_offset(to_row, to_column / kChunkElements) +
                                  to_column % kChunkElements * 2) = static_cast<T>(sum[i]);
        }
    } else {
        const T* type = nullptr;
        const uint32_t to = gemm::shared_address(staged);
        static_assert((kEnd - kFirst) % 2 == 0);
#pragma unroll
        for (int octet = kFirst; octet < kEnd; octet += 2) {
            if (octet >= octets) break;
            const float* s = sum + sum_at(kBlock, octet, 0);
            const int32_t to_row = (octet - kFirst) * 8 + lane / 16 * 8 + lane % 8;
            store_columns_as_rows(to + chunk_offset(to_row, warp * 2 + lane / 8 % 2), gemm::pair_of(s[0], s[1], type),
                                  gemm::pair_of(s[2], s[3], type), gemm::pair_of(s[4], s[5], type),
                                  gemm::pair_of(s[6], s[7], type));
        }
    }
}

// From there to rows of the result. `targets` are of the rows that this thread stores.
template <typename T, Product kProduct, int kFirst>
__device__ __forceinline__ void store_columns(const Work& work, const Part& part, const uint8_t* staged,
                                              const int32_t (&targets)[kPasses], int32_t column) {
    constexpr int kFirstPass = kFirst * kOctetRows / kRowsAPass, kMany = kStagedOctets * kOctetRows / kRowsAPass;
    static_assert(kFirstPass * kRowsAPass == kFirst * kOctetRows && kMany * kRowsAPass == kStagedOctets * kOctetRows);
    const int32_t thread = threadIdx.x % 128, chunk = gathered_chunk(thread), at = column + chunk * kChunkElements;
    if (at >= work.width) return;
    T* out = kProduct == Product::kToRanks ? nullptr : static_cast<T*>(work.out) + at;
#pragma unroll
    for (int pass = kFirstPass; pass < kFirstPass + kMany && pass < kPasses; ++pass) {
        const int32_t row = gathered_row(thread, pass);
        if (row >= part.rows) continue;
        int32_t target = targets[pass];
        if constexpr (kProduct == Product::kToRanks) {
            const Place place = unpacked_place(target);
            out = static_cast<T*>(work.buffers.base[place.buffer]) + at;
            target = place.row;
        }
        fabric::store(out + int64_t{target} * work.width,
                      *reinterpret_cast<const fabric::Vec16*>(staged + chunk_offset(row - kFirst * 8, chunk)));
    }
}

// 64 columns of the result, from sums of one block, or of pairs.
template <typename T, Product kProduct, int kBlock, int kFirst = 0>
__device__ __forceinline__ void put_columns(const Work& work, const Part& part, int32_t consumer, uint8_t* staged,
                                            const int32_t (&targets)[kPasses], int32_t column,
                                            const float (&sum)[kSums]) {
    stage_columns<T, kProduct, kBlock, kFirst>(part.octets, staged, sum);
    await_consumer(consumer);
    store_columns<T, kProduct, kFirst>(work, part, staged, targets, column);
    await_consumer(consumer);
    if constexpr (kFirst + kStagedOctets < kOctets) {
        if (part.octets > kFirst + kStagedOctets)
            put_columns<T, kProduct, kBlock, kFirst + kStagedOctets>(work, part, consumer, staged, targets, column,
                                                                     sum);
    }
}

// A consumer's 128 threads: its columns of the part's rows.
template <typename T, Product kProduct>
__device__ __forceinline__ void finish_part(const Work& work, const Part& part, int32_t consumer, uint8_t* staged,
                                            const int32_t (&targets)[kPasses], float (&sum)[kSums]) {
    constexpr bool kGated = is_gated(kProduct);
    const int32_t column = part.column * tile_columns(kGated) + consumer * tile_columns(kGated) / gemm::kConsumers;
    if (work.bias != nullptr) add_bias<T, kProduct>(work, part, consumer, sum);
    if constexpr (kProduct == Product::kPairs) separate_pairs(sum);
    if constexpr (!is_second(kProduct)) apply_activation<kProduct>(work, part.octets, sum);
    put_columns<T, kProduct, 0>(work, part, consumer, staged, targets, column, sum);
    if constexpr (!kGated) put_columns<T, kProduct, 1>(work, part, consumer, staged, targets, column + kBlockRows, sum);
}

}  // namespace weave::moe_experts
