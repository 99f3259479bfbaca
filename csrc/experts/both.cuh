// Both GEMMs of grouped.h in one kernel (sm_90a), of the device code of grouped.cuh: a persistent grid of clusters of
// two CTAs, whose items are those of the first GEMM and, a fixed lag behind the last one that it reads, each of the
// second (LaggedOrder). A counter in memory assigns them: thread 0 of a cluster's first CTA takes the next one while
// the stages of the one before are filled, and announces it to all threads of both CTAs.
//
// No cluster has to run concurrently with another one: an item waits only for items that stand before it, which running
// clusters have taken, and a cluster's own come in ascending order. So the earliest item that is not finished waits for
// nothing.
//
// Memory order, by what is shared, in addition to that of grouped.cuh:
//
//   items taken, stored results of a tile: numbers in the routing table
//     store   0 by the routing kernels
//     wait    griddepcontrol.wait, by every thread: the kernel ahead has ended
//     again   the next call's routing kernels, after the sum, zero them in a table of their own
//   rows of the first GEMM in memory
//     store   128 threads of a consumer, ordinary stores
//     fence   await_consumer, then a release at the scope of the GPU by one of them
//     flag    the tile's number, which counts one for each column, CTA and consumer
//     wait    load-acquire by thread 32 of each CTA that reads them, until all have been counted
//     fence   fence.proxy.async.global in that thread, between ordinary stores and copies (TMA)
//     reader  copies (TMA) of that thread
//     again   written once a call
//   a ticket in shared memory
//     store   st.async of the thread that took it, to both CTAs
//     flag    announced[ticket], which counts its bytes
//     wait    all threads of both CTAs
//     again   kTickets items later. The thread that takes one waited for a stage that was used kStages stages before,
//             so at least for consumers' multiplies of the item kStages before this one; all threads of both CTAs had
//             read their tickets of the item before that one by then: stages of it were full, and after an item of the
//             second GEMM all producer threads synchronize
#pragma once

#include "experts/grouped.cuh"
#include "experts/tickets.cuh"

namespace weave::moe_experts {

constexpr int kTickets = 8;
static_assert(kTickets > kStages + 2);
// Stages before the last one of an item when the next one is taken, and announced.
constexpr int32_t kTakenAhead = 6, kAnnounceAhead = 3;
constexpr uint32_t kRowsThread = 32;
// Counted for each column of a tile.
constexpr int32_t kStoresOfColumn = gemm::kClusterCtas * gemm::kConsumers;

struct BothWork {
    Work first, second;
    int32_t* table;  // the same as theirs
    int32_t lag;     // groups of tiles
};

enum class Turn : int32_t { kNone = 0, kFirst = 1, kSecond = 2 };

struct Ticket {
    int4 rows;  // expert, first position, count, last position of the expert
    int4 item;  // column, which GEMM's, where the tile's stored results are counted
};

struct BothShared {
    Shared pipeline;
    alignas(16) Ticket tickets[kTickets];
    uint64_t announced[kTickets];
};

// What a thread works on, one after the other.
class Tickets {
  public:
    __device__ __forceinline__ explicit Tickets(BothShared& shared) : shared_(shared) {}
    __device__ __forceinline__ Turn take(Part& part) {
        await_phase(&shared_.announced[next()], count_ / kTickets % 2);
        const Ticket& ticket = shared_.tickets[next()];
        const int4 rows = ticket.rows, item = ticket.item;
        ++count_;
        part = part_of<false>(rows.x, {rows.y, rows.z}, rows.w, item.x);
        return static_cast<Turn>(item.y);
    }
    // Where the next one will be.
    __device__ __forceinline__ int32_t next() const { return static_cast<int32_t>(count_ % kTickets); }
    // Of the one that was taken last: where the tile's stored results are counted.
    __device__ __forceinline__ int32_t counted_at() const { return shared_.tickets[(count_ - 1) % kTickets].item.z; }

  private:
    BothShared& shared_;
    uint32_t count_ = 0;
};

// Of the producer. Thread 0 of the first CTA takes tickets for both; in items of the second GEMM one more thread of
// each CTA waits for rows and loads them, while thread 0 loads weights ahead.
class BothGemms {
  public:
    static constexpr bool kGathersToo = true;

    __device__ __forceinline__ BothGemms(const BothWork& work, BothShared& shared)
        : work_(work), shared_(shared), tickets_(shared) {
        if (threadIdx.x != 0 || gemm::cluster_rank() != 0) return;
        taken_ = take_number(work_.table + kTakenAt);
        announce();
    }

    __device__ __forceinline__ Turn take(Part& part) { return tickets_.take(part); }

    // What is set anew need not be kept while a part's addresses are computed, where registers are short.
    __device__ __forceinline__ void begin() { taken_ = 0; }
    __device__ __forceinline__ void between(int32_t block, int32_t blocks) {
        if (gemm::cluster_rank() != 0) return;
        if (block == max(blocks - kTakenAhead, 0)) taken_ = take_number(work_.table + kTakenAt);
        if (block == max(blocks - kAnnounceAhead, 0)) announce();
    }

    // Until the rows of the item that was taken last are there.
    __device__ __forceinline__ void await_rows() {
        await_counted(work_.table + tickets_.counted_at(), work_.first.columns * kStoresOfColumn);
        order_rows_before_copies();
    }

  private:
    __device__ __forceinline__ void announce() {
        const int32_t tiles = work_.table[0];
        const LaggedOrder order{{tiles, work_.first.columns, work_.first.group},
                                {tiles, work_.second.columns, work_.second.group},
                                work_.lag};
        Ticket ticket{};
        if (taken_ < order.num_items()) {
            const EitherItem found = order.item(taken_);
            const int4 record = *reinterpret_cast<const int4*>(work_.table + 4 * (found.item.tile + 1));
            const Rows rows = even_rows(record.w, record.y, record.z, work_.first.tile_rows);
            const Turn turn = found.second ? Turn::kSecond : Turn::kFirst;
            ticket.rows = {record.x, rows.first, rows.count, record.z - 1};
            ticket.item = {found.item.column, static_cast<int32_t>(turn), stored_at(tiles, found.item.tile), 0};
        }
        const int32_t next = here(tickets_.next());
        Ticket* to = &shared_.tickets[next];
        uint64_t* announced = &shared_.announced[next];
        for (uint32_t cta = 0; cta < gemm::kClusterCtas; ++cta) {
            arrive_expecting_at(announced, cta, sizeof(Ticket));
            put_words(&to->rows, ticket.rows, announced, cta);
            put_words(&to->item, ticket.item, announced, cta);
        }
    }

    const BothWork& work_;
    BothShared& shared_;
    Tickets tickets_;
    int32_t taken_ = 0;
};

__device__ __forceinline__ void init_tickets(BothShared& shared) {
    if (threadIdx.x == 0)
        for (int i = 0; i < kTickets; ++i)
            gemm::init_barrier(&shared.announced[i], 1);
}

// All threads of the producer warp group.
template <Product kFirst, bool kTransposed>
__device__ __forceinline__ void load_both(const BothWork& work, BothShared& shared) {
    BothGemms kernel(work, shared);
    Filled filled;
    Part part{};
    for (Turn turn; (turn = kernel.take(part)) != Turn::kNone;) {
        if (turn == Turn::kFirst) {
            gather_part<kFirst, kTransposed>(work.first, shared.pipeline, part, filled, kernel);
            continue;
        }
        if (threadIdx.x == 0) {
            load_part<Product::kDown, kTransposed, Loads::kWeight>(work.second, shared.pipeline, part, filled, kernel);
        } else if (threadIdx.x == kRowsThread) {
            kernel.await_rows();
            load_part<Product::kDown, kTransposed, Loads::kRows>(work.second, shared.pipeline, part, filled, kernel);
        } else {
            filled.count += work.second.blocks;
        }
        __syncwarp();
        // Else one that loads nothing could be late by more items than there are tickets.
        await_producers();
    }
}

// All 128 threads of consumer 0 or 1.
template <typename T, Product kFirst, bool kTransposed>
__device__ __forceinline__ void compute_both(const BothWork& work, BothShared& shared, int32_t consumer) {
    Tickets tickets(shared);
    gemm::Position<kStages> at;
    Part part{};
    for (Turn turn; (turn = tickets.take(part)) != Turn::kNone;) {
        const bool second = turn == Turn::kSecond;
        uint8_t* staged = shared.pipeline.staged[consumer];
        int32_t targets[kPasses];
        find_targets(work.first, part, second, targets);
        float sum[kSums];
        multiply_part<T, kTransposed>(second ? work.second.blocks : work.first.blocks, part.octets, !second,
                                      shared.pipeline, consumer, at, sum);
        if (second) {
            finish_part<T, Product::kDown>(work.second, part, consumer, staged, targets, sum);
        } else {
            // Ends with a barrier of the consumer's threads, after their stores.
            finish_part<T, kFirst>(work.first, part, consumer, staged, targets, sum);
            if (threadIdx.x % 128 == 0) count_stored(work.table + tickets.counted_at());
        }
    }
}

template <typename T, Product kFirst, bool kTransposed>
__global__ void __launch_bounds__(gemm::kThreads, 1) both_gemms(const __grid_constant__ BothWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    auto& shared = shared_memory<BothShared>();
    init_tickets(shared);
    init_pipeline(shared.pipeline, true);
    gemm::await_cluster();
    let_next_kernel_launch();
    await_kernel_ahead();
    const int32_t warp = threadIdx.x / 32;
    if (warp < 4) {
        gemm::leave_registers<gemm::kLoaderRegisters>();
        load_both<kFirst, kTransposed>(work, shared);
    } else {
        gemm::take_registers<gemm::kConsumerRegisters>();
        compute_both<T, kFirst, kTransposed>(work, shared, warp / 4 - 1);
    }
    // Until both CTAs have made their last arrivals, in whichever of them the barriers are.
    __syncwarp();
    gemm::await_cluster();
#endif
}

// In both.dtypes.sm90a.cu.
template <typename T>
int launch_both(const BothWork& work, Product first, bool transposed, int32_t num_ctas, void* stream);

}  // namespace weave::moe_experts
