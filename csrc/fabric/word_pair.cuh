// Two words of 64 bits, moved at once at system scope; each of them arrives whole.
#pragma once

#include <cstdint>

namespace weave::fabric {

struct alignas(16) WordPair {
    uint64_t word[2];
};

__device__ __forceinline__ void store_relaxed(void* to, const WordPair& pair) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(pair.word[0]), "l"(pair.word[1])
                 : "memory");
}

__device__ __forceinline__ void load_relaxed(WordPair& pair, const void* from) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(pair.word[0]), "=l"(pair.word[1])
                 : "l"(from)
                 : "memory");
}

}  // namespace weave::fabric
