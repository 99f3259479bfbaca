// Kernels of tests/gpu/test_signals.py: ranks that signal each other through one arena.
#include "fabric/remote.cuh"
#include "fabric/signal.cuh"

namespace weave::fabric {

constexpr int kThreads = 128;

// What both sides know: where the reader's arena is, who signals, and by which word.
struct Meeting {
    char* arena;  // the reader's
    Record* record;
    uint64_t timeout_ns;
    uint64_t epoch;
    uint32_t num_signals;
};

__device__ GroupView view_of(const Meeting& meeting) {
    GroupView group{};
    group.base[0] = meeting.arena;
    group.own = reinterpret_cast<ArenaHeader*>(meeting.arena);
    group.lost_peer = &group.own->lost_peer;
    group.record = meeting.record;
    group.timeout_ns = meeting.timeout_ns;
    group.channel_offset = sizeof(ArenaHeader) - sizeof(Channel);  // the last one
    group.world = 2;
    return group;
}

__device__ uint64_t* word_of(const GroupView& group) {
    return &group.channel(0)->partial[1][7];
}

__device__ uint32_t value_of(uint64_t epoch, uint32_t index) {
    return static_cast<uint32_t>(epoch) * 1000003u + index;
}

}  // namespace weave::fabric

using namespace weave::fabric;

// CTA b writes its part of the data and adds 1 to the word that all CTAs share.
extern "C" __global__ void add(Meeting meeting, uint32_t* data) {
    const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
    data[index] = value_of(meeting.epoch, index);
    __syncthreads();
    const GroupView group = view_of(meeting);
    if (threadIdx.x == 0) signal_add(word_of(group), meeting.epoch, 1);
}

// One CTA copies the same data from shared memory into the arena, with a signal behind the copy.
extern "C" __global__ void put(Meeting meeting, int64_t offset) {
#ifdef WEAVE_BULK_COPY
    __shared__ alignas(16) uint32_t values[kThreads];
    values[threadIdx.x] = value_of(meeting.epoch, threadIdx.x);
    order_shared_stores_before_copies();
    __syncthreads();
    const GroupView group = view_of(meeting);
    if (threadIdx.x != 0) return;
    const Remote remote{group, 0, offset};
    remote.put_signal(values, sizeof values, word_of(group), signal_word(meeting.epoch, 1));
#endif
}

// Waits for all signals of the epoch and counts what of the data is not as it was written.
extern "C" __global__ void check(Meeting meeting, const uint32_t* data, uint32_t count, uint32_t* num_wrong) {
    const GroupView group = view_of(meeting);
    const Watch watch{group, tag_word(meeting.epoch, 0, 0)};
    if (threadIdx.x == 0)
        wait(word_of(group), signal_word(meeting.epoch, meeting.num_signals), watch, 1, Slot::kPartial);
    __syncthreads();
    for (uint32_t index = threadIdx.x; index < count; index += kThreads) {
        const uint32_t seen = *reinterpret_cast<const volatile uint32_t*>(data + index);
        if (seen != value_of(meeting.epoch, index)) atomicAdd(num_wrong, 1u);
    }
}
