// Stands in for csrc/experts/tickets.cuh.
#pragma once

#include "experts/copies.cuh"

namespace weave::moe_experts {

// Whether rows are taken to be there before they have been counted: for the test that sees that tests see it.
inline bool counts_are_ignored = false;

inline int32_t take_number(int32_t* next) {
    return (*next)++;
}

inline void count_stored(int32_t* counter) {
    ++*counter;
}

inline bool has_counted(const int32_t* counter, int32_t value) {
    if (*counter > value) throw std::runtime_error("more results than a tile has");
    return counts_are_ignored || *counter == value;
}

inline void await_counted(const int32_t* counter, int32_t value) {
    emulated::await([counter, value] { return has_counted(counter, value); });
}

inline void order_rows_before_copies() {}

inline void await_producers() {
    emulated::Thread& thread = emulated::running();
    if (thread.index.x >= 128) throw std::runtime_error("not the producer's");
    emulated::meet(thread.warp_group().named, 128);
}

inline void arrive_expecting_at(uint64_t* at, uint32_t cta, uint32_t bytes) {
    emulated::Barrier& barrier = emulated::cluster->ctas[cta].barrier(emulated::address(at));
    barrier.bytes += bytes;
    --barrier.pending;
    barrier.settle();
}

inline void put_words(int4* to, const int4& words, uint64_t* at, uint32_t cta) {
    emulated::Cta& there = emulated::cluster->ctas[cta];
    emulated::Barrier& barrier = there.barrier(emulated::address(at));
    uint8_t* memory = there.memory() + emulated::address(to);
    emulated::cluster->copies.push_back([memory, words, &barrier] {
        memcpy(memory, &words, sizeof words);
        barrier.bytes -= sizeof words;
        barrier.settle();
    });
}

}  // namespace weave::moe_experts
