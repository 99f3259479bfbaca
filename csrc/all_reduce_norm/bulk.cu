// The bulk form of all_reduce_norm: two steps of bulk copies (TMA) that only push, each with a signal behind it.
//
// Rows are taken in units of about 16 KiB. Unit j of CTA c is unit c + j * (CTAs) of a share, on every rank, so CTA c
// deals with CTA c of each peer alone. In a CTA
//   - one thread, the loader, brings partial rows into shared memory, and later what peers pushed here;
//   - two teams of threads reduce the units that this rank owns and finish them in registers, into shared memory;
//   - one thread, the sender, pushes all of that: partial rows to their owners' staging regions, finished rows to all
//     output regions, what has come from peers to the caller's tensors; and sees it arrive;
//   - one warp tells the peers. A fence at system scope waits for everything that its SM has under way (5 us and more
//     while copies flow), so this warp does nothing else: it looks how far the sender is, fences once, signals it all.
//
// One staging and one output region are enough: a rank that has finished a call has every row of every owner, so all
// owners have read their staging; and a row is pushed only after all ranks' partial rows of that call have come, so each
// of them has finished the call before and has copied its output.
#include <algorithm>

#include "all_reduce_norm/finish.cuh"

namespace weave::gpu {
namespace {

using fabric::Header;
using fabric::kMaxCtas;
using fabric::kMaxWorld;
using fabric::Watch;

constexpr int kUnitBytes = 16 << 10;
constexpr int kMaxStages = 8;
// Copies out that may still be reading shared memory when the next one is taken up.
constexpr int kReading = 4;
// Copies of one CTA on their way at once: enough of them, over all CTAs, to keep the link busy for a round trip. More
// would only queue, and signals behind them.
constexpr int kMaxTravelling = 8;
constexpr int kCopiesUnderWay = 96;
constexpr int kNumJobs = 32;
constexpr int kWorkers = 3;  // warps beside the teams: loader, sender, signals
constexpr int kTeams = fabric::kMaxTeams;
constexpr int kTeamThreads = 256;
constexpr int kTeamWarps = kTeamThreads / 32;
constexpr int kThreads = 32 * kWorkers + kTeams * kTeamThreads;
constexpr int kScaleBytes = 16;
constexpr int kMostVecs = 8;

// Sizes that all CTAs of all ranks share.
struct BulkLayout {
    int32_t rows_a_unit;
    int32_t row_bytes;       // of a partial row and a row of the sum
    int32_t out_bytes;       // of a finished row
    int32_t out_row_bytes;   // the same with its scale
    int64_t sum_at;          // where rows of the sum begin in the output region
    int32_t stages;          // of kUnitBytes, between loader and sender
    int32_t places;          // that a team has for finished rows, used in turn
    int32_t place_bytes;
    int32_t in_place;        // finished rows stay in the output region
    int32_t travelling;      // copies out on their way at once
};

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
#define WEAVE_BULK 1
#endif

#ifdef WEAVE_BULK

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool is_over(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

__device__ __forceinline__ void copy_in(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_out(void* to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// At most kPending of this thread's groups have not arrived where they go / still read shared memory.
template <int kPending>
__device__ __forceinline__ void await_arrival() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

template <int kPending>
__device__ __forceinline__ void await_reading() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void await_arrival(int32_t pending) {
    switch (pending) {
        case 0: return await_arrival<0>();
        case 1: return await_arrival<1>();
        case 2: return await_arrival<2>();
        case 3: return await_arrival<3>();
        case 4: return await_arrival<4>();
        case 5: return await_arrival<5>();
        case 6: return await_arrival<6>();
        case 7: return await_arrival<7>();
        default: return await_arrival<kMaxTravelling>();
    }
}

// Bulk copies and ordinary accesses are two ways to memory. Before a copy reads what ordinary stores wrote:
__device__ __forceinline__ void order_shared_stores_before_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void order_accesses_before_copies() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

// Acquire and release among the threads of a CTA. (__threadfence_block() is sequentially consistent, and dearer.)
__device__ __forceinline__ void order_in_cta() {
    asm volatile("fence.acq_rel.cta;" ::: "memory");
}

// One copy out, by number: a stage that the loader filled, or a unit that a team finished.
struct Job {
    char* to;
    uint32_t bytes;
    int32_t owner;  // whom it brings partial rows, or -1
    uint32_t unit;  // how many units that makes with it; 0: this is not the last of its unit
    int32_t team;   // that finished it, or -1
};

// How far the parts of a CTA are. Each word has one writer.
struct Progress {
    volatile uint32_t num_loading;           // loader: stages given to copies in
    volatile uint32_t num_released;          // sender: stages that may be filled again
    volatile uint32_t finished[kTeams];      // teams: units that wait in their places
    volatile uint32_t taken[kTeams];         // sender: units whose places are free again
    volatile uint32_t pushed[kMaxWorld];     // sender, by owner: units whose partial rows have arrived there
    volatile uint32_t published[kTeams];     // sender: finished units that have arrived everywhere
    volatile uint32_t all_loaded;            // loader: no more stages will come
    uint64_t collected[kMaxWorld][kTeams];   // loader's own: words of peers that it has seen
    Job stage_jobs[kMaxStages];              // loader -> sender
};

// Everything before it is seen by whoever sees the word.
__device__ __forceinline__ void post(volatile uint32_t& word, uint32_t value) {
    order_in_cta();
    word = value;
}

__device__ __forceinline__ void await_word(volatile uint32_t& word, uint32_t value) {
    while (static_cast<int32_t>(word - value) < 0)
        __nanosleep(20);
    order_in_cta();
}

// The threads that finish a row. Sums are made in one order.
struct Team {
    float (*parts)[kTeamWarps];  // by reduction parity
    int index;
    int thread;
    uint32_t num_reductions = 0;

    __device__ __forceinline__ void meet() const {
        asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "n"(kTeamThreads) : "memory");
    }
    template <class Combine>
    __device__ __forceinline__ float reduce(float value, const Combine& combine) {
        float* row = parts[num_reductions++ & 1];
        value = combine(value);
        if ((thread & 31) == 0) row[thread >> 5] = value;
        meet();
        return combine((thread & 31) < kTeamWarps ? row[thread & 31] : 0.0f);
    }
    struct Sum {
        __device__ __forceinline__ float operator()(float value) const { return warp_sum(value); }
    };
    struct Max {
        __device__ __forceinline__ float operator()(float value) const { return warp_max(value); }
    };
    __device__ __forceinline__ float sum(float value) { return reduce(value, Sum{}); }
    __device__ __forceinline__ float max(float value) { return reduce(value, Max{}); }
};

// What every part of the kernel knows.
struct Work {
    const Call& call;
    const BulkLayout& layout;
    const Watch& watch;
    Progress& progress;
    uint64_t epoch;  // of the words, above the count of units

    __device__ __forceinline__ Header* header(int32_t rank) const { return reinterpret_cast<Header*>(call.base[rank]); }
    __device__ __forceinline__ char* output(int32_t rank) const { return call.base[rank] + call.regions.output(); }
    __device__ __forceinline__ uint64_t word(int32_t count) const { return epoch | static_cast<uint32_t>(count); }
    // Unit j of this CTA: the index of its first row in a share, and how many rows it has of `owner`'s.
    __device__ __forceinline__ int64_t first(int32_t j) const {
        return (blockIdx.x + static_cast<int64_t>(j) * gridDim.x) * layout.rows_a_unit;
    }
    __device__ __forceinline__ int32_t unit(int32_t owner, int64_t index) const {
        const int64_t left = call.begin[owner + 1] - call.begin[owner] - index;
        return static_cast<int32_t>(left < layout.rows_a_unit ? (left < 0 ? 0 : left) : layout.rows_a_unit);
    }
    // How many units of this CTA `owner`'s share has.
    __device__ __forceinline__ uint32_t num_units(int32_t owner) const {
        const int32_t rows = call.begin[owner + 1] - call.begin[owner];
        const uint32_t units = (rows + layout.rows_a_unit - 1) / layout.rows_a_unit;
        return units > blockIdx.x ? (units - blockIdx.x - 1) / gridDim.x + 1 : 0;
    }
    __device__ __forceinline__ int32_t behind(int32_t step) const {
        const int32_t rank = call.rank + step;
        return rank < call.world ? rank : rank - call.world;
    }
};

// Fills stages: this rank's partial rows, unit by unit, owners in turn; then what peers pushed into the output region.
struct Loader {
    const Work work;
    uint32_t stage;    // address of the first one
    uint32_t barrier;  // address of the first stage's
    uint32_t num_loaded = 0;

    __device__ __forceinline__ void load(const char* from, const Job& job) {
        const uint32_t at = num_loaded % work.layout.stages;
        if (num_loaded >= work.layout.stages)
            await_word(work.progress.num_released, num_loaded - work.layout.stages + 1);
        work.progress.stage_jobs[at] = job;
        expect_bytes(barrier + at * 8, job.bytes);
        copy_in(stage + at * kUnitBytes, from, job.bytes, barrier + at * 8);
        post(work.progress.num_loading, ++num_loaded);
    }

    // `bytes` in pieces that fit a stage.
    __device__ __forceinline__ void load_all(const char* from, char* to, uint32_t bytes, int32_t owner, uint32_t unit) {
        for (uint32_t done = 0; done < bytes; done += kUnitBytes) {
            const uint32_t piece = min(bytes - done, static_cast<uint32_t>(kUnitBytes));
            load(from + done, Job{to + done, piece, owner, done + piece == bytes ? unit : 0, -1});
        }
    }

    __device__ __forceinline__ void run() {
        const Call& call = work.call;
        const int64_t row_bytes = work.layout.row_bytes;
        for (int32_t j = 0; work.first(j) < call.share; ++j) {
            const int64_t index = work.first(j);
            for (int32_t step = 1; step < call.world; ++step) {
                const int32_t owner = work.behind(step);
                const int32_t rows = work.unit(owner, index);
                char* to = call.base[owner] + call.regions.staging() +
                           (static_cast<int64_t>(call.world - 1 - step) * call.share + index) * row_bytes;
                const char* from = static_cast<const char*>(call.partial) + (call.begin[owner] + index) * row_bytes;
                load_all(from, to, rows * row_bytes, owner, j + 1);
            }
        }
        for (int32_t j = 0; work.first(j) < call.share; ++j)
            for (int32_t step = 1; step < call.world; ++step)
                collect(work.behind(step), work.first(j), j);
        post(work.progress.all_loaded, 1);
    }

    __device__ __forceinline__ void collect(int32_t owner, int64_t index, int32_t j) {
        const Call& call = work.call;
        const BulkLayout& layout = work.layout;
        const int32_t rows = work.unit(owner, index);
        if (rows == 0) return;
        await_unit(owner, j);
        const int64_t token = call.begin[owner] + index;
        const char* output = work.output(call.rank);
        if (call.quant == QuantKind::kPerToken) {
            // Rows that carry a scale are taken one by one, since the caller's tensor has no room for it.
            for (int32_t i = 0; i < rows; ++i) {
                const char* from = output + (token + i) * layout.out_row_bytes;
                static_cast<float*>(call.row_scale)[token + i] =
                    *reinterpret_cast<const volatile float*>(from + layout.out_bytes);
                if (!layout.in_place)
                    load_all(from, static_cast<char*>(call.normed) + (token + i) * layout.out_bytes, layout.out_bytes, -1, 0);
            }
        } else if (call.normed != nullptr && !layout.in_place) {
            load_all(output + token * layout.out_bytes, static_cast<char*>(call.normed) + token * layout.out_bytes,
                     rows * layout.out_bytes, -1, 0);
        }
        if (call.sum_whole && !layout.in_place) {
            load_all(output + layout.sum_at + token * layout.row_bytes,
                     static_cast<char*>(call.sum) + token * layout.row_bytes, rows * layout.row_bytes, -1, 0);
        }
    }

    __device__ __forceinline__ void await_unit(int32_t owner, int32_t j) {
        const int32_t team = j % kTeams;
        const uint64_t wanted = work.word(j / kTeams + 1);
        uint64_t& seen = work.progress.collected[owner][team];
        if (seen >= wanted) return;
        seen = fabric::wait(&work.header(work.call.rank)->rows[owner][blockIdx.x * kTeams + team], wanted, work.watch,
                            owner, fabric::Slot::kRows);
        order_accesses_before_copies();
    }
};

// Pushes stages and finished units as they come, and reports what has arrived. Copies out are numbered; `jobs` keeps what
// each of them is until it has arrived.
struct Sender {
    const Work work;
    Job* jobs;
    uint32_t stage, barrier;
    uint32_t places;  // address of the first team's first
    uint32_t num_out = 0, num_read = 0, num_arrived = 0;
    uint32_t num_stages = 0, num_released = 0;
    uint32_t units[kTeams] = {}, left[kTeams] = {};

    __device__ __forceinline__ void run() {
        const uint32_t own_units = work.num_units(work.call.rank);
#pragma unroll
        for (int team = 0; team < kTeams; ++team)
            left[team] = (own_units + kTeams - 1 - team) / kTeams;
        for (;;) {
            // Partial rows before finished ones: peers wait for those to have anything to finish. Collected rows last.
            const bool sent = send_stage(true) || send_finished() || send_stage(false);
            if (sent) {
                await_reading<kReading>();
                release(kReading);
                if (num_out - num_arrived > work.layout.travelling) {
                    await_arrival(work.layout.travelling);
                    report();
                }
                continue;
            }
            // Nothing to send: see what has arrived meanwhile.
            await_reading<0>();
            release(0);
            if (num_out != num_arrived) {
                await_arrival(num_out - num_arrived - 1);
                report();
                continue;
            }
            bool done = work.progress.all_loaded != 0 && work.progress.num_loading == num_stages;
#pragma unroll
            for (int team = 0; team < kTeams; ++team)
                done &= units[team] == left[team];
            if (done) return;
        }
    }

    __device__ __forceinline__ bool send_finished() {
#pragma unroll
        for (int team = 0; team < kTeams; ++team) {
            if (units[team] == left[team] || work.progress.finished[team] == units[team]) continue;
            order_in_cta();
            push_unit(team);
            return true;
        }
        return false;
    }

    __device__ __forceinline__ void push_unit(int32_t team) {
        const Call& call = work.call;
        const BulkLayout& layout = work.layout;
        const uint32_t number = units[team]++;
        const int64_t index = work.first(number * kTeams + team);
        const int32_t count = work.unit(call.rank, index);
        const int64_t first = call.begin[call.rank] + index;
        const uint32_t place = places + (team * layout.places + number % layout.places) * layout.place_bytes;
        const uint32_t sums = place + layout.rows_a_unit * layout.out_row_bytes;
        for (int step = 1; step < call.world; ++step) {
            char* output = work.output(work.behind(step));
            if (call.normed != nullptr)
                copy_out(output + first * layout.out_row_bytes, place, count * layout.out_row_bytes);
            if (call.sum_whole)
                copy_out(output + layout.sum_at + first * layout.row_bytes, sums, count * layout.row_bytes);
        }
        if (call.normed != nullptr) {
            if (layout.in_place) {
                copy_out(work.output(call.rank) + first * layout.out_row_bytes, place, count * layout.out_row_bytes);
            } else if (layout.out_row_bytes == layout.out_bytes) {
                copy_out(static_cast<char*>(call.normed) + first * layout.out_bytes, place, count * layout.out_bytes);
            } else {
                for (int32_t i = 0; i < count; ++i)
                    copy_out(static_cast<char*>(call.normed) + (first + i) * layout.out_bytes,
                             place + i * layout.out_row_bytes, layout.out_bytes);
            }
        }
        commit(Job{nullptr, 0, -1, number + 1, team});
    }

    __device__ __forceinline__ bool send_stage(bool partial) {
        if (work.progress.num_loading == num_stages) return false;
        order_in_cta();
        const uint32_t at = num_stages % work.layout.stages;
        if (partial != (work.progress.stage_jobs[at].owner >= 0)) return false;
        if (!is_over(barrier + at * 8, (num_stages / work.layout.stages) & 1)) return false;
        ++num_stages;
        const Job job = work.progress.stage_jobs[at];
        copy_out(job.to, stage + at * kUnitBytes, job.bytes);
        commit(job);
        return true;
    }

    __device__ __forceinline__ void commit(const Job& job) {
        commit_copies();
        jobs[num_out++ % kNumJobs] = job;
    }

    // All but the last `reading` copies have been read out of shared memory.
    __device__ __forceinline__ void release(uint32_t reading) {
        while (num_out - num_read > reading) {
            const Job& job = jobs[num_read++ % kNumJobs];
            if (job.team < 0) {
                post(work.progress.num_released, ++num_released);
            } else {
                post(work.progress.taken[job.team], job.unit);
            }
        }
    }

    // The oldest copy out has arrived.
    __device__ __forceinline__ void report() {
        const Job& job = jobs[num_arrived++ % kNumJobs];
        if (job.unit == 0) return;
        if (job.team >= 0) {
            post(work.progress.published[job.team], job.unit);
        } else if (job.owner >= 0) {
            post(work.progress.pushed[job.owner], job.unit);
        }
    }
};

template <typename T, int kMaxW, int kVecs>
struct Finisher {
    static constexpr int E = kElements<T>;
    const Work work;
    const Lanes& lanes;
    Team& team;
    char* places;  // the team's
    int32_t out_packet;

    // The sum over ranks of row `index` of this rank's share, in x: the own part first, then the slots in order. Only the
    // owner sums a row, so any fixed order is the same for everyone.
    __device__ __forceinline__ void reduce(int64_t index, int64_t row, float (&x)[kVecs][E],
                                           Vec16 (&residual)[kVecs]) const {
        const Call& call = work.call;
        const int64_t row_bytes = work.layout.row_bytes, slot_bytes = call.share * row_bytes;
        const char* own = static_cast<const char*>(call.partial) + row * row_bytes + lanes.first * 16;
        const char* before = static_cast<const char*>(call.residual) + row * row_bytes + lanes.first * 16;
        const char* slots = call.base[call.rank] + call.regions.staging() + index * row_bytes + lanes.first * 16;
        constexpr int kAtOnce = 2;
        constexpr int kStride = kTeamThreads * 16;
#pragma unroll
        for (int j0 = 0; j0 < kVecs; j0 += kAtOnce) {
            Vec16 part[kMaxW][kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const int j = j0 + k;
                part[0][k] = lanes.has(j) ? fabric::load(own + j * kStride) : Vec16{};
#pragma unroll
                for (int slot = 1; slot < kMaxW; ++slot)
                    part[slot][k] = lanes.has(j) && slot < call.world
                                        ? fabric::load(slots + (slot - 1) * slot_bytes + j * kStride)
                                        : Vec16{};
                residual[j] = lanes.has(j) && call.residual != nullptr ? fabric::load(before + j * kStride) : Vec16{};
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                fabric::widen(part[0][k], x[j0 + k], static_cast<const T*>(nullptr));
#pragma unroll
                for (int slot = 1; slot < kMaxW; ++slot) {
                    float widened[E];
                    fabric::widen(part[slot][k], widened, static_cast<const T*>(nullptr));
#pragma unroll
                    for (int i = 0; i < E; ++i)
                        x[j0 + k][i] += widened[i];
                }
            }
        }
    }

    // Unit number `number` of this team.
    __device__ __forceinline__ void unit(uint32_t number, int32_t j, int64_t index, int32_t count) {
        const Call& call = work.call;
        const BulkLayout& layout = work.layout;
        const int lane = team.thread & 31;
        if (lane < call.world && lane != call.rank)
            fabric::wait(&work.header(call.rank)->partial[lane][blockIdx.x], work.word(j + 1), work.watch, lane,
                         fabric::Slot::kPartial);
        __syncwarp();
        const int64_t first = call.begin[call.rank] + index;
        char* place = places + number % layout.places * layout.place_bytes;
        for (int32_t i = 0; i < count; ++i) {
            float x[kVecs][E];
            Vec16 residual[kVecs];
            reduce(index + i, first + i, x, residual);
            // The place is free once what it held before was read out of it.
            if (i == 0 && number >= static_cast<uint32_t>(layout.places))
                await_word(work.progress.taken[team.index], number - layout.places + 1);
            char* sums = place + layout.rows_a_unit * layout.out_row_bytes + i * layout.row_bytes;
            char* sum_row = static_cast<char*>(call.sum) + (first + i) * layout.row_bytes;
            finish<T>(x, call, lanes, residual, team, LateWeight<T, kVecs>{}, [&](int j, const Vec16& sum) {
                if (call.sum != nullptr) fabric::store(sum_row + lanes.at(j) * 16, sum);
                if (call.sum_whole) *reinterpret_cast<Vec16*>(sums + lanes.at(j) * 16) = sum;
            });
            float scale;
            const float inverse = inverse_scale<T>(x, call, lanes, scale, team);
            put(place, i, first + i, x, inverse, scale);
        }
        order_shared_stores_before_copies();
        team.meet();
        if (team.thread == 0) post(work.progress.finished[team.index], number + 1);
    }

    __device__ __forceinline__ void put(char* place, int32_t i, int64_t row, float (&x)[kVecs][E], float inverse,
                                        float scale) const {
        const Call& call = work.call;
        char* normed = place + i * work.layout.out_row_bytes;
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j) || call.normed == nullptr) continue;
            const Packet packet = packed<T>(x[j], call.out_kind, inverse);
            char* to = normed + lanes.at(j) * out_packet;
            if (out_packet >= 16) *reinterpret_cast<Vec16*>(to) = packet.part[0];
            if (out_packet == 32) *reinterpret_cast<Vec16*>(to + 16) = packet.part[1];
            if (out_packet == 8)
                *reinterpret_cast<uint2*>(to) = make_uint2(packet.part[0].word[0], packet.part[0].word[1]);
            if (out_packet == 4) *reinterpret_cast<uint32_t*>(to) = packet.part[0].word[0];
        }
        if (call.quant == QuantKind::kPerToken && team.thread == 0) {
            *reinterpret_cast<float*>(normed + work.layout.out_bytes) = scale;
            static_cast<float*>(call.row_scale)[row] = scale;
        }
    }

    __device__ __forceinline__ void run() {
        uint32_t number = 0;
        for (int32_t j = team.index;; j += kTeams, ++number) {
            const int64_t index = work.first(j);
            const int32_t count = work.unit(work.call.rank, index);
            if (count == 0) return;
            unit(number, j, index, count);
        }
    }
};

// The warp that publishes what the others have done: lane `step - 1` to the rank `step` behind.
__device__ __forceinline__ void publish(const Work work) {
    const Call& call = work.call;
    const int32_t step = (threadIdx.x & 31) + 1;
    const bool active = step < call.world;
    const int32_t peer = active ? work.behind(step) : call.rank;
    const uint32_t own_units = work.num_units(call.rank);
    uint32_t last[kTeams + 1] = {}, left[kTeams + 1] = {}, now[kTeams + 1];
    if (active) {
        left[kTeams] = work.num_units(peer);
        for (int team = 0; team < kTeams; ++team)
            left[team] = (own_units + kTeams - 1 - team) / kTeams;
    }
    for (;;) {
        bool moved = false, done = true;
#pragma unroll
        for (int i = 0; i <= kTeams; ++i) {
            now[i] = i < kTeams ? work.progress.published[i] : work.progress.pushed[peer];
            if (!active) now[i] = 0;
            moved |= now[i] != last[i];
            done &= last[i] == left[i];
        }
        if (__all_sync(0xffffffffu, done)) return;
        if (!__any_sync(0xffffffffu, moved)) {
            __nanosleep(32);
            continue;
        }
        fabric::fence();
        if (!active) continue;
        Header* header = work.header(peer);
        if (now[kTeams] != last[kTeams])
            fabric::relaxed_signal(&header->partial[call.rank][blockIdx.x], work.word(now[kTeams]));
#pragma unroll
        for (int team = 0; team < kTeams; ++team)
            if (now[team] != last[team])
                fabric::relaxed_signal(&header->rows[call.rank][blockIdx.x * kTeams + team], work.word(now[team]));
#pragma unroll
        for (int i = 0; i <= kTeams; ++i)
            last[i] = now[i];
    }
}

#endif  // WEAVE_BULK

template <typename T, int kMaxW, int kVecs>
__global__ void __launch_bounds__(kThreads, 1)
    bulk(const __grid_constant__ Call call, const __grid_constant__ BulkLayout layout) {
#ifdef WEAVE_BULK
    extern __shared__ __align__(128) char memory[];
    __shared__ float parts[kTeams][2][kTeamWarps];
    __shared__ alignas(8) uint64_t barriers[kMaxStages];
    __shared__ Progress progress;
    __shared__ Job jobs[kNumJobs];
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Progress) / 4); i += kThreads)
        reinterpret_cast<uint32_t*>(&progress)[i] = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < layout.stages; ++i)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers[i])) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    fabric::let_next_kernel_start();
    fabric::wait_for_previous_kernel();
    Header* own = reinterpret_cast<Header*>(call.base[call.rank]);
    const uint64_t calls = *reinterpret_cast<const volatile uint64_t*>(&own->state.num_calls);
    __syncthreads();
    const uint64_t tag = fabric::tag_word(calls + 1, call.tokens, call.tag);
    const Watch watch{own, call.record, call.timeout_ns, tag};
    const Work work{call, layout, watch, progress, (calls + 1) << 24};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    char* places = memory + layout.stages * kUnitBytes;
    if (warp >= kWorkers) {
        const int thread = threadIdx.x - 32 * kWorkers;
        Team team{parts[thread / kTeamThreads], thread / kTeamThreads, thread % kTeamThreads};
        const Lanes lanes{team.thread, kTeamThreads, static_cast<int>(call.hidden) / kElements<T>};
        Finisher<T, kMaxW, kVecs>{work, lanes, team, places + team.index * layout.places * layout.place_bytes,
                                  packet_bytes<T>(call.out_kind)}
            .run();
    } else if (warp == 2) {
        publish(work);
    } else if (warp == 1) {
        if (lane == 0)
            Sender{work, jobs, shared_address(memory), shared_address(barriers), shared_address(places)}.run();
    } else if (lane == 0) {
        Loader{work, shared_address(memory), shared_address(barriers)}.run();
    } else if (lane == 1) {
        // Everyone in this CTA has read the state: the last CTA moves it on.
        __threadfence();
        if (atomicAdd(&own->state.num_arrived, 1u) == gridDim.x - 1) {
            own->state.num_arrived = 0;
            own->state.num_calls = calls + 1;
        }
    } else if (blockIdx.x == 0 && lane - 2 < call.world && lane - 2 != call.rank) {
        fabric::exchange_tags(watch, call.base[lane - 2], call.rank, lane - 2, calls);
    }
#endif
}

int32_t bytes_of(OutKind kind, DType dtype) {
    return kind == OutKind::kSame ? static_cast<int32_t>(size_of(dtype)) : kind == OutKind::kFloat32 ? 4 : 1;
}

int largest_shared(int device) {
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return bytes;
}

template <typename T, int kMaxW, int kVecs>
int enqueue(const Call& call, const Launch& launch) {
    const auto kernel = bulk<T, kMaxW, kVecs>;
    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    BulkLayout layout{};
    layout.row_bytes = static_cast<int32_t>(call.hidden * size_of(launch.dtype));
    layout.rows_a_unit = std::max(1, kUnitBytes / layout.row_bytes);
    layout.out_bytes = static_cast<int32_t>(call.hidden * bytes_of(call.out_kind, launch.dtype));
    layout.out_row_bytes = layout.out_bytes + (call.quant == QuantKind::kPerToken ? kScaleBytes : 0);
    layout.sum_at = (call.tokens * layout.out_row_bytes + 255) / 256 * 256;
    layout.in_place = launch.in_place;
    layout.place_bytes = layout.rows_a_unit * (layout.out_row_bytes + (call.sum_whole ? layout.row_bytes : 0));
    layout.place_bytes = (layout.place_bytes + 127) / 128 * 128;
    constexpr int kStaticBytes = 4096;
    const int room = largest_shared(device) - kStaticBytes;
    constexpr int kFewestStages = kReading + 1;
    layout.places = kTeams * 2 * layout.place_bytes + kFewestStages * kUnitBytes <= room ? 2 : 1;
    layout.stages = std::min(kMaxStages, (room - kTeams * layout.places * layout.place_bytes) / kUnitBytes);
    if (layout.stages < kFewestStages) return cudaErrorInvalidValue;
    const int64_t staging = (call.world - 1) * call.share * layout.row_bytes;
    const int64_t output = layout.sum_at + (call.sum_whole ? call.tokens * layout.row_bytes : 0);
    if (staging > call.regions.staging_bytes || output > call.regions.output_bytes) return cudaErrorInvalidValue;
    const int shared_bytes = layout.stages * kUnitBytes + kTeams * layout.places * layout.place_bytes;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    // CTAs wait for each other through peers: all of them must be resident at once, which is one on each SM.
    const int64_t num_units = (call.share + layout.rows_a_unit - 1) / layout.rows_a_unit;
    int64_t num_ctas = std::min<int64_t>({num_sms, kMaxCtas, num_units});
    if (launch.num_ctas > 0) num_ctas = std::min<int64_t>(num_ctas, launch.num_ctas);
    layout.travelling = std::clamp<int>(kCopiesUnderWay / static_cast<int>(num_ctas), 1, kMaxTravelling);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(num_ctas);
    config.blockDim = kThreads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(launch.stream);
    config.attrs = &attribute;
    config.numAttrs = launch.overlap ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, call, layout);
}

template <typename T, int kMaxW>
int with_vecs(const Call& call, const Launch& launch) {
    const int64_t vecs = (call.hidden / kElements<T> + kTeamThreads - 1) / kTeamThreads;
    if (vecs <= 2) return enqueue<T, kMaxW, 2>(call, launch);
    if (vecs <= 4) return enqueue<T, kMaxW, 4>(call, launch);
    if (vecs <= kMostVecs) return enqueue<T, kMaxW, kMostVecs>(call, launch);
    return cudaErrorInvalidValue;
}

template <typename T>
int with_world(const Call& call, const Launch& launch) {
    if (call.world <= 2) return with_vecs<T, 2>(call, launch);
    if (call.world <= 4) return with_vecs<T, 4>(call, launch);
    return with_vecs<T, kMaxWorld>(call, launch);
}

}  // namespace

const char* bulk_unsupported(DType dtype, int64_t hidden, bool fp8, int32_t device) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (major < 9) return "bulk copies need compute capability 9.0";
    if (hidden * size_of(dtype) / 16 > kMostVecs * kTeamThreads) return "rows are too long for the bulk form";
    if (fp8 && hidden % 16 != 0) return "bulk copies of e4m3 rows need a multiple of 16 elements";
    return "";
}

int run_bulk(const Call& call, const Launch& launch) {
    switch (launch.dtype) {
        case DType::kFloat32:
            return with_world<float>(call, launch);
        case DType::kBFloat16:
            return with_world<__nv_bfloat16>(call, launch);
        case DType::kFloat16:
            return with_world<__half>(call, launch);
    }
    return cudaErrorInvalidValue;
}

}  // namespace weave::gpu
