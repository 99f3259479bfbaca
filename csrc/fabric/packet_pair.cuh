// Two packets of data and flag, moved at once: 8 bytes each, 4 of data and 4 of flag, so that the one says that the
// other has arrived (NCCL's LL protocol; NVRAR, section 4.2.2).
//
// A packet is one 64-bit word to every instruction here: it arrives whole, over load-store transports by the PTX memory
// model, over networks because no NIC tears an aligned word of 8 bytes. Packets are not ordered among each other, and
// nothing else is ordered by them: who polls a packet uses the data in it, and nothing that was stored before it.
#pragma once

#include <cstdint>

#include "fabric/word_pair.cuh"

namespace weave::fabric {

constexpr int32_t kPacketBytes = 8;

using PacketPair = WordPair;

__device__ __forceinline__ PacketPair pack(uint32_t first, uint32_t second, uint32_t flag) {
    const uint64_t high = static_cast<uint64_t>(flag) << 32;
    return {{high | first, high | second}};
}

__device__ __forceinline__ uint32_t data_of(uint64_t packet) {
    return static_cast<uint32_t>(packet);
}

__device__ __forceinline__ uint32_t flag_of(uint64_t packet) {
    return static_cast<uint32_t>(packet >> 32);
}

__device__ __forceinline__ bool has_flag(const PacketPair& pair, uint32_t flag) {
    return flag_of(pair.word[0]) == flag && flag_of(pair.word[1]) == flag;
}

}  // namespace weave::fabric
