// Stands in for csrc/gemm/mainloop.cuh and csrc/gemm/wgmma.cuh.
#pragma once

#include "gemm/order.h"
#include "gemm/tensor_copy.cuh"

namespace weave::gemm {

constexpr int kBlockK = 64;
constexpr int kInstructionK = 16;
constexpr int kConsumers = 2;
constexpr int kThreads = 384;
constexpr int kConsumerRows = kPanelRows / kConsumers;
constexpr int kLoaderRegisters = 0;
constexpr int kConsumerRegisters = 0;
constexpr int32_t kSharedAlignment = 1024;

template <int kRegisters>
inline void take_registers() {}
template <int kRegisters>
inline void leave_registers() {}

template <int kStages>
struct Position {
    int32_t stage = 0;
    uint32_t parity = 0;
    void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

inline int32_t cluster_index() {
    return static_cast<int32_t>(blockIdx.x) / kClusterCtas;
}

// Where an operand begins, in 16 bytes, as in wgmma's descriptor.
inline uint64_t operand(uint32_t shared) {
    if (shared % 1024 != 0) throw std::runtime_error("an operand at no multiple of 1024 bytes");
    return shared >> 4;
}

inline uint64_t along_k(uint64_t operand, int step) {
    return operand + step * (kInstructionK * 2 >> 4);
}

inline void open_multiplies() {}

// Of sums from `d` on.
inline void begin_multiply(int32_t columns, float* d, uint64_t a, uint64_t b, bool accumulate) {
    emulated::Thread& thread = emulated::running();
    emulated::WarpGroup& group = thread.warp_group();
    const size_t at = thread.num_multiplies++ - group.first_multiply;
    if (at == group.multiplies.size())
        group.multiplies.push_back({columns, a, b, accumulate, std::vector<float*>(128)});
    emulated::Multiply& begun = group.multiplies.at(at);
    if (begun.columns != columns || begun.a != a || begun.b != b || begun.accumulate != accumulate)
        throw std::runtime_error("threads of a warp group multiply different things");
    begun.sums[thread.index.x % 128] = d;
}

inline void multiply_add(float (&d)[128], uint64_t a, uint64_t b, bool accumulate, const __nv_bfloat16*) {
    begin_multiply(256, d, a, b, accumulate);
}

inline void close_multiplies() {
    emulated::Thread& thread = emulated::running();
    thread.groups.push_back(thread.num_multiplies);
}

// 16 elements of a row of an operand, through the 128-byte swizzle of the address.
inline void read_row(emulated::Cta& cta, uint64_t operand, int row, float (&out)[kInstructionK]) {
    for (int k = 0; k < kInstructionK; ++k) {
        const uint32_t at = static_cast<uint32_t>(operand << 4) + row * 128 + k * 2;
        __nv_bfloat16 element;
        memcpy(&element, cta.memory() + (at ^ (at >> 7 & 7) << 4), 2);
        out[k] = static_cast<float>(element);
    }
}

inline void multiply_now(emulated::Cta& cta, const emulated::Multiply& begun) {
    std::vector<float> a(64 * kInstructionK), b(begun.columns * kInstructionK);
    for (int row = 0; row < 64; ++row)
        read_row(cta, begun.a, row, *reinterpret_cast<float (*)[kInstructionK]>(&a[row * kInstructionK]));
    for (int row = 0; row < begun.columns; ++row)
        read_row(cta, begun.b, row, *reinterpret_cast<float (*)[kInstructionK]>(&b[row * kInstructionK]));
    for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < begun.columns / 2; ++i) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
            const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            float sum = begun.accumulate ? begun.sums[thread][i] : 0;
            for (int k = 0; k < kInstructionK; ++k)
                sum += a[row * kInstructionK + k] * b[column * kInstructionK + k];
            begun.sums[thread][i] = sum;
        }
    }
}

template <int kPending>
inline void await_multiplies() {
    emulated::Thread& thread = emulated::running();
    emulated::WarpGroup& group = thread.warp_group();
    if (thread.groups.size() <= kPending) return;
    const uint64_t end = thread.groups[thread.groups.size() - 1 - kPending];
    emulated::Cta& cta = *thread.cta;
    emulated::meet(group.meeting, 128, [&] {
        for (; group.first_multiply < end; ++group.first_multiply) {
            multiply_now(cta, group.multiplies.front());
            group.multiplies.pop_front();
        }
    });
}

template <int kCount>
inline void settle(float (&)[kCount]) {}

// Lane 8 i + j has the address of row j of matrix i; of each row, lane 4 j + c has 4 bytes.
inline void store_matrices(uint32_t to, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
    emulated::Thread& thread = emulated::running();
    emulated::Warp& warp = thread.warp();
    const size_t at = thread.num_stores++ - warp.first_store;
    if (at == warp.stores.size()) warp.stores.emplace_back();
    emulated::MatrixStore& store = warp.stores.at(at);
    const uint32_t lane = thread.index.x % 32, words[4] = {m0, m1, m2, m3};
    store.to[lane] = to;
    memcpy(store.word[lane], words, sizeof words);
    if (++store.lanes < 32) return;
    for (int matrix = 0; matrix < 4; ++matrix)
        for (int row = 0; row < 8; ++row)
            for (int column = 0; column < 4; ++column)
                memcpy(thread.cta->memory() + store.to[8 * matrix + row] + 4 * column,
                       &store.word[4 * row + column][matrix], 4);
    warp.stores.pop_front();
    ++warp.first_store;
}

inline uint32_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline uint32_t pair_of(float a, float b, const __nv_bfloat16*) {
    return rounded(a) | rounded(b) << 16;
}

}  // namespace weave::gemm
