// Stands in for csrc/gemm/tensor_copy.cuh and csrc/fabric/bulk_copy.cuh.
#pragma once

#include "machine.h"

// Matrices of rows of 2-byte elements, in boxes of 64 columns.
struct CUtensorMap {
    const uint16_t* data;
    int64_t columns, rows, matrices;
    int64_t stride, matrix_stride;
    int32_t box_rows;
    int64_t between = 0;  // from a gate to its up; 0: rows are no gates
};

namespace weave::fabric {

struct Vec16 {
    uint32_t word[4];
};

inline void store(void* to, const Vec16& v) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0) throw std::runtime_error("16 bytes at no multiple of 16");
    memcpy(to, &v, 16);
}

inline void arrive_expecting(uint64_t* at, uint32_t bytes) {
    emulated::Barrier& barrier = emulated::running().cta->barrier(emulated::address(at));
    barrier.bytes += bytes;
    --barrier.pending;
    barrier.settle();
}

inline void arrive(uint64_t* at) {
    emulated::Barrier& barrier = emulated::running().cta->barrier(emulated::address(at));
    --barrier.pending;
    barrier.settle();
}

inline void arrive_times(uint64_t* at, uint32_t times) {
    emulated::Barrier& barrier = emulated::running().cta->barrier(emulated::address(at));
    barrier.pending -= static_cast<int32_t>(times);
    barrier.settle();
}

inline void await_phase(uint64_t* at, uint32_t parity) {
    emulated::Barrier& barrier = emulated::running().cta->barrier(emulated::address(at));
    emulated::await([&barrier, parity] { return (barrier.phase & 1) != parity; });
}

}  // namespace weave::fabric

namespace weave::gemm {

inline uint32_t shared_address(const void* pointer) {
    return emulated::address(pointer);
}

inline uint32_t cluster_rank() {
    return emulated::running().cta->rank;
}

inline void await_cluster() {
    emulated::meet(emulated::cluster->meeting, static_cast<int32_t>(emulated::cluster->threads.size()));
}

inline void init_barrier(uint64_t* at, uint32_t num_arrivals) {
    const int32_t count = static_cast<int32_t>(num_arrivals);
    emulated::running().cta->barriers[emulated::address(at)] = {count, count};
}

inline void publish_barriers() {}

inline void arrive_at(uint64_t* at, uint32_t cta) {
    emulated::Barrier& barrier = emulated::cluster->ctas[cta].barrier(emulated::address(at));
    --barrier.pending;
    barrier.settle();
}

inline void load_box(emulated::Cta& cta, uint32_t to, const CUtensorMap* map, int64_t x, int64_t y, int64_t z,
                     uint32_t barrier) {
    if (to % 1024 != 0) throw std::runtime_error("a box at no multiple of 1024 bytes");
    emulated::cluster->copies.push_back([&cta, to, map, x, y, z, barrier] {
        for (int64_t row = 0; row < map->box_rows; ++row) {
            // Of gates and ups y counts octets of columns: 8 gates, their 8 ups, the next 8 gates.
            const int64_t up = map->between != 0 ? row / 8 % 2 * map->between : 0;
            const int64_t at_row = map->between != 0 ? (y + row / 16) * 8 + row % 8 : y + row;
            for (int64_t column = 0; column < 64; ++column) {
                uint16_t element = 0;
                if (x + column < map->columns && at_row < map->rows && z < map->matrices)
                    element = map->data[z * map->matrix_stride + at_row * map->stride + up + x + column];
                const uint32_t at = to + static_cast<uint32_t>(row * 128 + column * 2);
                memcpy(cta.memory() + (at ^ (at >> 7 & 7) << 4), &element, 2);
            }
        }
        emulated::Barrier& counts = cta.barrier(barrier);
        counts.bytes -= map->box_rows * 128;
        counts.settle();
    });
}

inline void load_tile(void* to, const CUtensorMap* map, int32_t x, int32_t y, uint64_t* barrier) {
    load_box(*emulated::running().cta, emulated::address(to), map, x, y, 0, emulated::address(barrier));
}

inline void load_tile_to(uint16_t mask, void* to, const CUtensorMap* map, int32_t x, int32_t y, uint64_t* barrier) {
    for (emulated::Cta& cta : emulated::cluster->ctas)
        if (mask >> cta.rank & 1)
            load_box(cta, emulated::address(to), map, x, y, 0, emulated::address(barrier));
}

}  // namespace weave::gemm
