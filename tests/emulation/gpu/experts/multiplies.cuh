// Stands in for csrc/experts/multiplies.cuh.
#pragma once

#include "gemm/mainloop.cuh"

namespace weave::moe_experts {

template <bool kTransposed>
inline uint64_t along_depth(uint64_t operand, int step) {
    return kTransposed ? operand + step * (gemm::kInstructionK * 128 >> 4) : gemm::along_k(operand, step);
}

inline void await_consumer(int32_t consumer) {
    emulated::Thread& thread = emulated::running();
    if (thread.index.x / 128 != static_cast<uint32_t>(consumer + 1)) throw std::runtime_error("not the consumer's");
    emulated::meet(thread.warp_group().named, 128);
}

// Lane 8 i + j has the address of column j of matrix i; of each row, lane 4 j + c has columns 2 c and 2 c + 1.
inline void store_columns_as_rows(uint32_t to, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
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
            for (int column = 0; column < 8; ++column) {
                const uint32_t word = store.word[4 * row + column / 2][matrix];
                const auto element = static_cast<uint16_t>(word >> column % 2 * 16);
                memcpy(thread.cta->memory() + store.to[8 * matrix + column] + 2 * row, &element, 2);
            }
    warp.stores.pop_front();
    ++warp.first_store;
}

template <int kColumns, bool kTransposed, int kFirst, int kCount>
inline void multiply(float (&d)[kCount], uint64_t weight, uint64_t tokens, const __nv_bfloat16*) {
    static_assert(kColumns <= 256 && kFirst + kColumns / 2 <= kCount);
    gemm::begin_multiply(kColumns, d + kFirst, weight, tokens, kTransposed);
}

}  // namespace weave::moe_experts
