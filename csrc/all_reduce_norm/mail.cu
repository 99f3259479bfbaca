// The mail forms of all_reduce_norm: rows go to peers' mailboxes as words that carry their own arrival, so there is no
// barrier, no flag and no fence between a store and the peer's first look at it.
//
// A mailbox word is "absent" until a peer writes it. There are three mailboxes, used in turn by the calls of a group.
// A rank that has finished call k has read something of every peer's call k, so each peer has at least started k and so
// has finished k - 1, all of its clearing included. Call k uses mailbox k % 3 and clears that of k - 1, which peers
// write again in k + 2 at the earliest: they cannot start that before this rank has finished k and begun k + 1.
//
// One-shot: every rank sends its rows to all peers and computes all rows. Two-shot: partial rows go to their owners,
// who send finished rows to everyone. A row is shared by the CTAs of a cluster, one 16-byte vector a thread.
#include <algorithm>

#include "all_reduce_norm/cluster_team.cuh"
#include "all_reduce_norm/finish.cuh"

namespace weave::gpu {
namespace {

using fabric::DeviceState;
using fabric::Header;
using fabric::kMaxWorld;
using fabric::Watch;

constexpr int kControlThreads = 32;
constexpr int kScaleBytes = 16;
// Of a thread, where rows are too long for one: only without clusters (before sm_90).
constexpr int kMostVecs = 4;

// Where things lie in a mailbox. A rank sends to the rank `step` behind it (receiver = sender + step, around the ring)
// in its slot world - 1 - step, so that it finds what the rank `step` behind itself sent in slot step - 1.
struct MailLayout {
    uint32_t slot_rows;       // rows that one slot has room for
    uint32_t row_bytes;       // of a partial row and of a row of the sum
    uint32_t out_row_bytes;   // of a finished row, its scale included
    uint32_t out_at, sum_at;  // where the slots of finished rows and of sums begin
    uint32_t bytes;

    // False if a mailbox of `room` bytes, or 32-bit offsets, are too small for it.
    static bool make(MailLayout& layout, bool one_shot, int64_t tokens, int64_t hidden, int32_t element_bytes,
                     int32_t out_bytes, bool row_scales, int32_t world, bool sum_whole, int64_t room) {
        const int64_t slot_rows = one_shot ? tokens : (tokens + world - 1) / world;
        const int64_t row_bytes = hidden * element_bytes;
        const int64_t out_row_bytes = (hidden * out_bytes + 15) / 16 * 16 + (row_scales ? kScaleBytes : 0);
        const int64_t rows = slot_rows * (world - 1);
        const int64_t out_at = rows * row_bytes;
        const int64_t sum_at = out_at + (one_shot ? 0 : rows * out_row_bytes);
        const int64_t bytes = sum_at + (one_shot || !sum_whole ? 0 : rows * row_bytes);
        layout = {static_cast<uint32_t>(slot_rows),     static_cast<uint32_t>(row_bytes),
                  static_cast<uint32_t>(out_row_bytes), static_cast<uint32_t>(out_at),
                  static_cast<uint32_t>(sum_at),        static_cast<uint32_t>(bytes)};
        return bytes <= std::min<int64_t>(room, UINT32_MAX);
    }
};

__device__ __noinline__ Vec16 await_mail(const char* at, const Watch& watch, int32_t peer) {
    fabric::Patience patience;
    for (;;) {
        const Vec16 seen = fabric::relaxed_load(at);
        if (fabric::is_there(seen)) return seen;
        if (patience.is_over(watch)) fabric::give_up(watch, patience.code(), peer, fabric::Slot::kMail, 1, 0, 0);
    }
}

// Of 16 or 32 bytes, or of 4 or 8, an e4m3 vector. Words beyond it stay zero, which counts as there.
__device__ __forceinline__ Packet look_packet(const char* at, int32_t bytes) {
    Packet packet{};
    if (bytes >= 16) {
        packet.part[0] = fabric::relaxed_load(at);
        if (bytes == 32) packet.part[1] = fabric::relaxed_load(at + 16);
    } else if (bytes == 8) {
        asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(packet.part[0].word[0]), "=r"(packet.part[0].word[1])
                     : "l"(at)
                     : "memory");
    } else {
        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(packet.part[0].word[0]) : "l"(at) : "memory");
    }
    return packet;
}

__device__ __forceinline__ void await_packet(Packet& packet, const char* at, int32_t bytes, const Watch& watch,
                                             int32_t peer) {
    fabric::Patience patience;
    while (!fabric::is_there(packet.part[0]) || !fabric::is_there(packet.part[1])) {
        if (patience.is_over(watch)) fabric::give_up(watch, patience.code(), peer, fabric::Slot::kMail, 1, 0, 0);
        packet = look_packet(at, bytes);
    }
}

__device__ __forceinline__ void send_packet(char* to, const Packet& packet, int32_t bytes) {
    if (bytes >= 16) {
        fabric::relaxed_store(to, packet.part[0]);
        if (bytes == 32) fabric::relaxed_store(to + 16, packet.part[1]);
    } else if (bytes == 8) {
        asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(packet.part[0].word[0]),
                     "r"(packet.part[0].word[1])
                     : "memory");
    } else {
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(packet.part[0].word[0]) : "memory");
    }
}

// A warp beside those that compute: counts the CTAs that have read the state, moves the state on with the last of them,
// and has CTA 0 compare what the ranks run.
__device__ void control(const Call& call, const DeviceState& before, int64_t mail_bytes, const Watch& watch) {
    Header* own = reinterpret_cast<Header*>(call.base[call.rank]);
    const int lane = threadIdx.x & 31;
    if (lane == 0) {
        __threadfence();
        if (atomicAdd(&own->state.num_arrived, 1u) == gridDim.x - 1) {
            own->state.num_arrived = 0;
            own->state.mail_bytes[before.num_mail_calls % 3] = mail_bytes;
            own->state.mail_bytes[(before.num_mail_calls + 2) % 3] = 0;
            // Kept below 3: a count that wraps at 2^32, which is no multiple of 3, would name one mailbox twice in a
            // row.
            own->state.num_mail_calls = (before.num_mail_calls + 1) % 3;
            own->state.num_calls = before.num_calls + 1;
        }
    }
    if (blockIdx.x != 0 || lane >= call.world || lane == call.rank) return;
    fabric::exchange_tags(watch, call.base[lane], call.rank, lane, before.num_calls);
}

// kPlain: what most calls are, with fewer registers, so that two CTAs share an SM: normed in the activations' type, no
// quantization, the sum not handed out.
template <typename T, int kMaxW, int kVecs, bool kPlain>
struct Mail {
    static constexpr int E = kElements<T>;
    const Call& call;
    const Watch& watch;
    const Lanes& lanes;
    ClusterTeam& team;
    const MailLayout& layout;
    int64_t mailbox;

    __device__ __forceinline__ OutKind out_kind() const { return kPlain ? OutKind::kSame : call.out_kind; }
    __device__ __forceinline__ int32_t out_packet() const { return kPlain ? 16 : packet_bytes<T>(call.out_kind); }
    __device__ __forceinline__ bool sum_whole() const { return !kPlain && call.sum_whole; }
    __device__ __forceinline__ bool scales_rows() const { return !kPlain && call.quant == QuantKind::kPerToken; }
    __device__ __forceinline__ int32_t behind(int32_t step) const {
        const int32_t rank = call.rank + step;
        return rank < call.world ? rank : rank - call.world;
    }
    // This rank's slots in the mailbox of the rank `step` behind; the slots of that rank's rows in the own mailbox.
    __device__ __forceinline__ char* theirs(uint32_t step, uint32_t at, uint32_t row_bytes, uint32_t index) const {
        return call.base[behind(step)] + mailbox +
               (at + ((call.world - 1 - step) * layout.slot_rows + index) * row_bytes);
    }
    __device__ __forceinline__ const char* mine(uint32_t step, uint32_t at, uint32_t row_bytes, uint32_t index) const {
        return call.base[call.rank] + mailbox + (at + ((step - 1) * layout.slot_rows + index) * row_bytes);
    }
    // Where row `row` of a tensor has this thread's vector j.
    __device__ __forceinline__ int64_t in_tensor(int32_t row, int j) const {
        return (static_cast<int64_t>(row) * lanes.count + lanes.at(j)) * 16;
    }
    __device__ __forceinline__ Vec16 partial(int32_t row, int j) const {
        return fabric::load(static_cast<const char*>(call.partial) + in_tensor(row, j));
    }

    // Slot row `index` of every owner's share: this rank's partial rows on their way.
    __device__ __forceinline__ void send_to_owners(int32_t index) const {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            Vec16 v[kMaxW];
#pragma unroll
            for (int step = 1; step < kMaxW; ++step) {
                if (step >= call.world) break;
                const int32_t owner = behind(step);
                if (call.begin[owner] + index < call.begin[owner + 1]) v[step] = partial(call.begin[owner] + index, j);
            }
#pragma unroll
            for (int step = 1; step < kMaxW; ++step) {
                if (step >= call.world) break;
                const int32_t owner = behind(step);
                if (call.begin[owner] + index < call.begin[owner + 1])
                    fabric::relaxed_store(theirs(step, 0, layout.row_bytes, index) + lanes.at(j) * 16,
                                          fabric::filled(v[step]));
            }
        }
    }

    // Token row `row` to all peers.
    __device__ __forceinline__ void send_to_all(int32_t row) const {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            const Vec16 v = fabric::filled(partial(row, j));
#pragma unroll
            for (int step = 1; step < kMaxW; ++step) {
                if (step >= call.world) break;
                fabric::relaxed_store(theirs(step, 0, layout.row_bytes, row) + lanes.at(j) * 16, v);
            }
        }
    }

    // Token row `row`, whose peers' parts come in slot row `index`: summed, finished, stored; and sent if two-shot.
    __device__ __forceinline__ void reduce(int32_t row, int32_t index, bool send) const {
        float x[kVecs][E];
        Vec16 residual[kVecs];
        EarlyWeight<T, kVecs> weight(call.norm, lanes);
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
#pragma unroll
            for (int i = 0; i < E; ++i)
                x[j][i] = 0;
            if (!lanes.has(j)) continue;
            Vec16 part[kMaxW];
            // In the order of ranks, which is the order of the sum.
#pragma unroll
            for (int r = 0; r < kMaxW; ++r) {
                if (r >= call.world) break;
                part[r] = r == call.rank ? fabric::filled(partial(row, j)) : fabric::relaxed_load(part_of(r, index, j));
            }
            if (call.residual != nullptr) {
                residual[j] = fabric::load(static_cast<const char*>(call.residual) + in_tensor(row, j));
            }
            await_parts(part, index, j);
#pragma unroll
            for (int r = 0; r < kMaxW; ++r) {
                if (r >= call.world) break;
                float widened[E];
                fabric::widen(part[r], widened, static_cast<const T*>(nullptr));
#pragma unroll
                for (int i = 0; i < E; ++i)
                    x[j][i] += widened[i];
            }
        }
        const auto before = [&](int j) { return residual[j]; };
        finish<T>(x, call, lanes, call.residual != nullptr, before, team, weight, [&](int j, const Vec16& sum) {
            if (call.sum != nullptr) fabric::store(static_cast<char*>(call.sum) + in_tensor(row, j), sum);
            if (!send || !sum_whole()) return;
#pragma unroll
            for (int step = 1; step < kMaxW; ++step)
                if (step < call.world)
                    fabric::relaxed_store(theirs(step, layout.sum_at, layout.row_bytes, index) + lanes.at(j) * 16, sum);
        });
        float scale = 1.0f, inverse = 1.0f;
        if constexpr (!kPlain) inverse = inverse_scale<T>(x, call, lanes, scale, team);
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            const int32_t vec = lanes.at(j);
            const Packet packet = packed<T>(x[j], out_kind(), inverse);
            if (send) {
#pragma unroll
                for (int step = 1; step < kMaxW; ++step) {
                    if (step >= call.world) break;
                    send_finished(step, index, vec, packet, scale);
                }
            }
            store_finished(row, vec, packet, scale);
        }
    }

    // Looks at all that are missing in one go: they come at about the same time.
    __device__ __forceinline__ void await_parts(Vec16 (&part)[kMaxW], int32_t index, int j) const {
        fabric::Patience patience;
        for (;;) {
            int32_t missing = -1;
#pragma unroll
            for (int r = 0; r < kMaxW; ++r)
                if (r < call.world && !fabric::is_there(part[r])) missing = r;
            if (missing < 0) return;
            if (patience.is_over(watch)) fabric::give_up(watch, patience.code(), missing, fabric::Slot::kMail, 1, 0, 0);
#pragma unroll
            for (int r = 0; r < kMaxW; ++r)
                if (r < call.world && !fabric::is_there(part[r])) part[r] = fabric::relaxed_load(part_of(r, index, j));
        }
    }

    __device__ __forceinline__ const char* part_of(int32_t sender, int32_t index, int j) const {
        const int32_t step = sender > call.rank ? sender - call.rank : sender - call.rank + call.world;
        return mine(step, 0, layout.row_bytes, index) + lanes.at(j) * 16;
    }

    __device__ __forceinline__ void send_finished(int32_t step, int32_t index, int32_t vec, const Packet& packet,
                                                  float scale) const {
        if (call.normed != nullptr)
            send_packet(theirs(step, layout.out_at, layout.out_row_bytes, index) + vec * out_packet(), packet,
                        out_packet());
        if (scales_rows() && vec == 0) {
            const uint32_t bits = __float_as_uint(scale);
            fabric::relaxed_store(theirs(step, layout.out_at, layout.out_row_bytes, index + 1) - kScaleBytes,
                                  Vec16{{bits, bits, bits, bits}});
        }
    }

    __device__ __forceinline__ void store_finished(int32_t row, int32_t vec, const Packet& packet, float scale) const {
        if (call.normed != nullptr) {
            char* to = static_cast<char*>(call.normed) + (static_cast<int64_t>(row) * lanes.count + vec) * out_packet();
            store_packet(to, packet, out_packet());
        }
        if (scales_rows() && vec == 0) static_cast<float*>(call.row_scale)[row] = scale;
    }

    // Slot row `index` of every owner's share: finished rows that peers sent.
    __device__ __forceinline__ void receive(int32_t index) const {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
            if (!lanes.has(j)) continue;
            const int32_t vec = lanes.at(j);
            Packet packet[kMaxW];
            Vec16 sum[kMaxW];
#pragma unroll
            for (int step = 1; step < kMaxW; ++step) {
                if (step >= call.world || !has_row(step, index)) continue;
                if (call.normed != nullptr)
                    packet[step] = look_packet(
                        mine(step, layout.out_at, layout.out_row_bytes, index) + vec * out_packet(), out_packet());
                if (sum_whole())
                    sum[step] = fabric::relaxed_load(mine(step, layout.sum_at, layout.row_bytes, index) + vec * 16);
            }
#pragma unroll
            for (int step = 1; step < kMaxW; ++step) {
                if (step >= call.world || !has_row(step, index)) continue;
                const int32_t owner = behind(step);
                const int32_t row = call.begin[owner] + index;
                float scale = 1.0f;
                if (call.normed != nullptr) {
                    const char* from = mine(step, layout.out_at, layout.out_row_bytes, index);
                    await_packet(packet[step], from + vec * out_packet(), out_packet(), watch, owner);
                    if (scales_rows() && vec == 0) {
                        const Vec16 bits = await_mail(from + layout.out_row_bytes - kScaleBytes, watch, owner);
                        scale = __uint_as_float(bits.word[0]);
                    }
                    store_finished(row, vec, packet[step], scale);
                }
                if (sum_whole()) {
                    if (!fabric::is_there(sum[step]))
                        sum[step] =
                            await_mail(mine(step, layout.sum_at, layout.row_bytes, index) + vec * 16, watch, owner);
                    fabric::store(static_cast<char*>(call.sum) + in_tensor(row, j), sum[step]);
                }
            }
        }
    }

    __device__ __forceinline__ bool has_row(int32_t step, int32_t index) const {
        const int32_t owner = behind(step);
        return call.begin[owner] + index < call.begin[owner + 1];
    }
};

template <typename T, int kMaxW, int kVecs, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads + kControlThreads, kPlain ? 2 : 1)
    mail(const __grid_constant__ Call call, const __grid_constant__ MailLayout layout, int one_shot, int cluster) {
    __shared__ float parts[2][kMaxCluster * kMaxWarps];
    __shared__ alignas(8) uint64_t arrived[2];
    const int num_threads = blockDim.x - kControlThreads;
    const int in_cluster = static_cast<int>(blockIdx.x) % cluster;
    ClusterTeam team{parts, arrived, cluster, in_cluster, num_threads / 32};
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        for (int parity = 0; parity < 2 && cluster > 1; ++parity) {
            const uint32_t barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&arrived[parity]));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
            ClusterTeam::expect(barrier, cluster * team.num_warps);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    // Before the wait for the kernel in front: this much of the start is hidden behind it.
    if (cluster > 1)
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    fabric::let_next_kernel_start();
    fabric::wait_for_previous_kernel();

    const Header* own = reinterpret_cast<const Header*>(call.base[call.rank]);
    DeviceState state;
    state.num_calls = *reinterpret_cast<const volatile uint64_t*>(&own->state.num_calls);
    state.num_mail_calls = *reinterpret_cast<const volatile uint32_t*>(&own->state.num_mail_calls);
    uint64_t stale[3];
    for (int i = 0; i < 3; ++i)
        stale[i] = *reinterpret_cast<const volatile uint64_t*>(&own->state.mail_bytes[i]);
    const uint64_t tag = fabric::tag_word(state.num_calls + 1, call.tokens, call.tag);
    const Watch watch{reinterpret_cast<Header*>(call.base[call.rank]), call.record, call.timeout_ns, tag};
    if (static_cast<int>(threadIdx.x) >= num_threads) {
        asm volatile("bar.sync 2, %0;" ::"r"(blockDim.x) : "memory");
        control(call, state, layout.bytes, watch);
        return;
    }
    asm volatile("bar.arrive 2, %0;" ::"r"(blockDim.x) : "memory");

    const uint32_t turn = state.num_mail_calls % 3, last = (state.num_mail_calls + 2) % 3;
    const Lanes lanes{static_cast<int>(threadIdx.x) + in_cluster * num_threads, cluster * num_threads,
                      static_cast<int>(call.hidden) / kElements<T>};
    const Mail<T, kMaxW, kVecs, kPlain> rows{call, watch, lanes, team, layout, call.regions.mailbox(turn)};
    const int32_t first = blockIdx.x / cluster, stride = gridDim.x / cluster;
    const uint64_t stale_bytes = last == 0 ? stale[0] : last == 1 ? stale[1] : stale[2];
    const auto clear = [&] {
        char* to = call.base[call.rank] + call.regions.mailbox(last);
        const Vec16 absent{{fabric::kAbsent, fabric::kAbsent, fabric::kAbsent, fabric::kAbsent}};
        for (uint64_t at = (blockIdx.x * static_cast<uint64_t>(num_threads) + threadIdx.x) * 16; at < stale_bytes;
             at += static_cast<uint64_t>(gridDim.x) * num_threads * 16)
            fabric::store(to + at, absent);
    };
    const int32_t begin = one_shot ? 0 : call.begin[call.rank];
    const int32_t end = one_shot ? call.tokens : call.begin[call.rank + 1];
    for (int32_t index = first; index < (one_shot ? call.tokens : call.share); index += stride)
        one_shot ? rows.send_to_all(index) : rows.send_to_owners(index);
    // What the last call left is cleared while rows travel.
    if (one_shot) clear();
    for (int32_t index = first; begin + index < end; index += stride)
        rows.reduce(begin + index, index, !one_shot);
    if (one_shot) return;
    clear();
    for (int32_t index = first; index < call.share; index += stride)
        rows.receive(index);
}

struct Shape {
    int num_threads;
    int cluster;
    int vecs;
};

// One vector a thread. A few rows go over as many CTAs as a cluster may have, since many CTAs move them sooner than a
// few do; where there are rows for all SMs, over as few as hold one.
Shape shape_of(int64_t num_vecs, int64_t rows, int num_sms, int cluster, bool has_clusters) {
    constexpr int kFewThreads = 128;
    constexpr int kCtasAnSm = 2;
    Shape shape{0, 1, 1};
    if (has_clusters) {
        const bool few = rows * kMaxCluster <= static_cast<int64_t>(kCtasAnSm) * num_sms;
        const int largest = cluster > 0 ? std::min(cluster, kMaxCluster) : few ? kMaxCluster : 1;
        while (shape.cluster < largest && num_vecs > static_cast<int64_t>(shape.cluster) * kFewThreads)
            shape.cluster *= 2;
        while (shape.cluster < kMaxCluster && num_vecs > static_cast<int64_t>(shape.cluster) * kMaxThreads)
            shape.cluster *= 2;
    }
    int64_t a_cta = (num_vecs + shape.cluster - 1) / shape.cluster;
    while (a_cta > static_cast<int64_t>(kMaxThreads) * shape.vecs)
        shape.vecs *= kMostVecs;
    a_cta = (a_cta + shape.vecs - 1) / shape.vecs;
    shape.num_threads = static_cast<int>((a_cta + 31) / 32 * 32);
    return shape;
}

template <typename T, int kMaxW, int kVecs, bool kPlain>
int enqueue(const Call& call, const Launch& launch, const Shape& shape) {
    const auto kernel = mail<T, kMaxW, kVecs, kPlain>;
    int major = 0, num_sms = 0, device = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    cudaLaunchAttribute attributes[2];
    int num_attributes = 0;
    if (shape.cluster > 1) {
        attributes[num_attributes].id = cudaLaunchAttributeClusterDimension;
        attributes[num_attributes].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
        ++num_attributes;
    }
    if (launch.overlap && major >= 9) {
        attributes[num_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[num_attributes].val.programmaticStreamSerializationAllowed = 1;
        ++num_attributes;
    }
    cudaLaunchConfig_t config{};
    config.blockDim = shape.num_threads + kControlThreads;
    config.stream = static_cast<cudaStream_t>(launch.stream);
    config.attrs = attributes;
    config.numAttrs = num_attributes;
    // CTAs wait for each other through peers: all of them must be resident at once. How many can be is asked once for
    // each shape of the kernel: the driver takes longer to say so than to launch.
    struct Fit {
        int device = -1, num_threads = 0, cluster = 0, num_teams = 0;
    };
    thread_local Fit fit;
    if (fit.device != device || fit.num_threads != shape.num_threads || fit.cluster != shape.cluster) {
        Fit found{device, shape.num_threads, shape.cluster, 0};
        config.gridDim = shape.cluster;
        cudaError_t error = cudaSuccess;
        if (shape.cluster > 1) {
            config.numAttrs = 1;
            error = cudaOccupancyMaxActiveClusters(&found.num_teams, kernel, &config);
            config.numAttrs = num_attributes;
        } else {
            int per_sm = 0;
            error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, config.blockDim.x, 0);
            found.num_teams = per_sm * num_sms;
        }
        if (error != cudaSuccess) return error;
        fit = found;
    }
    int num_teams = fit.num_teams;
    if (num_teams < 1) return cudaErrorLaunchOutOfResources;
    if (launch.num_ctas > 0) num_teams = std::min(num_teams, std::max(1, launch.num_ctas / shape.cluster));
    const bool one_shot = launch.form == Form::kMailOneShot;
    const int64_t rows = one_shot ? call.tokens : call.share;
    num_teams = static_cast<int>(std::min<int64_t>(num_teams, rows));
    config.gridDim = num_teams * shape.cluster;
    const int32_t out_bytes = out_bytes_of(call.out_kind, launch.dtype);
    MailLayout layout;
    if (!MailLayout::make(layout, one_shot, call.tokens, call.hidden, size_of(launch.dtype), out_bytes,
                          call.quant == QuantKind::kPerToken, call.world, call.sum_whole != 0,
                          call.regions.mailbox_bytes))
        return cudaErrorInvalidValue;
    return cudaLaunchKernelEx(&config, kernel, call, layout, static_cast<int>(one_shot), shape.cluster);
}

template <typename T, int kMaxW>
int with_outputs(const Call& call, const Launch& launch, const Shape& shape) {
    const bool plain = call.out_kind == OutKind::kSame && call.quant == QuantKind::kNone && !call.sum_whole;
    return plain ? enqueue<T, kMaxW, 1, true>(call, launch, shape) : enqueue<T, kMaxW, 1, false>(call, launch, shape);
}

template <typename T>
int with_world(const Call& call, const Launch& launch, const Shape& shape) {
    if (shape.vecs > kMostVecs) return cudaErrorInvalidValue;
    if (shape.vecs > 1) return enqueue<T, kMaxWorld, kMostVecs, false>(call, launch, shape);
    if (call.world <= 2) return with_outputs<T, 2>(call, launch, shape);
    if (call.world <= 4) return with_outputs<T, 4>(call, launch, shape);
    return with_outputs<T, kMaxWorld>(call, launch, shape);
}

bool has_clusters(int device) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major >= 9;
}

}  // namespace

const char* mail_unsupported(DType dtype, int64_t hidden, int32_t device) {
    const int64_t num_vecs = hidden * size_of(dtype) / 16;
    return shape_of(num_vecs, 1, 1, 0, has_clusters(device)).vecs > kMostVecs ? "rows are too long for the mail forms"
                                                                              : "";
}

int run_mail(const Call& call, const Launch& launch) {
    int device = 0;
    cudaGetDevice(&device);
    int num_sms = 0;
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    const int64_t rows = launch.form == Form::kMailOneShot ? call.tokens : call.share;
    const Shape shape = shape_of(static_cast<int64_t>(call.hidden) * size_of(launch.dtype) / 16, rows, num_sms,
                                 launch.cluster, has_clusters(device));
    switch (launch.dtype) {
        case DType::kFloat32:
            return with_world<float>(call, launch, shape);
        case DType::kBFloat16:
            return with_world<__nv_bfloat16>(call, launch, shape);
        case DType::kFloat16:
            return with_world<__half>(call, launch, shape);
    }
    return cudaErrorInvalidValue;
}

}  // namespace weave::gpu
