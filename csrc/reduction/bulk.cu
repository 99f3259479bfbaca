// The bulk kernel of all_reduce_norm: two steps of bulk copies (TMA) that only push, each with a signal after it.
//
// Rows are taken in units of 16 or 32 KiB. Unit j of CTA c is unit c + j * (CTAs) of a share, on every rank, so CTA c
// deals with CTA c of each peer alone. In a CTA
//   - one thread, the loader, brings partial rows into shared memory, and finished rows that peers pushed into the
//     output buffer, unless the caller reads them there;
//   - a second one sends those: to their owners' staging buffers, and to the caller's tensors; and waits until they
//     have arrived;
//   - two teams of threads take turns with the units that this rank owns: they reduce and finish them in registers, and
//     store them to shared memory;
//   - a third thread sends those to all output buffers and waits until they have arrived;
//   - one warp signals. A fence at system scope waits for everything that its SM has in flight (5 us and more while
//     copies flow), so this warp does nothing else: it polls how far the senders are, fences once, signals it all.
//
// Memory order, by what is shared:
//
//   partial rows in the owner's staging buffer
//     store   the source's bulk copies
//     fence   wait_group in the thread that copies; release to the signalling warp, which acquires and fences
//             at system scope
//     flag    partial[source][CTA], relaxed
//     wait    one lane a source of each of the owner's warps, acquire; __syncwarp; then plain loads
//     again   in the source's next call: by then it has all of the owner's rows, which are made of these
//   finished rows in every rank's output buffer
//     store   the owner's bulk copies
//     fence   the same
//     flag    rows[owner][CTA], relaxed
//     wait    the loader, acquire; fence.proxy.async; then bulk copies. Or kernels after this one, where the
//             caller's rows alias the buffer
//     again   in the owner's next call, once partial rows of that call have come from here: this kernel has ended then
//   finished rows in shared memory
//     store   a team, plain
//     fence   fence.proxy.async.shared::cta in every thread, then a barrier of the team
//     flag    mbarrier place_full
//     wait    the third thread; then bulk copies
//     again   once mbarrier place_empty says that the copies have read it (wait_group.read)
//
// So one staging and one output buffer are enough. Where the caller's normalized rows alias the output buffer, what was
// there before is overwritten once this rank's partial rows have come to the owner, which is after all that the stream
// did before.
#include <algorithm>

#include "fabric/call.cuh"
#include "fabric/kernel_code.cuh"
#include "reduction/bulk_loader.cuh"
#include "reduction/bulk_reducer.cuh"
#include "reduction/bulk_senders.cuh"

namespace weave::gpu {
namespace {

using fabric::KernelCode;

// Bytes in flight on a GPU: enough to keep the link busy for a round trip. More would only queue, and signals
// after them.
constexpr uint32_t kBytesInFlight = 1536 << 10;
constexpr uint32_t kUnitBytes = 16 << 10;
constexpr uint32_t kLeastUnitBytes = 4 << 10;
// Units that make a long unit worth it: fewer, larger copies and signals, but coarser shares of the work.
constexpr int kManyUnits = 16;
constexpr int kWorkers = 4;  // warps in addition to the teams: loader, two senders, signals
constexpr int kThreads = 32 * kWorkers + kTeams * kTeamThreads;
constexpr int kMostVecs = 8;

template <typename T, int kMaxW, int kVecs, bool kPlain>
__global__ void __launch_bounds__(kThreads, 1)
    bulk(const __grid_constant__ Call call, const __grid_constant__ BulkLayout layout) {
#ifdef WEAVE_BULK_COPY
    extern __shared__ __align__(128) char memory[];
    __shared__ float parts[kTeams][2][kTeamWarps];
    __shared__ Shared shared;
    __shared__ uint32_t ring[StageSender::kRing];
    if (threadIdx.x == 0) shared.init();
    const fabric::CallState state = fabric::begin_call<false>(call.group);
    __syncthreads();
    const Watch watch{call.group, fabric::tag_word(state.epoch(), call.tokens, call.site)};
    char* places = memory + layout.stages * layout.unit_bytes;
    const Work work{call, layout, watch, shared, memory, places, fabric::signal_word(state.epoch(), 0)};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= kWorkers) {
        const int thread = static_cast<int>(threadIdx.x) - 32 * kWorkers;
        Team team{parts[thread / kTeamThreads], thread / kTeamThreads, thread % kTeamThreads};
        const Lanes lanes{team.thread, kTeamThreads, call.hidden / kElements<T>};
        Reducer<T, kMaxW, kVecs, kPlain>{work, lanes, team}.run();
    } else if (warp == 3) {
        publish(work);
    } else if (warp == 2) {
        if (lane == 0) RowSender{work}.run();
    } else if (warp == 1) {
        if (lane == 0) StageSender{work, ring}.run();
    } else if (lane == 0) {
        Loader{work}.run();
    } else {
        fabric::send_tags(watch, state, lane - 1);
        fabric::end_call<false>(watch, state, lane - 1);
    }
#endif
}

// Shared memory in addition to what the kernel declares itself.
int room_for_rows(int device) {
    constexpr int kStaticBytes = 2048;
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return bytes - kStaticBytes;
}

// Chooses what shared memory holds; false if it is too small.
bool fit(BulkLayout& layout, uint32_t unit_bytes, const Call& call, int device) {
    const int room = room_for_rows(device);
    layout.unit_bytes = unit_bytes;
    layout.rows_a_unit = std::max<int32_t>(1, unit_bytes / layout.row_bytes);
    layout.place_bytes = layout.rows_a_unit * (layout.out_row_bytes + (call.sum_whole ? layout.row_bytes : 0));
    layout.place_bytes = (layout.place_bytes + 127) / 128 * 128;
    constexpr int kFewestStages = 4;
    for (layout.places = kMaxPlaces; layout.places > 0; --layout.places) {
        const int stages = (room - kTeams * layout.places * layout.place_bytes) / static_cast<int>(unit_bytes);
        layout.stages = std::min(kMaxStages, stages / 2 * 2);
        if (stages >= kFewestStages) return true;
    }
    return false;
}

template <typename T, int kMaxW, int kVecs, bool kPlain>
int enqueue_as(const Call& call, const Launch& launch) {
    const auto kernel = bulk<T, kMaxW, kVecs, kPlain>;
    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    // Else an empty kernel, which would also start before the one ahead of it has ended.
    if (fabric::code_of<bulk<T, kMaxW, kVecs, kPlain>>(device) != KernelCode::kSm90) return cudaErrorNotSupported;
    BulkLayout layout{};
    const OutputLayout output = output_layout(row_kind(call, launch.dtype), call.tokens);
    layout.row_bytes = output.row_bytes;
    layout.out_bytes = output.out_bytes;
    layout.out_row_bytes = output.out_row_bytes;
    layout.sum_offset = output.sum_offset;
    // CTAs wait for each other through peers: all of them must be resident at once, which is one on each SM.
    const int64_t most = (static_cast<int64_t>(call.share) * layout.row_bytes + kUnitBytes - 1) / kUnitBytes;
    int64_t num_ctas = std::min<int64_t>({num_sms, kMaxCtas, most, call.share});
    if (launch.num_ctas > 0) num_ctas = std::min<int64_t>(num_ctas, launch.num_ctas);
    uint32_t unit_bytes = most >= kManyUnits * num_ctas ? 2 * kUnitBytes : kUnitBytes;
    while (!fit(layout, unit_bytes, call, device)) {
        if (unit_bytes <= kLeastUnitBytes) return cudaErrorInvalidValue;
        unit_bytes /= 2;
    }
    const uint32_t in_flight = kBytesInFlight / layout.unit_bytes / static_cast<uint32_t>(num_ctas);
    layout.max_in_flight = std::clamp<int32_t>(in_flight, 1, fabric::kMaxPending);
    layout.aliases_output = call.normalized == call.group.base[call.group.rank] + call.buffers.output_offset;
    if (layout.aliases_output && layout.out_row_bytes != layout.out_bytes) return cudaErrorInvalidValue;
    layout.collects = !layout.aliases_output || call.sum_whole;
    layout.collects_early = layout.collects && 2 * num_ctas < num_sms;
    const int64_t staging = staging_bytes(layout.row_bytes, call.share, call.group.world);
    if (staging > call.buffers.staging_bytes || output.num_bytes > call.buffers.output_bytes)
        return cudaErrorInvalidValue;
    // A job counts its CTA's units in 16 bits.
    if (call.share / (layout.rows_a_unit * num_ctas) >= UINT16_MAX) return cudaErrorInvalidValue;
    const int shared_bytes = layout.stages * layout.unit_bytes + kTeams * layout.places * layout.place_bytes;
    // The same limit in every call: another thread may be about to launch this kernel with more.
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room_for_rows(device));
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(num_ctas);
    config.blockDim = kThreads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(launch.stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, call, layout);
}

template <typename T, int kMaxW, int kVecs>
int enqueue(const Call& call, const Launch& launch) {
    return is_plain(call) ? enqueue_as<T, kMaxW, kVecs, true>(call, launch)
                          : enqueue_as<T, kMaxW, kVecs, false>(call, launch);
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
    if (call.group.world <= 2) return with_vecs<T, 2>(call, launch);
    if (call.group.world <= 4) return with_vecs<T, 4>(call, launch);
    return with_vecs<T, kMaxWorld>(call, launch);
}

}  // namespace

const char* bulk_unsupported(DType dtype, int64_t hidden, bool fp8, int32_t device) {
    // All kernels of this file were compiled for the same architectures: one of them stands for the others.
    if (fabric::code_of<bulk<float, 2, 2, true>>(device) != KernelCode::kSm90)
        return "bulk copies need code for compute capability 9.0 or newer";
    if (hidden * size_of(dtype) / 16 > kMostVecs * kTeamThreads) return "rows are too long for the bulk kernel";
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
