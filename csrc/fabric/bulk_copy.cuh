// Bulk copies (TMA) between shared memory and any GPU's memory, and the barriers in shared memory that count them
// (sm_90 and newer).
//
// Barriers have one arrival a phase; phases alternate in parity. Arriving releases and waiting acquires at the scope of
// the CTA. Copies out belong to groups of the thread that issues them.
#pragma once

#include <cstdint>

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
#define WEAVE_BULK_COPY 1
#endif

namespace weave::fabric {

// Copies of one thread in flight at once that await_arrival() can distinguish.
constexpr int kMaxPending = 8;

#ifdef WEAVE_BULK_COPY

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// As `times` threads do: of a barrier that was made for more arrivals.
__device__ __forceinline__ void arrive_times(uint64_t* barrier, uint32_t times) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(times) : "memory");
}

// Arrives, and keeps the phase open until `bytes` have been copied in.
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool is_over(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}

__device__ __forceinline__ void await_phase(uint64_t* barrier, uint32_t parity) {
    uint32_t done = 0;
    while (done == 0) {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    }
}

__device__ __forceinline__ void copy_in(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void copy_out(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
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
        case 0:
            return await_arrival<0>();
        case 1:
            return await_arrival<1>();
        case 2:
            return await_arrival<2>();
        case 3:
            return await_arrival<3>();
        case 4:
            return await_arrival<4>();
        case 5:
            return await_arrival<5>();
        case 6:
            return await_arrival<6>();
        case 7:
            return await_arrival<7>();
        default:
            return await_arrival<kMaxPending>();
    }
}

// Bulk copies and ordinary accesses are two ways to memory. Before a copy reads what ordinary stores wrote:
__device__ __forceinline__ void order_shared_stores_before_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void order_accesses_before_copies() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

#endif  // WEAVE_BULK_COPY

}  // namespace weave::fabric
