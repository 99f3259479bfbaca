// Recursive doubling between GPUs of several hosts, one of each, with residual, norm and rounding in its last step: the
// second phase of NVRAR (section 4.1, algorithm 1), which is all of it where a host has one GPU. One kernel a call.
//
// Rows go to a host's inbox as packets of 4 bytes of data and 4 of flag (fabric/packet_pair.cuh). The flag is the
// call's number, so nothing has to be emptied. A CTA takes rows in turn; it sends all of them before it waits for one,
// and a row goes on to the next host as soon as it has come from the one before.
//
// Sums are in fp32 and never rounded on the way; what a host has not added to yet travels as it is. A sum of two does
// not depend on their order, so all hosts have the same bits.
//
// Where a peer's memory is mapped here (`HostStep::direct`) packets are stored there. Else they are stored in the
// outbox, and put from there: a row is one put, non-blocking, by all threads of the CTA.
//
// Memory order, by what is shared:
//
//   packets in an inbox
//     store   the peer, relaxed at system scope, or its NIC
//     fence   none: a packet arrives whole, and nothing but its own data is read for its flag
//     flag    in every packet
//     wait    the owner polls with relaxed loads until a packet has the flag of this call
//     again   two calls later, see below
//   packets in an outbox
//     store   the owner's threads, plain
//     fence   acq_rel at system scope, in every thread; then the barrier of the CTA
//     flag    the call of put(), by all threads of the CTA
//     reader  the NIC, or the host's proxy, until the peer has the packets: no call of flush() is waited for
//     again   two calls later, see below
//   sums of the hosts so far
//     store   a thread, plain; the same thread reads them in its next step
//   state (num_calls): fabric/call.cuh
//
// There are two halves of inbox and outbox, and calls use them in turn. Why call k may use the half of call k - 2:
// every host that is sent to also sends, in every call. This rank ended call k - 1, so it had packets of k - 1 from
// every such peer, and a peer that sends in k - 1 has ended k - 2: kernels of a channel follow one another. So the peer
// has taken all that it got in k - 2: nothing in its half of the inbox is read any more, and everything in this rank's
// half of the outbox had arrived. Peers are waited for in the next call, and only for its data (section 4.2.3).
//
// A message begins with what its sender runs; CTA 0 compares before it takes the first row, and ends the kernel where
// peers run something else. Flags repeat after 2^32 - 1 calls: a packet that no call has written since then would be
// taken for new.
#pragma once

#include "all_reduce_norm/finish.cuh"
#include "fabric/call.cuh"
#include "fabric/packet_pair.cuh"
#include "hierarchical_all_reduce/doubling.h"

namespace weave::hosts {

using fabric::PacketPair;
using fabric::Watch;
using gpu::Call;
using gpu::kElements;
using gpu::Lanes;
using gpu::Vec16;

constexpr int kMostThreads = 512;  // of a CTA
constexpr int kMostWarps = kMostThreads / 32;
// Of 16 bytes, of a thread.
constexpr int kMostVecs = 4;
constexpr int kWordsInFlight = 8;  // of a thread, that it waits for at a time

// Never 0, which is what an inbox begins with. Two calls with one flag are of different halves.
__device__ __forceinline__ uint32_t flag_of_call(uint64_t epoch) {
    const uint32_t low = static_cast<uint32_t>(epoch);
    return low == 0 ? 0xffffffffu : low;
}

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

// What a rank's threads do with rows. `Remote` is a place in another rank's arena, by the transport.
template <typename T, int kVecs, bool kPlain, class Remote>
struct DoublingRows {
    static constexpr int E = kElements<T>;
    const Call& call;
    const Doubling& exchange;
    const Watch& watch;
    const Lanes& lanes;
    CtaTeam& team;
    uint64_t epoch;

    __device__ __forceinline__ uint32_t flag() const { return flag_of_call(epoch); }
    __device__ __forceinline__ char* own(int64_t offset) const { return call.group.base[0] + offset; }
    __device__ __forceinline__ int64_t row_bytes(bool wide) const {
        return row_bytes_of_message(call.hidden, sizeof(T), wide);
    }
    // Of a message in the inbox or the outbox of this call.
    __device__ __forceinline__ int64_t message(const HostStep& step) const {
        return static_cast<int64_t>(epoch & 1) * exchange.half_bytes + step.slot * slot_bytes(call.tokens, call.hidden);
    }
    __device__ __forceinline__ int64_t in_tensor(int32_t row, int j) const {
        return (static_cast<int64_t>(row) * lanes.count + lanes.at(j)) * 16;
    }
    __device__ __forceinline__ Vec16 partial(int32_t row, int j) const {
        return fabric::load(static_cast<const char*>(call.partial) + in_tensor(row, j));
    }

    // This thread's words of a row, N of every vector, to the host of `step`. All threads of the CTA call it.
    template <int N>
    __device__ __forceinline__ void send(const HostStep& step, int32_t row, const uint32_t (&words)[kVecs][N]) const {
        const bool with_header = row == 0;
        const int64_t bytes = row_bytes(N != 4 || E == 4);
        const int64_t message_at = message(step), row_at = message_at + kHeaderBytesOfMessage + row * bytes;
        char* to = step.direct != nullptr ? step.direct + exchange.inbox : own(exchange.outbox);
        if (with_header && threadIdx.x == 0)
            fabric::store_relaxed(to + message_at, fabric::pack(call.tokens, call.site, flag()));
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
#pragma unroll
            for (int i = 0; i < N; i += 2)
                fabric::store_relaxed(to + row_at + (lanes.at(j) * N + i) * fabric::kPacketBytes,
                                      fabric::pack(words[j][i], words[j][i + 1], flag()));
        }
        if (step.direct != nullptr) return;
        fabric::fence();
        __syncthreads();
        const int64_t begin = with_header ? message_at : row_at;
        Remote{own(exchange.inbox + begin), step.peer}.put(to + begin, row_at + bytes - begin);
    }

    __device__ __forceinline__ void send_wide(const HostStep& step, int32_t row, const float (&x)[kVecs][E]) const {
        uint32_t words[kVecs][E];
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
#pragma unroll
            for (int i = 0; i < E; ++i)
                words[j][i] = __float_as_uint(x[j][i]);
        send<E>(step, row, words);
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
        send<4>(step, row, words);
    }

    __device__ __forceinline__ PacketPair await_pair(const char* at, const HostStep& step) const {
        fabric::Deadline deadline;
        for (;;) {
            PacketPair seen;
            fabric::load_relaxed(seen, at);
            if (fabric::has_flag(seen, flag())) return seen;
            if (deadline.has_passed(watch))
                fabric::give_up(watch, deadline.code(), step.peer, fabric::slot_of_host_step(step.slot), flag(),
                                fabric::flag_of(seen.word[0]), 0);
        }
    }

    // What the peer runs, which has to be what this rank runs. One thread of CTA 0, before it takes the first row.
    __device__ __forceinline__ void compare(const HostStep& step) const {
        const PacketPair header = await_pair(own(exchange.inbox) + message(step), step);
        const uint64_t theirs =
            fabric::tag_word(epoch, fabric::data_of(header.word[0]), fabric::data_of(header.word[1]));
        if (theirs != watch.tag)
            fabric::give_up(watch, Code::kSiteMismatch, step.peer, fabric::Slot::kTag, watch.tag, theirs, theirs);
    }

    // This thread's words of a row from the host of `step`, N of every vector, as use(j, words) takes them.
    template <int N, class Use>
    __device__ __forceinline__ void receive(const HostStep& step, int32_t row, const Use& use) const {
        const char* from =
            own(exchange.inbox) + message(step) + kHeaderBytesOfMessage + row * row_bytes(N != 4 || E == 4);
        const auto place = [&](int j) { return from + lanes.at(j) * N * fabric::kPacketBytes; };
        constexpr int kAtOnce = kVecs * N <= kWordsInFlight ? kVecs : 1;
#pragma unroll
        for (int first = 0; first < kVecs; first += kAtOnce) {
            PacketPair pairs[kAtOnce][N / 2];
            // All that a thread waits for is on its way at once.
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (!lanes.has(first + j)) continue;
#pragma unroll
                for (int i = 0; i < N / 2; ++i)
                    fabric::load_relaxed(pairs[j][i], place(first + j) + i * 16);
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (!lanes.has(first + j)) continue;
                uint32_t words[N];
#pragma unroll
                for (int i = 0; i < N / 2; ++i) {
                    PacketPair& pair = pairs[j][i];
                    if (!fabric::has_flag(pair, flag())) pair = await_pair(place(first + j) + i * 16, step);
                    words[2 * i] = fabric::data_of(pair.word[0]);
                    words[2 * i + 1] = fabric::data_of(pair.word[1]);
                }
                use(first + j, words);
            }
        }
    }

    __device__ __forceinline__ void add(const HostStep& step, int32_t row, float (&x)[kVecs][E]) const {
        if (step.receives_wide || E == 4) {
            receive<E>(step, row, [&](int j, const uint32_t (&words)[E]) {
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] = step.is_finished ? __uint_as_float(words[i]) : x[j][i] + __uint_as_float(words[i]);
            });
            return;
        }
        receive<4>(step, row, [&](int j, const uint32_t (&words)[4]) {
            float widened[E];
            fabric::widen(Vec16{{words[0], words[1], words[2], words[3]}}, widened, static_cast<const T*>(nullptr));
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] += widened[i];
        });
    }

    // The sum of the hosts so far, before a message is added.
    __device__ __forceinline__ void load_sum(int32_t at, int32_t row, float (&x)[kVecs][E]) const {
        const char* sums = own(exchange.sums);
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
        char* sums = own(exchange.sums);
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
        if (row == 0 && threadIdx.x == 0) compare(step);
        add(step, row, x);
        if (at + 1 < exchange.num_steps && exchange.step[at + 1].sends) send_wide(exchange.step[at + 1], row, x);
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
template <typename T, int kVecs, bool kPlain, class Remote>
__device__ __forceinline__ void doubling_kernel(const Call& call, const Doubling& exchange,
                                                float (*parts)[kMostWarps]) {
    CtaTeam team{parts};
    const Lanes lanes{static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x),
                      static_cast<int32_t>(call.hidden / kElements<T>)};
    Watch watch{call.group, 0};
    const fabric::CallState state = fabric::begin_call<false>(call.group);
    watch.tag = fabric::tag_word(state.epoch(), call.tokens, call.site);
    DoublingRows<T, kVecs, kPlain, Remote> rows{call, exchange, watch, lanes, team, state.epoch()};
    const int32_t first = blockIdx.x, stride = gridDim.x;
    for (int32_t row = first; exchange.step[0].sends && row < call.tokens; row += stride)
        rows.send_own(exchange.step[0], row);
    for (int32_t at = 0; at < exchange.num_steps; ++at)
        for (int32_t row = first; exchange.step[at].receives && row < call.tokens; row += stride)
            rows.advance(at, row);
    // All threads of the CTA have read the state.
    __syncthreads();
    fabric::end_call<false>(watch, state, static_cast<int32_t>(threadIdx.x));
}

}  // namespace weave::hosts
