// How rows travel between hosts: what recursive doubling (doubling.cuh) does to send a row and to take one.
//
//   PacketRows    4 bytes of data with 4 of flag (fabric/packet_pair.cuh), the call's number. Twice the bytes, and no
//                 fence, barrier or signal: for few rows, which latency is most of
//   FlaggedRows   16 bytes at a time, as they are, and one flag a row. A flag costs the CTA a barrier and one of its
//                 threads a fence that waits until the row has arrived: for rows enough that bytes count more
//
// Both have
//
//   send(step, row, words)             this thread's words of a row; all threads of the CTA call it
//   send_vector(step, row, j, words)   of its vector j alone, to a mapped peer
//   order()                            before flags: all threads of the CTA call it
//   flag(step, first, stride, count)   the rows that were sent before order() are complete
//   seal(...)                          both
//   receive(step, row, use)            waits for a row, and gives this thread its words; all threads of the CTA call it
//   send_header(step)                  a message of no rows; all threads of the CTA call it
//   compare(step)                      waits for what the peer says that it runs
//
// Rows count from the first one of the message.
//
// Where a peer's memory is mapped here (`HostStep::direct`) rows are stored there. Else they are stored in an outbox,
// and put from there: a row is one put, non-blocking, by all threads of the CTA.
//
// Memory order, by what is shared. Of both:
//
//   what a message begins with: a pair of packets, in the inbox of packets
//     as packets are; it orders no rows
//
// Of PacketRows:
//
//   packets in an inbox
//     store   the peer, relaxed at system scope, or its NIC
//     fence   none: a packet arrives whole, and nothing but its own data is read for its flag
//     flag    in every packet
//     wait    the owner polls with relaxed loads until a packet has the flag of this call
//   packets in an outbox
//     store   the owner's threads, plain
//     fence   acq_rel at system scope, in every thread; then the barrier of the CTA
//     flag    the call of put(), by all threads of the CTA
//     reader  the NIC, or the host's proxy, until the peer has the packets: no call of flush() is waited for
//
// Of FlaggedRows:
//
//   a row in an inbox of a mapped peer
//     store   the threads of a peer's CTA, plain
//     fence   the barrier of that CTA; then acq_rel at system scope in one of its threads, which makes the stores of
//     the
//             others part of what its flag releases
//     flag    flags[half][slot][row] of the owner, relaxed, by that thread: the number of the call, 64 bits
//     wait    one thread of the owner's CTA, acquire, until the flag has that number; then the barrier of the CTA
//     reader  all threads of that CTA, plain
//   a row in an inbox that only puts reach
//     store   the peer's NIC, or its proxy
//     fence   NVSHMEM's: put_signal() brings the word after what it puts
//     flag    the same word, by put_signal()
//     wait    as above; the thread that has seen the flag then calls arrived(), which does what NVSHMEM's own waits do
//     on
//             networks that let a flag overtake data on its last way, from the NIC to memory
//     reader  as above
//   a row in an outbox
//     as packets are, with put_signal()
//   a flag
//     again   two calls later, by the same peer, with a larger number: a flag never goes back, and 64 bits do not wrap.
//             Its place depends on nothing that calls differ in, so no row, packet or other flag is ever written there
//
// When each of these is written again: doubling.cuh.
#pragma once

#include "fabric/call.cuh"
#include "fabric/packet_pair.cuh"
#include "fabric/vector.cuh"
#include "reduction/hosts/doubling.h"

namespace weave::hosts {

using fabric::PacketPair;
using fabric::Vec16;
using fabric::Watch;
using gpu::Call;
using gpu::kElements;
using gpu::Lanes;

// Of a thread: packets that it waits for at a time, and words of rows that it loads at a time. More cost registers.
constexpr int kPacketsInFlight = 8;
constexpr int kWordsInFlight = 16;

// Never 0, which is what an inbox begins with. Two calls with one flag are of different halves.
__device__ __forceinline__ uint32_t flag_of_call(uint64_t epoch) {
    const uint32_t low = static_cast<uint32_t>(epoch);
    return low == 0 ? 0xffffffffu : low;
}

// A message, whatever its rows travel as. `Remote` is a place in another rank's arena, by the transport; where it has
// no puts (`kPuts`) all peers that are sent to are mapped.
template <typename T, class Remote>
struct Messages {
    static constexpr int E = kElements<T>;
    const Call& call;
    const Doubling& exchange;
    const Watch& watch;
    const Lanes& lanes;
    uint64_t epoch;

    __device__ __forceinline__ static bool is_direct(const HostStep& step) {
        return !Remote::kPuts || step.direct != nullptr;
    }
    __device__ __forceinline__ uint32_t packet_flag() const { return flag_of_call(epoch); }
    __device__ __forceinline__ char* own(int64_t offset) const { return call.group.base[0] + offset; }
    // Among the slots of both halves.
    __device__ __forceinline__ int64_t slot(const HostStep& step) const {
        return static_cast<int64_t>(epoch & 1) * exchange.num_slots + step.slot;
    }
    // In the inbox or the outbox of packets.
    __device__ __forceinline__ int64_t message(const HostStep& step) const { return slot(step) * exchange.slot_bytes; }
    // Of a row of which a thread has N words of every vector.
    template <int N>
    __device__ __forceinline__ int64_t row_bytes(Transfer transfer) const {
        return row_bytes_of_message(transfer, call.hidden, sizeof(T), N != 4 || E == 4);
    }

    // What the message begins with, by one thread: where it goes, or into the outbox.
    __device__ __forceinline__ void store_header(const HostStep& step) const {
        char* to = is_direct(step) ? step.direct + exchange.inbox : own(exchange.outbox);
        fabric::store_relaxed(to + message(step), fabric::pack(call.tokens, call.site, packet_flag()));
    }

    // A message of no rows.
    __device__ __forceinline__ void send_header(const HostStep& step) const {
        if (threadIdx.x == 0) store_header(step);
        if constexpr (Remote::kPuts) {
            if (is_direct(step)) return;
            fabric::fence();
            __syncthreads();
            put_header(step);
        }
    }

    // From the outbox, where it has been stored.
    __device__ __forceinline__ void put_header(const HostStep& step) const {
        const int64_t at = message(step);
        Remote{own(exchange.inbox + at), step.peer}.put(own(exchange.outbox + at), kHeaderBytesOfMessage);
    }

    __device__ __forceinline__ PacketPair await_pair(const char* at, const HostStep& step) const {
        fabric::Deadline deadline;
        for (;;) {
            PacketPair seen;
            fabric::load_relaxed(seen, at);
            if (fabric::has_flag(seen, packet_flag())) return seen;
            if (deadline.has_passed(watch))
                fabric::give_up(watch, deadline.code(), step.peer, fabric::slot_of_host_step(step.slot), packet_flag(),
                                fabric::flag_of(seen.word[0]), 0);
        }
    }

    // What the peer runs, which has to be what this rank runs. One thread, before its CTA takes the first row.
    __device__ __forceinline__ void compare(const HostStep& step) const {
        const PacketPair header = await_pair(own(exchange.inbox) + message(step), step);
        const uint64_t theirs =
            fabric::tag_word(epoch, fabric::data_of(header.word[0]), fabric::data_of(header.word[1]));
        if (theirs != watch.tag)
            fabric::give_up(watch, Code::kSiteMismatch, step.peer, fabric::Slot::kTag, watch.tag, theirs, theirs);
    }
};

template <typename T, int kVecs, class Remote>
struct PacketRows : Messages<T, Remote> {
    static constexpr int kSealedRows = 1;

    template <int N>
    __device__ __forceinline__ int64_t row_at(const HostStep& step, int32_t row) const {
        return this->message(step) + kHeaderBytesOfMessage + row * this->template row_bytes<N>(Transfer::kPacket);
    }
    template <int N>
    __device__ __forceinline__ void store_vector(char* to, int j, const uint32_t (&words)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            fabric::store_relaxed(to + (this->lanes.at(j) * N + i) * fabric::kPacketBytes,
                                  fabric::pack(words[i], words[i + 1], this->packet_flag()));
    }
    template <int N>
    __device__ __forceinline__ void send_vector(const HostStep& step, int32_t row, int j,
                                                const uint32_t (&words)[N]) const {
        store_vector(step.direct + this->exchange.inbox + row_at<N>(step, row), j, words);
    }

    // N words of every vector. What is put begins with the header where the row is the first.
    template <int N>
    __device__ __forceinline__ void send(const HostStep& step, int32_t row, const uint32_t (&words)[kVecs][N]) const {
        const bool with_header = row == 0;
        const int64_t at = row_at<N>(step, row);
        char* to = this->is_direct(step) ? step.direct + this->exchange.inbox : this->own(this->exchange.outbox);
        if (with_header && threadIdx.x == 0) this->store_header(step);
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
            if (this->lanes.has(j)) store_vector(to + at, j, words[j]);
        if constexpr (Remote::kPuts) {
            if (this->is_direct(step)) return;
            fabric::fence();
            __syncthreads();
            const int64_t begin = with_header ? this->message(step) : at;
            const int64_t end = at + this->template row_bytes<N>(Transfer::kPacket);
            Remote{this->own(this->exchange.inbox + begin), step.peer}.put(to + begin, end - begin);
        }
    }

    __device__ __forceinline__ void order() const {}
    __device__ __forceinline__ void flag(const HostStep&, int32_t, int32_t, int32_t) const {}
    __device__ __forceinline__ void seal(const HostStep&, int32_t, int32_t, int32_t) const {}

    // This thread's words of a row from the host of `step`, N of every vector, as use(j, words) takes them.
    template <int N, class Use>
    __device__ __forceinline__ void receive(const HostStep& step, int32_t row, const Use& use) const {
        const char* from = this->own(this->exchange.inbox) + row_at<N>(step, row);
        const auto place = [&](int j) { return from + this->lanes.at(j) * N * fabric::kPacketBytes; };
        constexpr int kAtOnce = kVecs * N <= kPacketsInFlight ? kVecs : 1;
#pragma unroll
        for (int first = 0; first < kVecs; first += kAtOnce) {
            PacketPair pairs[kAtOnce][N / 2];
            // All that a thread waits for is in flight at once.
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (!this->lanes.has(first + j)) continue;
#pragma unroll
                for (int i = 0; i < N / 2; ++i)
                    fabric::load_relaxed(pairs[j][i], place(first + j) + i * 16);
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (!this->lanes.has(first + j)) continue;
                uint32_t words[N];
#pragma unroll
                for (int i = 0; i < N / 2; ++i) {
                    PacketPair& pair = pairs[j][i];
                    if (!fabric::has_flag(pair, this->packet_flag()))
                        pair = this->await_pair(place(first + j) + i * 16, step);
                    words[2 * i] = fabric::data_of(pair.word[0]);
                    words[2 * i + 1] = fabric::data_of(pair.word[1]);
                }
                use(first + j, words);
            }
        }
    }
};

template <typename T, int kVecs, class Remote>
struct FlaggedRows : Messages<T, Remote> {
    // Of a CTA's own rows one fence serves so many: it waits for them all, and nothing of them is seen before.
    static constexpr int kSealedRows = 2;

    // In the inbox or the outbox of rows.
    template <int N>
    __device__ __forceinline__ int64_t row_at(const HostStep& step, int32_t row) const {
        return this->slot(step) * this->exchange.row_slot_bytes +
               row * this->template row_bytes<N>(Transfer::kFlaggedRow);
    }
    // The first 16 bytes of all vectors, then the second ones: what a warp stores at once is contiguous.
    __device__ __forceinline__ int64_t in_row(int j, int part) const {
        return (static_cast<int64_t>(part) * this->lanes.count + this->lanes.at(j)) * 16;
    }
    __device__ __forceinline__ uint64_t* flag_word(char* arena, const HostStep& step, int32_t row) const {
        return reinterpret_cast<uint64_t*>(arena + this->exchange.flags) +
               (this->slot(step) * this->exchange.flag_rows + row);
    }

    template <int N>
    __device__ __forceinline__ void store_vector(char* to, int j, const uint32_t (&words)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i += 4)
            fabric::store(to + in_row(j, i / 4), Vec16{{words[i], words[i + 1], words[i + 2], words[i + 3]}});
    }
    template <int N>
    __device__ __forceinline__ void send_vector(const HostStep& step, int32_t row, int j,
                                                const uint32_t (&words)[N]) const {
        store_vector(step.direct + this->exchange.row_inbox + row_at<N>(step, row), j, words);
    }

    template <int N>
    __device__ __forceinline__ void send(const HostStep& step, int32_t row, const uint32_t (&words)[kVecs][N]) const {
        const int64_t at = row_at<N>(step, row);
        char* to =
            (this->is_direct(step) ? step.direct + this->exchange.row_inbox : this->own(this->exchange.row_outbox)) +
            at;
        if (row == 0 && threadIdx.x == 0) this->store_header(step);
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
            if (this->lanes.has(j)) store_vector(to, j, words[j]);
        if constexpr (Remote::kPuts) {
            if (this->is_direct(step)) return;
            fabric::fence();
            __syncthreads();
            if (row == 0) this->put_header(step);
            Remote{this->own(this->exchange.row_inbox + at), step.peer}.put_signal(
                to, this->template row_bytes<N>(Transfer::kFlaggedRow), flag_word(this->own(0), step, row),
                this->epoch);
        }
    }

    __device__ __forceinline__ void order() const {
        __syncthreads();
        if (threadIdx.x == 0) fabric::fence();
    }
    // Of a mapped peer, by the thread that has fenced.
    __device__ __forceinline__ void flag(const HostStep& step, int32_t first, int32_t stride, int32_t count) const {
        if (threadIdx.x != 0) return;
        for (int32_t i = 0; i < count; ++i)
            fabric::store_relaxed(flag_word(step.direct, step, first + i * stride), this->epoch);
    }
    // A put has brought the flag already.
    __device__ __forceinline__ void seal(const HostStep& step, int32_t first, int32_t stride, int32_t count) const {
        if (!this->is_direct(step)) return;
        order();
        flag(step, first, stride, count);
    }

    template <int N, class Use>
    __device__ __forceinline__ void receive(const HostStep& step, int32_t row, const Use& use) const {
        if (threadIdx.x == 0) {
            uint64_t* word = flag_word(this->own(0), step, row);
            fabric::wait(word, this->epoch, this->watch, step.peer, fabric::slot_of_host_step(step.slot));
            if constexpr (Remote::kPuts) {
                if (!this->is_direct(step)) Remote::arrived(word, this->epoch);
            }
        }
        __syncthreads();
        const char* from = this->own(this->exchange.row_inbox) + row_at<N>(step, row);
        constexpr int kAtOnce = kVecs * N <= kWordsInFlight ? kVecs : 1;
#pragma unroll
        for (int first = 0; first < kVecs; first += kAtOnce) {
            Vec16 parts[kAtOnce][N / 4];
            // These loads are in flight at once.
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (!this->lanes.has(first + j)) continue;
#pragma unroll
                for (int i = 0; i < N / 4; ++i)
                    parts[j][i] = fabric::load(from + in_row(first + j, i));
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (!this->lanes.has(first + j)) continue;
                uint32_t words[N];
#pragma unroll
                for (int i = 0; i < N; ++i)
                    words[i] = parts[j][i / 4].word[i % 4];
                use(first + j, words);
            }
        }
    }
};

// In place of puts where all peers that are sent to are mapped.
struct NoPuts {
    static constexpr bool kPuts = false;
};

}  // namespace weave::hosts
