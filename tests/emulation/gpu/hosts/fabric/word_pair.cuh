// Stands in for csrc/fabric/word_pair.cuh: what goes to another rank arrives some time later, each word by itself.
#pragma once

#include "ranks.h"

namespace weave::fabric {

struct alignas(16) WordPair {
    uint64_t word[2];
};

inline void store_relaxed(void* to, const WordPair& pair) {
    uint64_t* at = static_cast<uint64_t*>(to);
    emulated::running().has_fenced = false;  // no longer behind all
    for (int i = 0; i < 2; ++i)
        if (emulated::is_own(to))
            at[i] = pair.word[i];
        else
            emulated::send({at + i, nullptr, pair.word[i]});
}

inline void load_relaxed(WordPair& pair, const void* from) {
    memcpy(&pair, from, sizeof pair);
}

}  // namespace weave::fabric
