// The kernels that sort rows of a mixture by expert, from csrc/experts, as a function of a library for tests: on the
// CPU.
#include <algorithm>
#include <string>

#include "machine.h"
// What the kernels need of CUDA is above.
#include "experts/routing.cuh"

namespace weave::moe_experts {
namespace {

constexpr int32_t kPoison = -(1 << 28);

// In each CTA alone: none waits for another one. Shared memory begins as NaNs.
template <class Shared, class Kernel>
void run_ctas(const Chunks& chunks, uint32_t seed, const Kernel& kernel) {
    static_assert(sizeof(Shared) <= 48 << 10, "static shared memory");
    const auto count = static_cast<uint32_t>(chunks.count);
    for (uint32_t cta = 0; cta < count; ++cta)
        emulated::run_cluster({1, kRoutingThreads}, cta, count, seed + cta,
                              [&] { kernel(*reinterpret_cast<Shared*>(emulated::running().cta->memory())); });
}

// What count_rows leaves is there for a CTA of place_rows once one of its threads has waited for it.
template <int kBins>
void run(const RowsToSort& asked, uint32_t seed) {
    const Chunks chunks = chunks_of(asked.num_rows, asked.num_experts);
    const SortWork work{asked, chunks.rows};
    const auto num_counts = static_cast<size_t>(chunks.count) * kBins;
    std::vector<int32_t> counted(num_counts, kPoison), read(num_counts, kPoison);
    kernel_ahead = nullptr;
    if (chunks.count > 1) {
        SortWork counting = work;
        counting.of.counts = counted.data();
        run_ctas<CountShared<kBins>>(chunks, seed, [&](CountShared<kBins>& shared) { count_rows(counting, shared); });
        kernel_ahead = [&] { read = counted; };
    }
    SortWork placing = work;
    placing.of.counts = read.data();
    run_ctas<PlaceShared<kBins>>(chunks, seed, [&](PlaceShared<kBins>& shared) {
        if (threadIdx.x == 0 && kernel_ahead) std::fill(read.begin(), read.end(), kPoison);
        __syncthreads();
        place_rows(placing, shared);
    });
    kernel_ahead = nullptr;
}

}  // namespace
}  // namespace weave::moe_experts

extern "C" {

// What failed; empty if nothing did.
const char* run(const int64_t* experts, int64_t num_rows, int32_t num_experts, int32_t tile_rows, int32_t* order,
                int32_t* table, uint32_t seed) {
    using namespace weave::moe_experts;
    static std::string failure;
    failure.clear();
    const RowsToSort asked{experts, num_rows, num_experts, tile_rows, nullptr, order, table};
    try {
        switch (bins_of(num_experts)) {
            case 64:
                run<64>(asked, seed);
                break;
            case 128:
                run<128>(asked, seed);
                break;
            case 256:
                run<256>(asked, seed);
                break;
            default:
                run<kMostExperts>(asked, seed);
        }
    } catch (const std::exception& error) {
        failure = error.what();
    }
    return failure.c_str();
}
}
