// Kernels of several GPUs at once on the CPU: threads are coroutines that run in a random order, and what ranks write
// to each other arrives late, in pieces of 8 bytes, in any order, as NVSHMEM allows:
//
//   a store to a peer's memory   each 8 bytes by themselves, some time later
//   a put                        the same, and its source may be read at any time until then, at once or in the end
//
// Ranks and warps sleep now and then, for a round or for as long as another rank needs to get ahead by a call.
//
// Only a kernel's own loads show it what has arrived. Kernels of one rank follow one another, those of different ranks
// do not wait for each other. A thread that polls in vain is not run again before something has changed; where nothing
// can change any more, its wait has timed out.
//
// The signal of a put arrives behind what that put brings, and orders nothing else. A store that is a release (signal, or store_relaxed behind a fence of its thread) arrives behind all that it orders:
// what its thread stored before, what other threads of its CTA stored before a barrier, and what kernels before stored.
//
// Nothing is said about time, nor about a thread's stores to its own GPU (which others see at once).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "../coroutine.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define threadIdx (weave::emulated::running().index)
#define blockIdx (weave::emulated::running().cta->block)
#define blockDim (weave::emulated::running().cta->threads)
#define gridDim (weave::emulated::running().cta->grid)

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    uint32_t x, y, z, w;
};

inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
template <typename T>
T __ldg(const T* from) {
    return *from;
}

namespace weave::emulated {

constexpr size_t kStackBytes = 32 << 10;
constexpr int kSharedFloats = 64;
constexpr uint32_t kLongest = 400;  // rounds of the scheduler that anything sleeps or travels

struct Dim {
    uint32_t x;
};

// Where a number of threads meet.
struct Meeting {
    uint32_t here = 0, past = 0;
};

struct Rank;

struct Cta {
    Rank* rank;
    Dim block, threads, grid;
    Meeting meeting;
    std::vector<Meeting> warps;
    std::vector<float> exchanged;
    float shared[kSharedFloats];
};

struct Thread {
    Place place;
    std::unique_ptr<uint8_t[]> stack{new uint8_t[kStackBytes]};
    Dim index;
    Cta* cta;
    bool ended = false, polls = false, has_fenced = false;
    uint64_t num_puts = 0;        // with a signal
    uint64_t polled_at = 0;       // what had changed by then
    std::function<bool()> ready;  // empty: it can run
};

// A grid in flight, and those behind it in the stream.
struct Rank {
    int32_t index;
    std::vector<uint8_t> arena;
    std::vector<std::function<void()>> kernels;  // the text that every thread of a call runs
    std::vector<uint32_t> grids;
    size_t next = 0;
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<Thread> threads;
    uint64_t sleeps_until = 0;  // a round of the scheduler
    std::vector<uint64_t> warp_sleeps_until;
};

// Who sent something, and when: as far as a release orders it.
struct Sender {
    const Rank* rank = nullptr;
    size_t kernel = 0;
    uint32_t cta = 0, thread = 0;
    uint32_t barriers = 0;  // of the CTA, so far
    uint64_t number = 0;    // among all that was sent
};

// 8 bytes on their way; with a source, that is read on arrival.
struct Flight {
    uint64_t* to;
    const uint64_t* from;
    uint64_t value;
    uint64_t not_before = 0;  // a round of the scheduler
    Sender sender;
    bool is_release = false;
    uint64_t put = 0;  // of a put with a signal, 0: none: its signal arrives behind all that it brings, and only that
    bool is_signal = false;
};

struct World {
    std::vector<Rank> ranks;
    std::vector<Flight> flights;
    uint64_t num_changes = 0, round = 0, num_sent = 0;
    bool is_stuck = false;
    bool reads_own_only = false;  // a load from another rank's arena is an error
    uint32_t cta_threads;
    std::mt19937 random;
    Place scheduler;
    std::exception_ptr error;
};

inline World* world = nullptr;
inline Thread* current = nullptr;

inline Thread& running() {
    return *current;
}

inline void leave() {
    switch_places(current->place, world->scheduler);
}

inline void meet(Meeting& meeting, uint32_t count) {
    const uint32_t past = meeting.past;
    ++world->num_changes;
    if (++meeting.here == count) {
        meeting.here = 0;
        ++meeting.past;
        return;
    }
    current->ready = [&meeting, past] { return meeting.past != past; };
    leave();
}

// After a load that did not find what it waits for: true if nothing can change that.
inline bool polled_in_vain() {
    if (world->is_stuck) return true;
    current->polls = true;
    current->polled_at = world->num_changes;
    leave();
    current->polls = false;
    return world->is_stuck;
}

inline bool is_own(const void* address) {
    const std::vector<uint8_t>& arena = current->cta->rank->arena;
    return address >= arena.data() && address < arena.data() + arena.size();
}

inline bool is_of_another(const void* address) {
    for (const Rank& rank : world->ranks)
        if (&rank != current->cta->rank && address >= rank.arena.data() &&
            address < rank.arena.data() + rank.arena.size())
            return true;
    return false;
}

inline void deliver(const Flight& flight) {
    *flight.to = flight.from != nullptr ? *flight.from : flight.value;
    ++world->num_changes;
}

// Mostly 0; else until when something stays where it is.
inline uint64_t some_delay(uint32_t one_in) {
    return world->random() % one_in == 0 ? world->round + world->random() % kLongest : 0;
}

inline Sender sender_now() {
    const Cta& cta = *current->cta;
    return {cta.rank, cta.rank->next, cta.block.x, current->index.x, cta.meeting.past, ++world->num_sent};
}

inline bool is_ordered(const Sender& before, const Sender& release) {
    if (before.rank != release.rank || before.number >= release.number) return false;
    if (before.kernel != release.kernel) return true;
    return before.cta == release.cta && (before.thread == release.thread || before.barriers < release.barriers);
}

// Whether nothing that a release orders is still on its way.
inline bool may_arrive(const Flight& flight) {
    for (const Flight& other : world->flights) {
        if (flight.is_signal && !other.is_signal && other.put == flight.put) return false;
        if (flight.is_release && is_ordered(other.sender, flight.sender)) return false;
    }
    return true;
}

// At once, soon or late, by chance.
inline void send(Flight flight) {
    flight.sender = sender_now();
    if (may_arrive(flight) && world->random() % 4 == 0) return deliver(flight);
    flight.not_before = some_delay(8);
    world->flights.push_back(flight);
}

inline void begin_thread() {
    try {
        Rank& rank = *current->cta->rank;
        rank.kernels[rank.next]();
    } catch (...) {
        if (!world->error) world->error = std::current_exception();
    }
    current->ended = true;
    ++world->num_changes;
    leave();
}

inline void launch(Rank& rank) {
    const uint32_t grid = rank.grids[rank.next], threads = world->cta_threads;
    rank.ctas.clear();
    rank.threads = std::vector<Thread>(size_t{grid} * threads);
    rank.warp_sleeps_until.assign(rank.threads.size() / 32, 0);
    for (uint32_t block = 0; block < grid; ++block) {
        rank.ctas.push_back(std::make_unique<Cta>());
        Cta& cta = *rank.ctas.back();
        cta.rank = &rank;
        cta.block.x = block;
        cta.threads.x = threads;
        cta.grid.x = grid;
        cta.warps.resize(threads / 32);
        cta.exchanged.resize(threads);
        for (uint32_t at = 0; at < threads; ++at) {
            Thread& thread = rank.threads[block * threads + at];
            thread.index.x = at;
            thread.cta = &cta;
            make_place(thread.place, thread.stack.get(), kStackBytes, begin_thread);
        }
    }
    ++world->num_changes;
}

// In a random order, some of those that are due. Whether there was one.
inline bool deliver_some() {
    std::vector<Flight>& flights = world->flights;
    const uint32_t eagerness = world->random() % 4;
    bool moved = false;
    for (size_t at = 0; at < flights.size();) {
        std::swap(flights[at], flights[flights.size() - 1 - world->random() % (flights.size() - at)]);
        if (flights[at].not_before > world->round || world->random() % 4 > eagerness || !may_arrive(flights[at])) {
            ++at;
            continue;
        }
        const Flight flight = flights[at];
        flights[at] = flights.back();
        flights.pop_back();
        deliver(flight);
        moved = true;
    }
    return moved;
}

// Whether any thread of the rank ran. `all`: nobody sleeps.
inline bool step(Rank& rank, bool all) {
    bool moved = false;
    size_t num_ended = 0;
    const uint32_t share = all ? 0 : world->random() % 4;
    const size_t warps = rank.threads.size() / 32;
    for (size_t turn = 0, first = warps > 0 ? world->random() % warps : 0; turn < warps; ++turn) {
        const size_t warp = (first + turn) % warps;
        if (world->random() % 4 < share) continue;
        if (!all && rank.warp_sleeps_until[warp] > world->round) continue;
        rank.warp_sleeps_until[warp] = some_delay(32);
        for (size_t at = warp * 32; at < warp * 32 + 32; ++at) {
            Thread& thread = rank.threads[at];
            if (thread.ended || (thread.ready && !thread.ready())) continue;
            if (thread.polls && thread.polled_at == world->num_changes && !world->is_stuck) continue;
            moved = true;
            thread.ready = nullptr;
            current = &thread;
            switch_places(world->scheduler, thread.place);
            if (world->error) std::rethrow_exception(world->error);
        }
    }
    for (const Thread& thread : rank.threads)
        num_ended += thread.ended;
    if (num_ended == rank.threads.size() && rank.next < rank.kernels.size()) {
        if (!rank.threads.empty()) ++rank.next;
        rank.threads.clear();
        if (rank.next < rank.kernels.size()) launch(rank);
        return true;
    }
    return moved;
}

// Until every rank has run all of its kernels. Throws what a kernel throws, or where threads wait for ever.
inline void run(World& now) {
    world = &now;
    for (int idle = 0;; ++now.round) {
        const bool all = idle > 0;
        bool moved = deliver_some(), ended = true;
        for (Rank& rank : now.ranks) {
            if (all || rank.sleeps_until <= now.round) {
                rank.sleeps_until = some_delay(32);
                moved |= step(rank, all);
            }
            ended &= rank.next == rank.kernels.size();
        }
        if (ended) break;
        if (moved) {
            idle = 0;
            continue;
        }
        // Nobody could: all wake up, and all that travels is due.
        now.round += kLongest;
        if (++idle < 3 || !now.flights.empty()) continue;
        if (now.is_stuck) throw std::runtime_error("threads wait for ever");
        now.is_stuck = true;
    }
    for (now.round += kLongest; !now.flights.empty();)
        deliver_some();
}

}  // namespace weave::emulated

inline void __syncthreads() {
    weave::emulated::Cta& cta = *weave::emulated::running().cta;
    weave::emulated::meet(cta.meeting, cta.threads.x);
}

inline float __shfl_xor_sync(uint32_t, float value, int mask) {
    weave::emulated::Thread& thread = weave::emulated::running();
    weave::emulated::Cta& cta = *thread.cta;
    const uint32_t at = thread.index.x;
    cta.exchanged[at] = value;
    weave::emulated::meet(cta.warps[at / 32], 32);
    const float found = cta.exchanged[at ^ static_cast<uint32_t>(mask)];
    weave::emulated::meet(cta.warps[at / 32], 32);
    return found;
}

inline uint32_t __ballot_sync(uint32_t, bool value) {
    weave::emulated::Thread& thread = weave::emulated::running();
    weave::emulated::Cta& cta = *thread.cta;
    const uint32_t at = thread.index.x, first = at / 32 * 32;
    cta.exchanged[at] = value ? 1.0f : 0.0f;
    weave::emulated::meet(cta.warps[at / 32], 32);
    uint32_t found = 0;
    for (uint32_t lane = 0; lane < 32; ++lane)
        found |= static_cast<uint32_t>(cta.exchanged[first + lane] != 0.0f) << lane;
    weave::emulated::meet(cta.warps[at / 32], 32);
    return found;
}
inline int32_t __popc(uint32_t bits) {
    return __builtin_popcount(bits);
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}

inline void __threadfence() {}

inline unsigned long long atomicAdd(unsigned long long* word, unsigned long long value) {
    const unsigned long long before = *word;
    *word += value;
    return before;
}

inline uint32_t atomicAdd(uint32_t* word, uint32_t value) {
    const uint32_t before = *word;
    *word += value;
    return before;
}
