// Clusters of CTAs on the CPU: threads are coroutines that run in a random order, and what is asynchronous on the GPU
// (copies, multiplies) happens as late or as early as it may, so that a missing wait gives wrong results here too.
//
// The headers beside this one stand in for those of csrc whose functions are single instructions; kernels are compiled
// from csrc itself. Nothing is said about time, about the order of memory between a thread and the copy engine, nor
// about lanes of a warp that another instruction of the warp brings together anyway.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "coroutine.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH_FEAT_SM90_ALL
#define threadIdx (weave::emulated::running().index)
#define blockIdx (weave::emulated::running().cta->block)
#define gridDim (weave::emulated::running().cta->grid)

struct int4 {
    int x, y, z, w;
};

inline int32_t min(int32_t a, int32_t b) {
    return a < b ? a : b;
}
inline int32_t max(int32_t a, int32_t b) {
    return a > b ? a : b;
}
inline float __expf(float x) {
    return expf(x);
}
inline float __fdividef(float a, float b) {
    return a / b;
}

struct __half;  // of kernels that no test runs

struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    // Rounded to even; NaN stays NaN.
    explicit __nv_bfloat16(float x) {
        uint32_t wide;
        memcpy(&wide, &x, 4);
        bits = x != x ? 0x7fff : static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
    explicit operator float() const {
        const uint32_t wide = uint32_t{bits} << 16;
        float value;
        memcpy(&value, &wide, 4);
        return value;
    }
};

namespace weave::emulated {

constexpr uint32_t kMostCtaThreads = 384;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSharedBytes = 228 << 10;

struct Dim {
    uint32_t x;
};

// Of one cluster.
struct Size {
    uint32_t ctas;
    uint32_t cta_threads;
};

// A barrier in shared memory (mbarrier): a phase ends when all arrivals have come and no bytes are missing.
struct Barrier {
    int32_t arrivals;
    int32_t pending;
    int64_t bytes = 0;
    uint32_t phase = 0;

    void settle() {
        if (pending < 0) throw std::runtime_error("more arrivals than a barrier was made for");
        if (pending == 0 && bytes == 0) {
            ++phase;
            pending = arrivals;
        }
    }
};

// Where a number of threads meet; the last one does something first.
struct Meeting {
    int32_t here = 0;
    uint32_t past = 0;
};

// A multiply that a warp group has begun: 64 rows by `columns`.
struct Multiply {
    int32_t columns;
    uint64_t a, b;
    bool transposed;           // the left operand's rows lie side by side
    std::vector<float*> sums;  // of each thread
};

struct MatrixStore {
    uint32_t to[32], word[32][4];
    int32_t lanes = 0;
};

struct Warp {
    Meeting meeting;
    int64_t exchanged[32];
    std::deque<MatrixStore> stores;
    uint64_t first_store = 0;
};

struct WarpGroup {
    Meeting meeting, named;
    std::deque<Multiply> multiplies;
    uint64_t first_multiply = 0;
};

struct Cta {
    Dim block, grid;
    uint32_t rank;
    std::vector<uint8_t> bytes = std::vector<uint8_t>(kSharedBytes + 1024, 0xff);  // NaN
    std::unordered_map<uint32_t, Barrier> barriers;
    Meeting meeting;
    Warp warps[kMostCtaThreads / 32];
    WarpGroup warp_groups[kMostCtaThreads / 128];

    uint8_t* memory() { return bytes.data() + (1024 - reinterpret_cast<uintptr_t>(bytes.data()) % 1024) % 1024; }
    Barrier& barrier(uint32_t at) {
        const auto found = barriers.find(at);
        if (found == barriers.end()) throw std::runtime_error("a barrier that was not made");
        return found->second;
    }
};

struct Thread {
    Place place;
    std::unique_ptr<uint8_t[]> stack{new uint8_t[kStackBytes]};
    Dim index;
    Cta* cta;
    bool ended = false;
    std::function<bool()> ready;  // empty: it can run
    std::vector<std::function<void()>> chunks;
    uint64_t num_stores = 0, num_multiplies = 0;
    std::vector<uint64_t> groups;  // of multiplies: how many had begun at the end of each

    Warp& warp() { return cta->warps[index.x / 32]; }
    WarpGroup& warp_group() { return cta->warp_groups[index.x / 128]; }
};

struct Cluster {
    explicit Cluster(Size size) : size(size), ctas(size.ctas), threads(size.ctas * size.cta_threads) {}
    Size size;
    std::vector<Cta> ctas;
    std::vector<Thread> threads;
    std::vector<std::function<void()>> copies;
    Meeting meeting;
    Place scheduler;
    std::mt19937 random;
    std::function<void()> kernel;
    std::exception_ptr error;
    uint32_t rounds = 0, dozing = 0;  // a warp sleeps for many rounds
    bool ended = false;
};

inline Cluster* cluster = nullptr;
inline Thread* current = nullptr;

inline Thread& running() {
    return *current;
}

inline void await(std::function<bool()> ready) {
    if (ready()) return;
    Thread* self = current;
    self->ready = std::move(ready);
    switch_places(self->place, cluster->scheduler);
}

// Until `count` threads are here. `last` happens once, before any of them goes on.
inline void meet(Meeting& meeting, int32_t count, const std::function<void()>& last = [] {}) {
    const uint32_t past = meeting.past;
    if (++meeting.here == count) {
        last();
        meeting.here = 0;
        ++meeting.past;
        return;
    }
    await([&meeting, past] { return meeting.past != past; });
}

inline uint32_t address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - running().cta->memory());
}

inline void begin_thread() {
    try {
        cluster->kernel();
    } catch (...) {
        cluster->error = std::current_exception();
    }
    current->ended = true;
    switch_places(current->place, cluster->scheduler);
}

// Copies are taken in any order, each sooner or later by chance.
inline bool copy_some(Cluster& now) {
    std::vector<std::function<void()>> kept, due;
    const uint32_t eagerness = now.random() % 4;
    for (auto& copy : now.copies)
        (now.random() % 4 <= eagerness ? due : kept).push_back(std::move(copy));
    now.copies = std::move(kept);
    for (const auto& copy : due)
        copy();
    return !due.empty() || !now.copies.empty();
}

// The cluster at `index` of a grid, ready to run.
inline std::unique_ptr<Cluster> make_cluster(Size size, uint32_t index, uint32_t num_clusters, uint32_t seed,
                                             const std::function<void()>& kernel) {
    auto made = std::make_unique<Cluster>(size);
    made->kernel = kernel;
    made->random.seed(seed);
    for (uint32_t rank = 0; rank < size.ctas; ++rank) {
        Cta& cta = made->ctas[rank];
        cta.block.x = index * size.ctas + rank;
        cta.grid.x = num_clusters * size.ctas;
        cta.rank = rank;
        for (uint32_t at = 0; at < size.cta_threads; ++at) {
            Thread& thread = made->threads[rank * size.cta_threads + at];
            thread.index.x = at;
            thread.cta = &cta;
            make_place(thread.place, thread.stack.get(), kStackBytes, begin_thread);
        }
    }
    return made;
}

inline void expect_nothing_left(Cluster& now) {
    if (!now.copies.empty()) throw std::runtime_error("copies that nobody waited for");
    for (Cta& cta : now.ctas)
        for (const auto& [at, barrier] : cta.barriers)
            if (barrier.pending != barrier.arrivals || barrier.bytes != 0) throw std::runtime_error("an open phase");
}

// A round of the cluster's threads, of which some warps sleep, a whole CTA at times, and one for many rounds, as long as
// others can go on; false if none of them can.
inline bool run_round(Cluster& now) {
    constexpr uint32_t kDozingRounds = 1000;
    cluster = &now;
    bool moved = copy_some(now), slept = false, dozed = false;
    if (now.rounds++ % kDozingRounds == 0) now.dozing = now.random() % (now.threads.size() / 16);
    size_t num_ended = 0;
    const uint32_t sleeping_cta = now.random() % (2 * now.size.ctas), share = now.random() % 4;
    for (size_t warp = 0; warp < now.threads.size() / 32; ++warp) {
        const bool dozes = warp == now.dozing;
        const bool sleeps = dozes || warp / (now.size.cta_threads / 32) == sleeping_cta || now.random() % 4 < share;
        for (size_t at = warp * 32; at < warp * 32 + 32; ++at) {
            Thread& thread = now.threads[at];
            if (thread.ended) {
                ++num_ended;
                continue;
            }
            if (thread.ready && !thread.ready()) continue;
            dozed |= dozes;
            slept |= sleeps && !dozes;
            if (sleeps) continue;
            thread.ready = nullptr;
            current = &thread;
            switch_places(now.scheduler, thread.place);
            moved = true;
            if (now.error) std::rethrow_exception(now.error);
        }
    }
    if (!moved && !slept) now.dozing = static_cast<uint32_t>(now.threads.size());
    now.ended = num_ended == now.threads.size();
    if (now.ended) expect_nothing_left(now);
    return moved || slept || dozed || now.ended;
}

// Of a grid whose clusters share nothing.
inline void run_cluster(Size size, uint32_t index, uint32_t num_clusters, uint32_t seed,
                        const std::function<void()>& kernel) {
    const std::unique_ptr<Cluster> now = make_cluster(size, index, num_clusters, seed, kernel);
    while (!now->ended)
        if (!run_round(*now)) throw std::runtime_error("threads wait for ever");
}

// All clusters of a grid, of which `resident` run at a time: another one begins when one has ended. In each round some
// stand still, one of them for many rounds.
inline void run_grid(Size size, uint32_t num_clusters, uint32_t resident, uint32_t seed,
                     const std::function<void()>& kernel) {
    constexpr uint32_t kRounds = 200;
    std::mt19937 random(seed);
    std::vector<std::unique_ptr<Cluster>> running;
    for (uint32_t begun = 0, round = 0, still = 0; begun < num_clusters || !running.empty(); ++round) {
        for (; running.size() < resident && begun < num_clusters; ++begun)
            running.push_back(make_cluster(size, begun, num_clusters, seed + begun, kernel));
        if (round % kRounds == 0) still = random() % (2 * resident);
        bool moved = false;
        for (size_t at = 0; at < running.size(); ++at)
            moved |= at == still || random() % 3 == 0 || run_round(*running[at]);
        if (!moved) throw std::runtime_error("clusters wait for ever");
        for (size_t at = running.size(); at-- > 0;)
            if (running[at]->ended) running.erase(running.begin() + at);
    }
}

}  // namespace weave::emulated

inline void __syncwarp() {
    weave::emulated::meet(weave::emulated::running().warp().meeting, 32);
}

inline void __syncthreads() {
    weave::emulated::meet(weave::emulated::running().cta->meeting, weave::emulated::cluster->size.cta_threads);
}

namespace weave::emulated {

// What `found` says of the values of all lanes of the warp.
template <class Found>
auto of_lanes(int64_t value, const Found& found) {
    Thread& thread = running();
    Warp& warp = thread.warp();
    const uint32_t lane = thread.index.x % 32;
    warp.exchanged[lane] = value;
    meet(warp.meeting, 32);
    const auto result = found(warp.exchanged, lane);
    meet(warp.meeting, 32);
    return result;
}

}  // namespace weave::emulated

inline int64_t __shfl_up_sync(uint32_t, int64_t value, uint32_t step) {
    return weave::emulated::of_lanes(
        value, [step](const int64_t* lanes, uint32_t lane) { return lanes[lane < step ? lane : lane - step]; });
}
template <class T>
T __shfl_xor_sync(uint32_t, T value, uint32_t bits) {
    int64_t own = 0;
    memcpy(&own, &value, sizeof value);
    own = weave::emulated::of_lanes(own, [bits](const int64_t* lanes, uint32_t lane) { return lanes[lane ^ bits]; });
    memcpy(&value, &own, sizeof value);
    return value;
}
inline uint32_t __match_any_sync(uint32_t, int32_t value) {
    return weave::emulated::of_lanes(value, [](const int64_t* lanes, uint32_t lane) {
        uint32_t same = 0;
        for (uint32_t other = 0; other < 32; ++other)
            same |= static_cast<uint32_t>(lanes[other] == lanes[lane]) << other;
        return same;
    });
}
inline int32_t __popc(uint32_t bits) {
    return __builtin_popcount(bits);
}
template <class T>
T __ldcg(const T* from) {
    return *from;
}
inline int32_t atomicAdd(int32_t* to, int32_t value) {
    const int32_t before = *to;
    *to += value;
    return before;
}
