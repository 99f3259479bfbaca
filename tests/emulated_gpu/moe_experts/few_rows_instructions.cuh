// Stands in for csrc/moe_experts/few_rows_instructions.cuh.
#pragma once

#include "gemm/mainloop.cuh"
#include "moe_experts/copies.cuh"

namespace weave::moe_experts {

inline uint32_t cluster_size() {
    return emulated::cluster->size.ctas;
}

inline int4 read_record(const int32_t* from) {
    return {from[0], from[1], from[2], from[3]};
}

inline void load_box_here(void* to, const CUtensorMap* map, int32_t x, int32_t y, int32_t z, uint64_t* barrier) {
    gemm::load_box(*emulated::running().cta, emulated::address(to), map, x, y, z, emulated::address(barrier));
}

inline void await_consumers() {
    emulated::meet(emulated::running().warp_group().named, 128);
}

// Lane 8 i + j has the address of column j of matrix i; of each row, lane 4 j + c has columns 2 c and 2 c + 1.
inline void store_columns_as_rows(uint32_t to, uint32_t m0, uint32_t m1) {
    emulated::Thread& thread = emulated::running();
    emulated::Warp& warp = thread.warp();
    const size_t at = thread.num_stores++ - warp.first_store;
    if (at == warp.stores.size()) warp.stores.emplace_back();
    emulated::MatrixStore& store = warp.stores.at(at);
    const uint32_t lane = thread.index.x % 32, words[2] = {m0, m1};
    store.to[lane] = to;
    memcpy(store.word[lane], words, sizeof words);
    if (++store.lanes < 32) return;
    for (int matrix = 0; matrix < 2; ++matrix)
        for (int row = 0; row < 8; ++row)
            for (int column = 0; column < 8; ++column) {
                const uint32_t word = store.word[4 * row + column / 2][matrix];
                const auto element = static_cast<uint16_t>(word >> column % 2 * 16);
                memcpy(thread.cta->memory() + store.to[8 * matrix + column] + 2 * row, &element, 2);
            }
    warp.stores.pop_front();
    ++warp.first_store;
}

inline void release_to(uint64_t* barrier, uint32_t cta) {
    gemm::arrive_at(barrier, cta);
}

inline void acquire_phase(uint64_t* barrier, uint32_t parity) {
    fabric::await_phase(barrier, parity);
}

inline float read_of(const float* from, uint32_t cta) {
    float value;
    memcpy(&value, emulated::cluster->ctas[cta].memory() + emulated::address(from), sizeof value);
    return value;
}

template <int kColumns, int kFirst, int kCount>
inline void multiply_few(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate, const __nv_bfloat16*) {
    static_assert(kFirst + kColumns / 2 <= kCount);
    gemm::begin_multiply(kColumns, d + kFirst, a, b, accumulate);
}

}  // namespace weave::moe_experts
