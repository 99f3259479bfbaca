// Stands in for csrc/gemm/mainloop.cuh and csrc/gemm/wgmma.cuh.
#pragma once

#include "gemm/order.h"
#include "gemm/tensor_copy.cuh"

namespace weave::gemm {

constexpr int kBlockK = 64;
constexpr int kInstructionK = 16;
constexpr int kConsumers = 2;
constexpr int kThreads = 384;
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
inline void begin_multiply(int32_t columns, float* d, uint64_t a, uint64_t b, bool transposed) {
    emulated::Thread& thread = emulated::running();
    emulated::WarpGroup& group = thread.warp_group();
    const size_t at = thread.num_multiplies++ - group.first_multiply;
    if (at == group.multiplies.size())
        group.multiplies.push_back({columns, a, b, transposed, std::vector<float*>(128)});
    emulated::Multiply& begun = group.multiplies.at(at);
    if (begun.columns != columns || begun.a != a || begun.b != b || begun.transposed != transposed)
        throw std::runtime_error("threads of a warp group multiply different things");
    begun.sums[thread.index.x % 128] = d;
}

inline void close_multiplies() {
    emulated::Thread& thread = emulated::running();
    thread.groups.push_back(thread.num_multiplies);
}

// 16 elements of a row of an operand, through the 128-byte swizzle of the address.
inline void read_row(emulated::Cta& cta, uint64_t operand, int row, bool transposed, float (&out)[kInstructionK]) {
    for (int k = 0; k < kInstructionK; ++k) {
        const uint32_t at = static_cast<uint32_t>(operand << 4) + (transposed ? k * 128 + row * 2 : row * 128 + k * 2);
        __nv_bfloat16 element;
        memcpy(&element, cta.memory() + (at ^ (at >> 7 & 7) << 4), 2);
        out[k] = static_cast<float>(element);
    }
}

inline void multiply_now(emulated::Cta& cta, const emulated::Multiply& begun) {
    std::vector<float> a(64 * kInstructionK), b(begun.columns * kInstructionK);
    for (int row = 0; row < 64; ++row)
        read_row(cta, begun.a, row, begun.transposed,
                 *reinterpret_cast<float (*)[kInstructionK]>(&a[row * kInstructionK]));
    for (int row = 0; row < begun.columns; ++row)
        read_row(cta, begun.b, row, false, *reinterpret_cast<float (*)[kInstructionK]>(&b[row * kInstructionK]));
    for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < begun.columns / 2; ++i) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
            const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            float sum = begun.sums[thread][i];
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

inline uint32_t pair_of(float a, float b, const __nv_bfloat16*) {
    return __nv_bfloat16(a).bits | uint32_t{__nv_bfloat16(b).bits} << 16;
}

}  // namespace weave::gemm
