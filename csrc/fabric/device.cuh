// Memory of the GPUs of one host, as kernels see it: the same vocabulary as fabric/shm.h.
//
//   signal(word, value)          release at system scope: every store before it, of this thread and of those that it
//                                met at a barrier, is seen by whoever waits for that value
//   relaxed_signal(word, value)  only the word itself; orders nothing
//   wait(word, value)            acquire at system scope: pairs with signal
//   relaxed_wait(word, value)    only looks; orders nothing
//   load, store                  16 bytes of memory that nobody else writes meanwhile
//   relaxed_load, relaxed_store  16 bytes, of which each 4-byte word arrives whole: words that carry their own arrival
//   reduce_load                  16 bytes of every rank, summed in fp32, ranks in order (peer) or in the switch
//   (multimem) broadcast_store              the same 16 bytes to every rank
//
// Words count calls and never reset. They are 64 bits wide, so they do not wrap. Every wait is bounded: a thread that
// gives up writes a Record into host memory and ends the kernel with a trap, so nothing goes on with wrong data.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "fabric/peer.h"

namespace weave::fabric {

struct alignas(16) Vec16 {
    uint32_t word[4];
};

__device__ __forceinline__ Vec16 load(const void* from) {
    Vec16 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store(void* to, const Vec16& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
                 "r"(v.word[3])
                 : "memory");
}

__device__ __forceinline__ Vec16 relaxed_load(const void* from) {
    Vec16 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void relaxed_store(void* to, const Vec16& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

__device__ __forceinline__ void signal(uint64_t* word, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void relaxed_signal(uint64_t* word, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Both halves of signal() for several words: fence() once, then relaxed_signal() each.
__device__ __forceinline__ void fence() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ __forceinline__ uint64_t look(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t relaxed_look(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// What a wait needs to end: constant over a kernel.
struct Watch {
    Header* own;
    Record* record;
    uint64_t timeout_ns;
    uint64_t tag;
};

// Tells the host, waits until it has read that, and ends the kernel. Does not return. Takes values: a reference would
// put what it refers to into local memory, and every use of it with that.
static __device__ __noinline__ void tell_host_and_end(Header* own, Record* to, uint64_t own_tag, Code code,
                                                      int32_t peer, Slot slot, uint64_t expected, uint64_t seen,
                                                      uint64_t peer_tag) {
    volatile Record* record = to;
    if (atomicExch(&own->state.failed, 1u) == 0) {
        record->peer = peer;
        record->slot = static_cast<uint32_t>(slot);
        record->expected = expected;
        record->seen = seen;
        record->own_tag = own_tag;
        record->peer_tag = peer_tag;
        __threadfence_system();
        record->code = static_cast<uint32_t>(code);
        __threadfence_system();
    }
    constexpr uint64_t kPatienceNs = 2'000'000'000;
    const uint64_t begin = nanoseconds();
    while (record->acknowledged == 0 && nanoseconds() - begin < kPatienceNs)
        __nanosleep(1000);
    __trap();
}

__device__ __forceinline__ void give_up(const Watch& watch, Code code, int32_t peer, Slot slot, uint64_t expected,
                                        uint64_t seen, uint64_t peer_tag) {
    tell_host_and_end(watch.own, watch.record, watch.tag, code, peer, slot, expected, seen, peer_tag);
}

// How long this thread has been waiting. Looks at the clock and at the host only now and then.
class Patience {
  public:
    // True once the wait is to end; `code` says why.
    __device__ __forceinline__ bool is_over(const Watch& watch) {
        if ((++looks_ & 0x3ff) != 0) return false;
        const uint64_t now = nanoseconds();
        if (begin_ == 0) begin_ = now;
        if (now - begin_ > watch.timeout_ns) {
            code_ = Code::kTimeout;
            return true;
        }
        const uint32_t abort = reinterpret_cast<volatile Record*>(watch.record)->abort;
        code_ = static_cast<Code>(abort);
        return abort != 0;
    }
    __device__ Code code() const { return code_; }

  private:
    uint64_t begin_ = 0;
    uint32_t looks_ = 0;
    Code code_ = Code::kOk;
};

__device__ __forceinline__ uint64_t wait(const uint64_t* word, uint64_t value, const Watch& watch, int32_t peer,
                                         Slot slot) {
    Patience patience;
    uint64_t seen;
    while ((seen = look(word)) < value) {
        if (patience.is_over(watch)) give_up(watch, patience.code(), peer, slot, value, seen, 0);
    }
    return seen;
}

__device__ __forceinline__ uint64_t relaxed_wait(const uint64_t* word, uint64_t value, const Watch& watch, int32_t peer,
                                                 Slot slot) {
    Patience patience;
    uint64_t seen;
    while ((seen = relaxed_look(word)) < value) {
        if (patience.is_over(watch)) give_up(watch, patience.code(), peer, slot, value, seen, 0);
    }
    return seen;
}

// Tells `peer` what this rank runs and compares what the peer runs: `watch.tag` on both, or neither goes on.
__device__ __forceinline__ void exchange_tags(const Watch& watch, char* peer_arena, int32_t rank, int32_t peer,
                                              uint64_t num_calls) {
    constexpr int32_t kCallShift = 2 * kTagFieldBits;
    const int parity = num_calls & 1;
    relaxed_signal(&reinterpret_cast<Header*>(peer_arena)->tag[parity][rank], watch.tag);
    Patience patience;
    uint64_t theirs;
    while ((theirs = relaxed_look(&watch.own->tag[parity][peer])) >> kCallShift != watch.tag >> kCallShift) {
        if (patience.is_over(watch))
            give_up(watch, patience.code(), peer, Slot::kTag, watch.tag >> kCallShift, theirs >> kCallShift, 0);
    }
    if (theirs != watch.tag) give_up(watch, Code::kSiteMismatch, peer, Slot::kTag, watch.tag, theirs, theirs);
}

// The kernel before this one in the stream may still run until here (programmatic dependent launch); its results are
// there afterwards. The kernel behind this one may be launched from here on, and waits the same way.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- 16 bytes of T as floats ---------------------------------------------------------------------------------------

template <typename T>
constexpr int kElements = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ void widen(const Vec16& v, float (&out)[4], const float*) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[i] = __uint_as_float(v.word[i]);
}

__device__ __forceinline__ void widen(const Vec16& v, float (&out)[8], const __nv_bfloat16*) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[2 * i] = __uint_as_float(v.word[i] << 16);
        out[2 * i + 1] = __uint_as_float(v.word[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ void widen(const Vec16& v, float (&out)[8], const __half*) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&v.word[i]));
        out[2 * i] = pair.x;
        out[2 * i + 1] = pair.y;
    }
}

__device__ __forceinline__ Vec16 narrow(const float (&x)[4], const float*) {
    return {{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])}};
}

__device__ __forceinline__ Vec16 narrow(const float (&x)[8], const __nv_bfloat16*) {
    Vec16 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        v.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return v;
}

__device__ __forceinline__ Vec16 narrow(const float (&x)[8], const __half*) {
    Vec16 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        v.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return v;
}

// A word that stands for "not there yet": as a pair of 2-byte elements (+0, -0), as a float -0. filled() takes care
// that data never hold it. Elements are not touched otherwise; a rank treats its own data alike, so all sum the same
// bits.
constexpr uint32_t kAbsent = 0x80000000u;

__device__ __forceinline__ Vec16 filled(Vec16 v) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        v.word[i] = v.word[i] == kAbsent ? 0u : v.word[i];
    return v;
}

__device__ __forceinline__ bool is_there(const Vec16& v) {
    return v.word[0] != kAbsent && v.word[1] != kAbsent && v.word[2] != kAbsent && v.word[3] != kAbsent;
}

}  // namespace weave::fabric
