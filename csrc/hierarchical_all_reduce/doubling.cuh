// Recursive doubling between GPUs of several hosts, one of each, with residual, norm and rounding in its last step: the
// second phase of NVRAR (section 4.1, algorithm 1), which is all of it where a host has one GPU. One kernel a call.
//
// Rows travel as packets or as they are (doubling_rows.cuh), to the host's inbox or from an outbox. A CTA takes rows in
// turn; it sends all of them before it waits for one, and a row goes on to the next host as soon as it has come from
// the one before.
//
// Sums are in fp32 and never rounded on the way; what a host has not added to yet travels as it is. A sum of two does
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
// k may use the half of call k - 2: every host that is sent to also sends, in every call. This rank ended call k - 1,
// so it had rows of k - 1 from every such peer, and a peer that sends in k - 1 has ended k - 2: kernels of a channel
// follow one another. So the peer has taken all that it got in k - 2: nothing in its half of the inboxes is read any
// more, and everything in this rank's half of the outboxes had arrived. Peers are waited for in the next call, and only
// for its data (section 4.2.3).
//
// A message begins with what its sender runs; CTA 0 compares before it takes the first row, and ends the kernel where
// peers run something else. Flags of packets repeat after 2^32 - 1 calls: a packet that no call has written since then
// would be taken for new. Packets and rows as they are have inboxes of their own: data of the ones must not be taken
// for flags of the others.
#pragma once

#include "all_reduce_norm/finish.cuh"
#include "fabric/call.cuh"
#include "hierarchical_all_reduce/doubling.h"
#include "hierarchical_all_reduce/doubling_rows.cuh"

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

// What a rank's threads do with rows, which travel as `Travel` has it.
template <typename T, int kVecs, bool kPlain, class Travel>
struct DoublingRows {
    static constexpr int E = kElements<T>;
    const Call& call;
    const Doubling& exchange;
    const Lanes& lanes;
    CtaTeam& team;
    const Travel& travel;

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
        travel.send(step, row, words);
    }

    // Rows of this rank as they are.
    __device__ __forceinline__ void send_own(const HostStep& step, int32_t row) const {
        uint32_t words[kVecs][4];
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            const Vec16 v = partial(row, j);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[j][i] = v.word[i];
        }
        travel.send(step, row, words);
    }

    __device__ __forceinline__ void add(const HostStep& step, int32_t row, float (&x)[kVecs][E]) const {
        if (step.receives_wide || E == 4) {
            travel.template receive<E>(step, row, [&](int j, const uint32_t (&words)[E]) {
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] = step.is_finished ? __uint_as_float(words[i]) : x[j][i] + __uint_as_float(words[i]);
            });
            return;
        }
        travel.template receive<4>(step, row, [&](int j, const uint32_t (&words)[4]) {
            float widened[E];
            fabric::widen(Vec16{{words[0], words[1], words[2], words[3]}}, widened, static_cast<const T*>(nullptr));
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] += widened[i];
        });
    }

    // The sum of the hosts so far, before a message is added.
    __device__ __forceinline__ void load_sum(int32_t at, int32_t row, float (&x)[kVecs][E]) const {
        const char* sums = call.group.base[0] + exchange.sums;
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            if (at == exchange.first_added) {
                fabric::widen(partial(row, j), x[j], static_cast<const T*>(nullptr));
            } else {
#pragma unroll
                for (int i = 0; i < E; i += 4) {
                    const Vec16 v = fabric::load(sums + in_tensor(row, j) / sizeof(T) * 4 + i * 4);
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        x[j][i + k] = __uint_as_float(v.word[k]);
                }
            }
        }
    }

    __device__ __forceinline__ void store_sum(int32_t row, const float (&x)[kVecs][E]) const {
        char* sums = call.group.base[0] + exchange.sums;
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
#pragma unroll
            for (int i = 0; i < E; i += 4)
                fabric::store(sums + in_tensor(row, j) / sizeof(T) * 4 + i * 4,
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
        if (row == 0 && threadIdx.x == 0) travel.compare(step);
        add(step, row, x);
        if (at + 1 < exchange.num_steps && exchange.step[at + 1].sends) {
            send_wide(exchange.step[at + 1], row, x);
            travel.seal(exchange.step[at + 1], row, 0, 1);
        }
        if (!is_last) {
            store_sum(row, x);
            return;
        }
        gpu::LateWeight<T, kVecs, kPlain> weight;
        const auto before = [&](int j) { return residual[j]; };
        gpu::finish<T, kPlain>(x, call, lanes, adds_residual, before, team, weight, [&](int j, const Vec16& sum) {
            if (call.sum != nullptr) fabric::store(static_cast<char*>(call.sum) + in_tensor(row, j), sum);
        });
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
};

// The kernel's text, by all its threads. `call.group` is a group of this rank alone: base[0] is its own arena. `parts`
// lies in shared memory.
template <typename T, int kVecs, bool kPlain, class Travel>
__device__ __forceinline__ void doubling_kernel(const Call& call, const Doubling& exchange,
                                                float (*parts)[kMostWarps]) {
    CtaTeam team{parts};
    const Lanes lanes{static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x),
                      static_cast<int32_t>(call.hidden / kElements<T>)};
    Watch watch{call.group, 0};
    const fabric::CallState state = fabric::begin_call<false>(call.group);
    watch.tag = fabric::tag_word(state.epoch(), call.tokens, call.site);
    const Travel travel{{call, exchange, watch, lanes, state.epoch()}};
    const DoublingRows<T, kVecs, kPlain, Travel> rows{call, exchange, lanes, team, travel};
    const int32_t first = blockIdx.x, stride = gridDim.x;
    for (int32_t row = first; exchange.step[0].sends && row < call.tokens;) {
        const int32_t begin = row;
        int32_t count = 0;
        for (; count < Travel::kSealedRows && row < call.tokens; ++count, row += stride)
            rows.send_own(exchange.step[0], row);
        travel.seal(exchange.step[0], begin, stride, count);
    }
    for (int32_t at = 0; at < exchange.num_steps; ++at)
        for (int32_t row = first; exchange.step[at].receives && row < call.tokens; row += stride)
            rows.advance(at, row);
    // All threads of the CTA have read the state.
    __syncthreads();
    fabric::end_call<false>(watch, state, static_cast<int32_t>(threadIdx.x));
}

}  // namespace weave::hosts
