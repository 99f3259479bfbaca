// Stands in for csrc/experts/copies.cuh.
#pragma once

#include "experts/kernel_ahead.cuh"
#include "gemm/tensor_copy.cuh"

namespace weave::moe_experts {

inline int32_t here(int32_t number) {
    return number;
}

inline void copy_chunk(uint32_t to, const void* from, bool inside) {
    emulated::Thread& thread = emulated::running();
    uint8_t* memory = thread.cta->memory() + to;
    thread.chunks.push_back([memory, from, inside] {
        if (inside) {
            memcpy(memory, from, 16);
        } else {
            memset(memory, 0, 16);
        }
    });
}

inline void arrive_after_chunks(uint64_t* at) {
    emulated::Thread& thread = emulated::running();
    emulated::Barrier& barrier = thread.cta->barrier(emulated::address(at));
    emulated::cluster->copies.push_back([chunks = std::move(thread.chunks), &barrier] {
        for (const auto& chunk : chunks)
            chunk();
        --barrier.pending;
        barrier.settle();
    });
    thread.chunks.clear();
}

inline void order_chunks_before_multiplies() {}

inline void load_box_to_both(void* to, const CUtensorMap* map, int32_t x, int32_t y, int32_t z, uint64_t* barrier) {
    for (emulated::Cta& cta : emulated::cluster->ctas)
        gemm::load_box(cta, emulated::address(to), map, x, y, z, emulated::address(barrier));
}

inline void load_box(void* to, const CUtensorMap* map, int32_t x, int32_t y, int32_t z, uint64_t* barrier) {
    gemm::load_box(*emulated::running().cta, emulated::address(to), map, x, y, z, emulated::address(barrier));
}

inline void load_gates_and_ups(void* to, const CUtensorMap* map, int32_t depth, int32_t octet, int32_t expert,
                               uint64_t* barrier) {
    if (map->between == 0) throw std::runtime_error("a map without gates");
    load_box(to, map, depth, octet, expert, barrier);
}

template <class S>
inline S& shared_memory() {
    static_assert(sizeof(S) + 1024 <= 227 << 10);
    return *reinterpret_cast<S*>(emulated::running().cta->memory());
}

}  // namespace weave::moe_experts
