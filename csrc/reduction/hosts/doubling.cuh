// Recursive doubling between GPUs of several hosts, with residual, norm and rounding in its last step: NVRAR (section
// 4.1, algorithm 1) in one kernel a call, whose second phase is all of it where a host has one GPU:
//
//   1. a rank sends its partial rows to the ranks of its host that add them, each those of its share, and adds what the
//      others send it, in the order of the ranks
//   2. ranks that have the same share add those of all hosts, by recursive doubling
//   3. the rank that has finished a row sends its rounded sum to the others of its host; every rank normalizes it
//
// Rows travel as packets or as they are (doubling_rows.cuh), to the rank's inbox or from an outbox. A CTA takes rows in
// turn; it sends all of them before it waits for one, and a row goes on to the next host as soon as it has come from
// the one before. All CTAs of a grid have to be resident: one waits for rows that another one of a peer sends, and that
// one for rows of others, but never for one that comes later in the order of steps and rows.
//
// Sums are in fp32 and never rounded in between; what a host has not added to yet travels as it is. A sum of two does
// not depend on their order, so all hosts have the same bits.
//
// Memory order, by what is shared:
//
//   messages                  doubling_rows.cuh
//   sums of the hosts so far
//     store   a thread, plain; the same thread reads them in its next step
//   state (num_calls): fabric/call.cuh
//
// There are two halves of inboxes, outboxes and flags, and calls use them in turn, however their rows travel. Why call
// k may use the half of call k - 2: every rank that is sent to also sends, in every call, and if it has no rows to send
// it sends what a message begins with. This rank ended call k - 1,
// so it had messages of k - 1 from every such peer, and a peer that sends in k - 1 has ended k - 2: kernels of a
// channel follow one another. So the peer has taken all that it got in k - 2: nothing in its half of the inboxes is
// read any more, and everything in this rank's half of the outboxes had arrived. Peers are waited for in the next call,
// and only for its data (section 4.2.3).
//
// A message begins with what its sender runs; the CTA that takes its first row compares before that, and ends the
// kernel where peers run something else. Flags of packets repeat after 2^32 - 1 calls: a packet that no call has
// written since then would be taken for new. Packets and rows as they are have inboxes of their own: data of the ones
// must not be taken for flags of the others.
#pragma once

#include "fabric/call.cuh"
#include "reduction/finish.cuh"
#include "reduction/hosts/doubling.h"
#include "reduction/hosts/doubling_rows.cuh"

namespace weave::hosts {

constexpr int kMostThreads = 512;  // of a CTA
constexpr int kMostWarps = kMostThreads / 32;
// Of 16 bytes, of a thread.
constexpr int kMostVecs = 4;

// The threads of a CTA that share a row, and their sums over it: in one order, so all threads have the same bits.
struct CtaTeam {
    float (*parts)[kMostWarps];  // in shared memory, by parity of the reduction
    uint32_t num_reductions = 0;

    template <class Combine>
    __device__ __forceinline__ float reduce(float value, const Combine& combine) {
        float* of_warps = parts[num_reductions++ & 1];
        const float of_warp = combine.warp(value);
        if ((threadIdx.x & 31) == 0) of_warps[threadIdx.x >> 5] = of_warp;
        __syncthreads();
        float all = of_warps[0];
        for (uint32_t warp = 1; warp < blockDim.x / 32; ++warp)
            all = combine.two(all, of_warps[warp]);
        return all;
    }
    struct Sum {
        __device__ __forceinline__ float warp(float value) const { return gpu::warp_sum(value); }
        __device__ __forceinline__ float two(float a, float b) const { return a + b; }
    };
    struct Max {
        __device__ __forceinline__ float warp(float value) const { return gpu::warp_max(value); }
        __device__ __forceinline__ float two(float a, float b) const { return fmaxf(a, b); }
    };
    __device__ __forceinline__ float sum(float value) { return reduce(value, Sum{}); }
    __device__ __forceinline__ float max(float value) { return reduce(value, Max{}); }
};

// Rows that one rank of every host adds: what a CTA has of them.
struct Share {
    int32_t begin, end;  // of all
    int32_t first;       // of this CTA; then every gridDim.x-th

    __device__ __forceinline__ static Share of(const Call& call, const Doubling& exchange, int32_t rank_of_host) {
        const int32_t begin = first_row(call.tokens, rank_of_host, exchange.num_of_host);
        const int32_t end = first_row(call.tokens, rank_of_host + 1, exchange.num_of_host);
        const int32_t ctas = gridDim.x, past = begin % ctas, own = blockIdx.x;
        return {begin, end, begin + own - past + (own < past ? ctas : 0)};
    }
    __device__ __forceinline__ bool is_empty() const { return begin == end; }
};

// What a rank's threads do with rows, which travel as `Travel` has it. kSeveral: hosts have several ranks.
template <typename T, int kVecs, bool kPlain, bool kSeveral, class Travel>
struct DoublingRows {
    static constexpr int E = kElements<T>;
    const Call& call;
    const Doubling& exchange;
    const Lanes& lanes;
    CtaTeam& team;
    const Travel& travel;
    const Share& share;  // of this rank

    // Of a row of the share, in messages and sums.
    __device__ __forceinline__ int32_t in_share(int32_t row) const { return kSeveral ? row - share.begin : row; }
    __device__ __forceinline__ int64_t in_tensor(int32_t row, int j) const {
        return (static_cast<int64_t>(row) * lanes.count + lanes.at(j)) * 16;
    }
    __device__ __forceinline__ Vec16 partial(int32_t row, int j) const {
        return fabric::load(static_cast<const char*>(call.partial) + in_tensor(row, j));
    }

    __device__ __forceinline__ void send_wide(const HostStep& step, int32_t row, const float (&x)[kVecs][E]) const {
        uint32_t words[kVecs][E];
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
#pragma unroll
            for (int i = 0; i < E; ++i)
                words[j][i] = __float_as_uint(x[j][i]);
        travel.send(step, in_share(row), words);
    }

    // A row of this rank as it is; `at` counts from the first one of the message.
    __device__ __forceinline__ void send_own(const HostStep& step, int32_t row, int32_t at) const {
        uint32_t words[kVecs][4];
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            const Vec16 v = partial(row, j);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[j][i] = v.word[i];
        }
        travel.send(step, at, words);
    }

    // Rows of a message to `step`, as they are.
    __device__ __forceinline__ void send_all_own(const HostStep& step, const Share& of) const {
        const int32_t stride = gridDim.x, begin = kSeveral ? of.begin : 0;
        for (int32_t row = of.first; row < of.end;) {
            const int32_t first = row - begin;
            int32_t count = 0;
            for (; count < Travel::kSealedRows && row < of.end; ++count, row += stride)
                send_own(step, row, row - begin);
            travel.seal(step, first, stride, count);
        }
    }

    // Adds a message of rows as they are.
    __device__ __forceinline__ void add_narrow(const HostStep& step, int32_t at, float (&x)[kVecs][E]) const {
        travel.template receive<4>(step, at, [&](int j, const uint32_t (&words)[4]) {
            float widened[E];
            fabric::widen(Vec16{{words[0], words[1], words[2], words[3]}}, widened, static_cast<const T*>(nullptr));
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] += widened[i];
        });
    }

    __device__ __forceinline__ void add(const HostStep& step, int32_t row, float (&x)[kVecs][E]) const {
        if (kSeveral || step.receives_wide || E == 4) {
            travel.template receive<E>(step, in_share(row), [&](int j, const uint32_t (&words)[E]) {
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] = step.is_finished ? __uint_as_float(words[i]) : x[j][i] + __uint_as_float(words[i]);
            });
            return;
        }
        add_narrow(step, in_share(row), x);
    }

    // Where the sum of a row of the share has this thread's vector j.
    __device__ __forceinline__ char* sum_at(int32_t row, int j) const {
        return call.group.base[0] + exchange.sums + in_tensor(in_share(row), j) / sizeof(T) * 4;
    }

    // The sum of the hosts so far, before a message is added.
    __device__ __forceinline__ void load_sum(int32_t at, int32_t row, float (&x)[kVecs][E]) const {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            if (!kSeveral && at == exchange.first_added) {
                fabric::widen(partial(row, j), x[j], static_cast<const T*>(nullptr));
            } else {
#pragma unroll
                for (int i = 0; i < E; i += 4) {
                    const Vec16 v = fabric::load(sum_at(row, j) + i * 4);
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        x[j][i + k] = __uint_as_float(v.word[k]);
                }
            }
        }
    }

    __device__ __forceinline__ void store_sum(int32_t row, const float (&x)[kVecs][E]) const {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
#pragma unroll
            for (int i = 0; i < E; i += 4)
                fabric::store(sum_at(row, j) + i * 4,
                              Vec16{{__float_as_uint(x[j][i]), __float_as_uint(x[j][i + 1]),
                                     __float_as_uint(x[j][i + 2]), __float_as_uint(x[j][i + 3])}});
        }
    }

    // The step `at` of a row: takes the message, sends what the next step sends, and finishes the row after the last.
    __device__ __forceinline__ void advance(int32_t at, int32_t row) const {
        const HostStep& step = exchange.step[at];
        const bool is_last = at == exchange.last_received;
        const bool adds_residual = is_last && (kPlain || call.residual != nullptr);
        Vec16 residual[kVecs];
        float x[kVecs][E];
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] = 0;
            if (lanes.has(j) && adds_residual)
                residual[j] = fabric::load(static_cast<const char*>(call.residual) + in_tensor(row, j));
        }
        if (!step.is_finished) load_sum(at, row, x);
        if (in_share(row) == 0 && threadIdx.x == 0) travel.compare(step);
        add(step, row, x);
        if (at + 1 < exchange.num_steps) send_on(exchange.step[at + 1], row, x);
        if (!is_last) {
            store_sum(row, x);
            return;
        }
        gpu::LateWeight<T, kVecs, kPlain> weight;
        const auto before = [&](int j) { return residual[j]; };
        gpu::finish<T, kPlain>(x, call, lanes, adds_residual, before, team, weight, [&](int j, const Vec16& sum) {
            take_sum(row, j, sum);
            if constexpr (kSeveral)
                for_others([&](int32_t other) {
                    travel.send_vector(exchange.finished[other].to, in_share(row), j, sum.word);
                });
        });
        if constexpr (kSeveral) {
            if (in_share(row) == 0 && threadIdx.x == 0)
                for_others([&](int32_t other) { travel.store_header(exchange.finished[other].to); });
            travel.order();
            for_others([&](int32_t other) { travel.flag(exchange.finished[other].to, in_share(row), 0, 1); });
        }
        store_row(row, x);
    }

    __device__ __forceinline__ void send_on(const HostStep& step, int32_t row, const float (&x)[kVecs][E]) const {
        if (!step.sends) return;
        send_wide(step, row, x);
        travel.seal(step, in_share(row), 0, 1);
    }

    __device__ __forceinline__ void take_sum(int32_t row, int j, const Vec16& sum) const {
        if (call.sum != nullptr) fabric::store(static_cast<char*>(call.sum) + in_tensor(row, j), sum);
    }

    // A normalized row.
    __device__ __forceinline__ void store_row(int32_t row, float (&x)[kVecs][E]) const {
        float scale;
        const float inverse = gpu::inverse_scale<T, kPlain>(x, call, lanes, scale, team);
        const int32_t out_bytes = gpu::out_vector_bytes<T, kPlain>(call.out_kind);
        if (!kPlain && call.normalized == nullptr) return;
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            const int64_t at_vec = static_cast<int64_t>(row) * lanes.count + lanes.at(j);
            gpu::store_out(static_cast<char*>(call.normalized) + at_vec * out_bytes,
                           gpu::out_vector<T, kPlain>(x[j], call.out_kind, inverse), out_bytes);
        }
        if (!kPlain && call.quant == gpu::QuantKind::kPerToken && threadIdx.x == 0)
            static_cast<float*>(call.row_scale)[row] = scale;
    }

    // The other ranks of the host, from the next one on.
    template <class Use>
    __device__ __forceinline__ void for_others(const Use& use) const {
#pragma unroll 1
        for (int32_t step = 1; step < exchange.num_of_host; ++step) {
            const int32_t next = exchange.rank_of_host + step;
            use(next < exchange.num_of_host ? next : next - exchange.num_of_host);
        }
    }

    // Partial rows to the ranks that add them; of shares without rows what a message begins with.
    __device__ __forceinline__ void send_parts() const {
        for_others([&](int32_t owner) {
            const Share of = Share::of(call, exchange, owner);
            if (of.is_empty() && blockIdx.x == 0) travel.send_header(exchange.parts[owner].to);
            send_all_own(exchange.parts[owner].to, of);
        });
    }

    // In place of rows of an empty share: what messages begin with, to all that would get one, and from them.
    __device__ __forceinline__ void exchange_headers() const {
        for (int32_t at = 0; at < exchange.num_steps; ++at)
            if (exchange.step[at].sends) travel.send_header(exchange.step[at]);
        for_others([&](int32_t other) { travel.send_header(exchange.finished[other].to); });
        if (threadIdx.x != 0) return;
        for_others([&](int32_t other) { travel.compare(exchange.parts[other].from); });
        for (int32_t at = 0; at < exchange.num_steps; ++at)
            if (exchange.step[at].receives) travel.compare(exchange.step[at]);
    }

    // The sum over the ranks of the host, in their order.
    __device__ __forceinline__ void add_parts(int32_t row) const {
        float x[kVecs][E];
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] = 0;
#pragma unroll 1
        for (int32_t source = 0; source < exchange.num_of_host; ++source) {
            if (source != exchange.rank_of_host) {
                const HostStep& from = exchange.parts[source].from;
                if (in_share(row) == 0 && threadIdx.x == 0) travel.compare(from);
                add_narrow(from, in_share(row), x);
                continue;
            }
#pragma unroll
            for (int j = 0; j < kVecs; ++j) {
                if (!lanes.has(j)) continue;
                float widened[E];
                fabric::widen(partial(row, j), widened, static_cast<const T*>(nullptr));
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] += widened[i];
            }
        }
        send_on(exchange.step[0], row, x);
        store_sum(row, x);
    }

    // Rows that `owner` of this host has finished.
    __device__ __forceinline__ void take_finished(int32_t owner) const {
        const HostStep& from = exchange.finished[owner].from;
        const Share of = Share::of(call, exchange, owner);
        if (of.is_empty() && blockIdx.x == 0 && threadIdx.x == 0) travel.compare(from);
        for (int32_t row = of.first; row < of.end; row += gridDim.x) {
            if (row == of.begin && threadIdx.x == 0) travel.compare(from);
            float x[kVecs][E];
#pragma unroll
            for (int j = 0; j < kVecs; ++j)
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] = 0;
            travel.template receive<4>(from, row - of.begin, [&](int j, const uint32_t (&words)[4]) {
                const Vec16 sum{{words[0], words[1], words[2], words[3]}};
                fabric::widen(sum, x[j], static_cast<const T*>(nullptr));
                take_sum(row, j, sum);
            });
            gpu::LateWeight<T, kVecs, kPlain> weight;
            if (kPlain || call.norm.spec.kind != NormKind::kNone)
                gpu::normalize<T, kPlain>(x, call.norm, call.hidden, lanes, team, weight);
            store_row(row, x);
        }
    }
};

// The kernel's text, by all its threads. `call.group` is a group of this rank alone: base[0] is its own arena. `parts`
// is in shared memory.
template <typename T, int kVecs, bool kPlain, bool kSeveral, class Travel>
__device__ __forceinline__ void doubling_kernel(const Call& call, const Doubling& exchange,
                                                float (*parts)[kMostWarps]) {
    CtaTeam team{parts};
    const Lanes lanes{static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x),
                      static_cast<int32_t>(call.hidden / kElements<T>)};
    const int32_t stride = gridDim.x;
    const Share share = kSeveral ? Share::of(call, exchange, exchange.rank_of_host)
                                 : Share{0, call.tokens, static_cast<int32_t>(blockIdx.x)};
    Watch watch{call.group, 0};
    const fabric::CallState state = fabric::begin_call<false>(call.group);
    watch.tag = fabric::tag_word(state.epoch(), call.tokens, call.site);
    const Travel travel{{call, exchange, watch, lanes, state.epoch()}};
    const DoublingRows<T, kVecs, kPlain, kSeveral, Travel> rows{call, exchange, lanes, team, travel, share};
    if constexpr (kSeveral) {
        rows.send_parts();
        if (share.is_empty() && blockIdx.x == 0) rows.exchange_headers();
        for (int32_t row = share.first; row < share.end; row += stride)
            rows.add_parts(row);
    } else if (exchange.step[0].sends) {
        rows.send_all_own(exchange.step[0], share);
    }
    for (int32_t at = 0; at < exchange.num_steps; ++at)
        for (int32_t row = share.first; exchange.step[at].receives && row < share.end; row += stride)
            rows.advance(at, row);
    if constexpr (kSeveral) {
        for (int32_t owner = 0; owner < exchange.num_of_host; ++owner)
            if (owner != exchange.rank_of_host) rows.take_finished(owner);
    }
    // All threads of the CTA have read the state.
    __syncthreads();
    fabric::end_call<false>(watch, state, static_cast<int32_t>(threadIdx.x));
}

}  // namespace weave::hosts
