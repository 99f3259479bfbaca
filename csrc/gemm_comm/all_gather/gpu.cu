// Memory order, by what is shared:
//
//   gathered rows of every rank
//     store   the source's copies (copy engines), on its side stream
//     fence   the copy ends before the kernel after it in the stream begins; release, in signal of that kernel
//     flag    rows[source][0]
//     wait    a thread that loads tiles, acquire, then fence.proxy.async; or await_shards, acquire, in which case
//             kernels after that one read
//     again   in the source's next gather, after open_gather: it has seen this rank's tag of that call, which says
//     that
//             all kernels of this rank's stream before it, readers of these rows among them, have ended
//   the call's number, state.num_calls
//     store   open_gather's last thread, plain
//     flag    the end of that kernel
//     wait    kernels of this call, which come after it in `main`, or in `side` by an event
//     again   in the group's next call, launched after this one: `main` has waited for `side`
#include <cuda_runtime.h>

#include "gemm_comm/all_gather/gpu.h"
#include "gemm_comm/all_gather/shards.cuh"

namespace weave::gpu {
namespace {

constexpr int kThreads = 32;
static_assert(kThreads > fabric::kMaxWorld, "a thread for each peer, and one that counts the call");

__global__ void __launch_bounds__(kThreads)
    open_barrier(const __grid_constant__ fabric::GroupView group, int32_t tokens, uint32_t site) {
    const fabric::CallState state = fabric::begin_call<false>(group);
    __syncwarp();
    const fabric::Watch watch{group, fabric::tag_word(state.epoch(), tokens, site)};
    const int32_t thread = threadIdx.x;
    fabric::send_tags(watch, state, thread);
    fabric::end_call<false>(watch, state, thread);
}

// Fits on an SM with a CTA of the GEMM.
__global__ void __launch_bounds__(1) say_arrived(const __grid_constant__ fabric::GroupView group, int32_t peer) {
    fabric::signal(shard_flag(group, peer, group.rank), fabric::signal_word(running_call(group), 1));
}

__global__ void __launch_bounds__(kThreads)
    await_all(const __grid_constant__ fabric::GroupView group, int32_t tokens, uint32_t site) {
    const uint64_t epoch = running_call(group);
    const fabric::Watch watch{group, fabric::tag_word(epoch, tokens, site)};
    const int32_t source = threadIdx.x;
    if (source < group.world && source != group.rank) await_shard(watch, epoch, source);
}

int copy(char* to, const char* from, int64_t num_bytes, cudaStream_t stream) {
    if (num_bytes == 0) return cudaSuccess;
    return cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, stream);
}

// Rank `of`'s shard to its place among the rows at `to`.
int copy_blocks(const Gather& given, char* to, int32_t of, cudaStream_t stream) {
    if (given.outer == 1)
        return copy(to + of * given.block_bytes, static_cast<const char*>(given.shard), given.block_bytes, stream);
    const int64_t stride = given.group.world * given.block_bytes;
    return cudaMemcpy2DAsync(to + of * given.block_bytes, stride, given.shard, given.block_bytes, given.block_bytes,
                             given.outer, cudaMemcpyDeviceToDevice, stream);
}

}  // namespace

int open_gather(const Gather& given, void* main) {
    open_barrier<<<1, kThreads, 0, static_cast<cudaStream_t>(main)>>>(given.group, given.tokens, given.site);
    return cudaGetLastError();
}

int push_shard(const Gather& given, void* side) {
    const auto stream = static_cast<cudaStream_t>(side);
    // A rank multiplies the rows of the ranks after it in turn, so the first one that a shard goes to is the rank
    // before.
    for (int32_t step = given.group.world - 1; step >= 1; --step) {
        const int32_t peer = given.group.after(step);
        char* rows = given.group.base[peer] + given.rows_offset;
        int error = copy_blocks(given, rows, given.group.rank, stream);
        if (error != cudaSuccess) return error;
        say_arrived<<<1, 1, 0, stream>>>(given.group, peer);
        error = cudaGetLastError();
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

int keep_shard(const Gather& given, void* main) {
    char* rows = given.group.base[given.group.rank] + given.rows_offset;
    return copy_blocks(given, rows, given.group.rank, static_cast<cudaStream_t>(main));
}

int await_shards(const Gather& given, void* main) {
    await_all<<<1, kThreads, 0, static_cast<cudaStream_t>(main)>>>(given.group, given.tokens, given.site);
    return cudaGetLastError();
}

int hand_out(const Gather& given, void* to, void* side) {
    const int error = await_shards(given, side);
    if (error != cudaSuccess) return error;
    const auto stream = static_cast<cudaStream_t>(side);
    const char* rows = given.group.base[given.group.rank] + given.rows_offset;
    const int64_t own = given.group.rank * given.block_bytes, after = own + given.block_bytes;
    char* out = static_cast<char*>(to);
    if (const int failed = copy(out + own, static_cast<const char*>(given.shard), given.block_bytes, stream))
        return failed;
    if (const int failed = copy(out, rows, own, stream)) return failed;
    return copy(out + after, rows + after, given.group.world * given.block_bytes - after, stream);
}

Follower::~Follower() {
    // Fails where the driver is gone already.
    if (event_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event_));
}

int Follower::follow(void* earlier, void* later) {
    if (event_ == nullptr) {
        cudaEvent_t made = nullptr;
        const cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
        if (error != cudaSuccess) return error;
        event_ = made;
    }
    const auto event = static_cast<cudaEvent_t>(event_);
    const cudaError_t error = cudaEventRecord(event, static_cast<cudaStream_t>(earlier));
    return error != cudaSuccess ? error : cudaStreamWaitEvent(static_cast<cudaStream_t>(later), event, 0);
}

}  // namespace weave::gpu
