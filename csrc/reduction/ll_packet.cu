// all_reduce_norm with LL packets: rows go to peers' mailboxes as words that carry their own arrival. The protocol, and
// why two mailboxes are enough: fabric/ll_packet.cuh.
//
// One-shot: every rank sends its rows to all peers and computes all rows. Two-shot: partial rows go to their owners,
// who send finished rows to everyone. A row is shared by the CTAs of a cluster, one 16-byte vector a thread.
//
// The link idles whenever all threads wait for something at once. So what has arrived of the next row is loaded before
// this one is finished and sent, and a finished row that came from a peer is taken while later rows are in flight.
#include <algorithm>

#include "fabric/call.cuh"
#include "fabric/kernel_code.cuh"
#include "reduction/ll_packet_rows.cuh"

namespace weave::gpu {
namespace {

using fabric::KernelCode;

constexpr int kControlThreads = 32;
// Of a thread, where rows are too long for one: only without clusters (code older than sm_90's).
constexpr int kMostVecs = 4;

// The clusters of the grid, of `size` CTAs each.
struct Teams {
    int32_t size;
    int32_t count;
};

template <typename T, int kMaxW, int kVecs, bool kTwoShot, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads + kControlThreads, 1)
    ll_packet(const __grid_constant__ Call call, Teams teams, const __grid_constant__ LLPacketLayout layout) {
    __shared__ float parts[2][kMaxCluster * kMaxWarps];
    __shared__ alignas(8) uint64_t arrived[2];
    const int num_threads = blockDim.x - kControlThreads;
    const int cluster = teams.size;
    const ClusterPlace place = cluster_place(cluster);
    ClusterTeam team{parts, arrived, cluster, place.cta, num_threads / 32};
    if (cluster > 1) team.init();
    const Lanes lanes{static_cast<int>(threadIdx.x) + place.cta * num_threads, cluster * num_threads,
                      static_cast<int>(call.hidden) / kElements<T>};
    const bool controls = static_cast<int>(threadIdx.x) >= num_threads;
    const int32_t first = place.cluster, stride = teams.count;
    Watch watch{call.group, 0};
    using Rows = LLPacketRows<T, kMaxW, kVecs, kTwoShot, kPlain>;
    Rows rows{call, watch, lanes, team, layout};
    const fabric::CallState state = fabric::begin_call<true>(call.group);
    // On its way with the state, which says where it goes.
    typename Rows::Outgoing out;
    rows.load(out, first, !controls);
    watch.tag = fabric::tag_word(state.epoch(), call.tokens, call.site);
    if (controls) {
        // A warp in addition to those that compute.
        fabric::send_tags(watch, state, threadIdx.x & 31);
        asm volatile("bar.sync 2, %0;" ::"r"(blockDim.x) : "memory");
        if (cluster > 1) team.await_peers();
        fabric::end_call<true>(watch, state, threadIdx.x & 31);
        return;
    }
    rows.mailbox = call.buffers.mailbox_offset + state.mailbox * call.buffers.mailbox_bytes;
    for (int32_t index = first; index < rows.num_outgoing(); index += stride) {
        rows.send(out, index);
        rows.load(out, index + stride, true);
    }
    asm volatile("bar.arrive 2, %0;" ::"r"(blockDim.x) : "memory");
    if (cluster > 1) team.await_peers();

    const int32_t begin = kTwoShot ? call.begin[call.group.rank] : 0;
    const int32_t end = kTwoShot ? call.begin[call.group.rank + 1] : call.tokens;
    EarlyWeight<T, kVecs, kPlain> weight(call.norm, lanes);
    Parts<kMaxW> ahead;
    if (begin + first < end) rows.peek_ahead(ahead, begin + first, first);
    int32_t received = first;
    for (int32_t index = first; begin + index < end; index += stride) {
        rows.reduce(ahead, begin + index, index, stride, end, weight);
        if (!kTwoShot || index == first) continue;
        rows.receive(received);
        received += stride;
    }
    for (; kTwoShot && received < call.share; received += stride)
        rows.receive(received);
}

struct Shape {
    int num_threads;
    int cluster;
    int vecs;
};

// One vector a thread. A few rows go over as many CTAs as a cluster may have, since many CTAs move them sooner than a
// few do; where there are rows for all SMs, over as few as hold one.
Shape shape_of(int64_t num_vecs, int64_t rows, int num_sms, bool has_clusters) {
    constexpr int kFewThreads = 128;
    constexpr int kCtasAnSm = 2;
    Shape shape{0, 1, 1};
    if (has_clusters) {
        const bool few = rows * kMaxCluster <= static_cast<int64_t>(kCtasAnSm) * num_sms;
        const int largest = few ? kMaxCluster : 1;
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

template <typename T, int kMaxW, int kVecs, bool kTwoShot, bool kPlain>
int enqueue(const Call& call, const Launch& launch, const Shape& shape) {
    const auto kernel = ll_packet<T, kMaxW, kVecs, kTwoShot, kPlain>;
    int num_sms = 0, device = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    const bool has_sm90 = fabric::code_of<ll_packet<T, kMaxW, kVecs, kTwoShot, kPlain>>(device) == KernelCode::kSm90;
    if (shape.cluster > 1 && !has_sm90) return cudaErrorNotSupported;
    cudaLaunchAttribute attributes[2];
    int num_attributes = 0;
    if (shape.cluster > 1) {
        attributes[num_attributes].id = cudaLaunchAttributeClusterDimension;
        attributes[num_attributes].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
        ++num_attributes;
    }
    if (has_sm90) {
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
    const int64_t rows = kTwoShot ? call.share : call.tokens;
    num_teams = static_cast<int>(std::min<int64_t>(num_teams, rows));
    config.gridDim = num_teams * shape.cluster;
    const LLPacketLayout layout =
        ll_packet_layout(row_kind(call, launch.dtype), call.tokens, call.group.world, !kTwoShot);
    if (layout.num_bytes > std::min<int64_t>(call.buffers.mailbox_bytes, UINT32_MAX)) return cudaErrorInvalidValue;
    return cudaLaunchKernelEx(&config, kernel, call, Teams{shape.cluster, num_teams}, layout);
}

template <typename T, int kMaxW, int kVecs, bool kTwoShot>
int with_norm(const Call& call, const Launch& launch, const Shape& shape) {
    if constexpr (kVecs == 1)
        if (is_plain(call)) return enqueue<T, kMaxW, kVecs, kTwoShot, true>(call, launch, shape);
    return enqueue<T, kMaxW, kVecs, kTwoShot, false>(call, launch, shape);
}

template <typename T, int kMaxW, int kVecs>
int with_steps(const Call& call, const Launch& launch, const Shape& shape) {
    return launch.kernel == GpuKernel::kLLPacketOneShot ? with_norm<T, kMaxW, kVecs, false>(call, launch, shape)
                                                        : with_norm<T, kMaxW, kVecs, true>(call, launch, shape);
}

template <typename T>
int with_world(const Call& call, const Launch& launch, const Shape& shape) {
    if (shape.vecs > kMostVecs) return cudaErrorInvalidValue;
    if (shape.vecs > 1) return with_steps<T, kMaxWorld, kMostVecs>(call, launch, shape);
    if (call.group.world <= 2) return with_steps<T, 2, 1>(call, launch, shape);
    if (call.group.world <= 4) return with_steps<T, 4, 1>(call, launch, shape);
    return with_steps<T, kMaxWorld, 1>(call, launch, shape);
}

// All kernels of this file were compiled for the same architectures: one of them stands for the others.
bool has_clusters(int device) {
    return fabric::code_of<ll_packet<float, 2, 1, false, true>>(device) == KernelCode::kSm90;
}

}  // namespace

const char* ll_packet_unsupported(DType dtype, int64_t hidden, int32_t device) {
    const int64_t num_vecs = hidden * size_of(dtype) / 16;
    return shape_of(num_vecs, 1, 1, has_clusters(device)).vecs > kMostVecs ? "rows are too long for LL packets" : "";
}

int run_ll_packet(const Call& call, const Launch& launch) {
    int device = 0;
    cudaGetDevice(&device);
    int num_sms = 0;
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    const int64_t rows = launch.kernel == GpuKernel::kLLPacketOneShot ? call.tokens : call.share;
    const Shape shape =
        shape_of(static_cast<int64_t>(call.hidden) * size_of(launch.dtype) / 16, rows, num_sms, has_clusters(device));
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
