// The GEMMs of a mixture's experts, from csrc/experts, as functions of a library for tests: on the CPU, in bf16.
#include <string>
#include <type_traits>

#include "experts/gather_rows.cuh"
#include "experts/grouped.sm90a.cu"

namespace {

int num_sms = 0;
uint32_t seed = 0, resident = 0;
std::string failure;

}  // namespace

int cudaGetDevice(int* device) {
    return *device = 0;
}

int cudaDeviceGetAttribute(int* value, int, int) {
    *value = num_sms;
    return 0;
}

namespace weave::gemm {

const char* unsupported(DType, int64_t, int64_t, int32_t) {
    return "";
}

}  // namespace weave::gemm

namespace weave::moe_experts {

template <class Kernel>
int run_clusters(emulated::Size size, const Kernel& kernel) {
    const uint32_t num_clusters = num_sms / size.ctas;
    if (num_clusters == 0) return cudaErrorInvalidValue;
    try {
        for (uint32_t index = 0; index < num_clusters; ++index)
            emulated::run_cluster(size, index, num_clusters, seed + index, kernel);
    } catch (const std::exception& error) {
        failure = error.what();
        return -1;
    }
    return cudaSuccess;
}

template <Product kProduct, bool kTransposed>
void run_product(const Work& work) {
    grouped_gemm<__nv_bfloat16, kProduct, kTransposed>(work);
}

template <Product kProduct, bool kTransposed>
void run_product(const RangedWork& work) {
    ranged_grouped_gemm<__nv_bfloat16, kProduct, kTransposed>(work);
}

template <bool kTransposed, class W>
int enqueue_as(const W& work, Product product) {
    return run_clusters({gemm::kClusterCtas, gemm::kThreads}, [&] {
        if (product == Product::kGated) return run_product<Product::kGated, kTransposed>(work);
        if (product == Product::kPlain) return run_product<Product::kPlain, kTransposed>(work);
        if (product == Product::kPairs) return run_product<Product::kPairs, kTransposed>(work);
        if constexpr (std::is_same_v<W, Work>) {
            if (product == Product::kToRanks) return run_product<Product::kToRanks, kTransposed>(work);
        }
        if (product != Product::kDown) throw std::runtime_error("not of that kernel");
        run_product<Product::kDown, kTransposed>(work);
    });
}

// The tests' calls are of bf16.
template <typename T>
constexpr bool is_tested = std::is_same_v<T, __nv_bfloat16>;

template <typename T, class W>
int launch_product(const W& work, Product product, bool transposed, int32_t, void*) {
    if (!is_tested<T>) return cudaErrorInvalidValue;
    return transposed ? enqueue_as<true>(work, product) : enqueue_as<false>(work, product);
}

template <Product kProduct>
void run_wide_product(const Work& work) {
    wide_grouped_gemm<__nv_bfloat16, kProduct>(work);
}

template <Product kProduct>
void run_wide_product(const RangedWork& work) {
    ranged_wide_grouped_gemm<__nv_bfloat16, kProduct>(work);
}

template <typename T, class W>
int launch_wide(const W& work, Product product, int32_t, void*) {
    if (!is_tested<T>) return cudaErrorInvalidValue;
    return run_clusters({gemm::kClusterCtas, gemm::kThreads}, [&] {
        if (product == Product::kGated) return run_wide_product<Product::kGated>(work);
        if (product == Product::kPlain) return run_wide_product<Product::kPlain>(work);
        if (product != Product::kDown) throw std::runtime_error("not of that kernel");
        run_wide_product<Product::kDown>(work);
    });
}

template <bool kTransposed>
void run_both_as(const BothWork& work, Product first) {
    if (first == Product::kGated) return both_gemms<__nv_bfloat16, Product::kGated, kTransposed>(work);
    if (first == Product::kPlain) return both_gemms<__nv_bfloat16, Product::kPlain, kTransposed>(work);
    if (first != Product::kPairs || !kTransposed) throw std::runtime_error("not of that kernel");
    both_gemms<__nv_bfloat16, Product::kPairs, kTransposed>(work);
}

template <typename T>
int launch_both(const BothWork& work, Product first, bool transposed, int32_t num_ctas, void*) {
    if (!is_tested<T>) return cudaErrorInvalidValue;
    try {
        emulated::run_grid({gemm::kClusterCtas, gemm::kThreads}, num_ctas / gemm::kClusterCtas, resident, seed,
                           [&] { transposed ? run_both_as<true>(work, first) : run_both_as<false>(work, first); });
    } catch (const std::exception& error) {
        failure = error.what();
        return -1;
    }
    return cudaSuccess;
}

int gather_rows(const RowsToGather& rows, const Routing& routing, void*) {
    return run_clusters({1, kGatherCtaThreads}, [&] { gather({rows, routing.order, routing.table}); });
}

}  // namespace weave::moe_experts

namespace {

// What a kernel of both GEMMs leaves in the table: every cluster has found that no item is left, and every tile is done.
const char* what_is_wrong_with(const int32_t* table, int64_t hidden, int64_t width, bool gated, int32_t num_clusters) {
    using namespace weave::moe_experts;
    const int32_t tiles = table[0], first = weave::gemm::ceiling(width, tile_columns(gated));
    const int32_t items = tiles * (first + weave::gemm::ceiling(hidden, tile_columns(false)));
    if (table[kTakenAt] != items + num_clusters) return "not each item was taken once";
    for (int32_t tile = 0; tile < tiles; ++tile)
        if (table[stored_at(tiles, tile)] != first * kStoresOfColumn) return "not each result was counted";
    return "";
}

}  // namespace

extern "C" {

using weave::moe_experts::kMostRanges;

struct Call {
    const void *x, *gate_up[kMostRanges], *gate_up_bias, *down[kMostRanges], *down_bias;
    const int32_t* order;
    int32_t* table;
    void *inner, *results, *gathered;
    int64_t rows, gate_up_experts[kMostRanges], down_experts[kMostRanges];  // experts of 0: no such range
    int64_t hidden, inner_width, x_stride;
    int32_t choices, group, gated, interleaved, activation;
    float alpha, limit;
    int32_t transposed;
    int32_t num_sms;
    uint32_t seed;
    int32_t tile_rows, second_wide;
    int64_t rows_per_buffer;  // 0: `results` is one tensor, else buffers lie in it one behind the other, the last one first
    int32_t lag;       // of both GEMMs in one kernel; below 0: in two
    int32_t resident;  // clusters of that kernel, at a time
    int32_t counts_are_ignored;
};

// What failed; empty if nothing did.
const char* run(const Call* call) {
    using namespace weave;
    using namespace weave::moe_experts;
    num_sms = call->num_sms;
    seed = call->seed;
    failure.clear();
    const int64_t hidden = call->hidden, width = call->inner_width, rows = call->gated ? 2 * width : width;
    const auto weight = [call](const void* const (&data)[kMostRanges], const int64_t (&experts)[kMostRanges],
                               int64_t rows, int64_t depth, const void* bias) {
        const bool transposed = call->transposed != 0;
        Weight made{{}, 0, rows, rows * depth, transposed ? 1 : depth, transposed ? rows : 1, bias};
        for (; made.num_ranges < kMostRanges && experts[made.num_ranges] != 0; ++made.num_ranges)
            made.ranges[made.num_ranges] = {data[made.num_ranges], experts[made.num_ranges]};
        return made;
    };
    const Weight gate_up = weight(call->gate_up, call->gate_up_experts, rows, hidden, call->gate_up_bias);
    const Weight down = weight(call->down, call->down_experts, hidden, width, call->down_bias);
    const Routing routing{call->order, call->table, call->rows, call->group, call->tile_rows};
    const Gate gate{call->gated != 0, call->interleaved != 0, call->activation, call->alpha, call->limit};
    resident = call->resident;
    counts_are_ignored = call->counts_are_ignored != 0;
    if (call->lag >= 0) {
        const int both = run_both(call->x, call->x_stride, hidden, call->choices, gate_up, down, routing, gate,
                                  call->inner, call->results, DType::kBFloat16, call->lag, nullptr);
        if (both != 0 && failure.empty()) failure = "code " + std::to_string(both);
        if (both == 0) failure = what_is_wrong_with(call->table, hidden, width, call->gated != 0, num_sms / 2);
        return failure.c_str();
    }
    int code = run_gate_up(call->x, call->x_stride, hidden, call->choices, gate_up, routing, gate, call->inner,
                           DType::kBFloat16, call->gathered, nullptr);
    if (code == 0 && call->rows_per_buffer == 0)
        code = run_down(call->inner, width, down, routing, call->results, DType::kBFloat16, call->second_wide != 0,
                        nullptr);
    if (code == 0 && call->rows_per_buffer != 0) {
        ResultBuffers buffers{};
        buffers.rows = call->rows_per_buffer;
        // In the other order, so that none lies where the buffer before ends.
        const int64_t count = (call->rows + buffers.rows - 1) / buffers.rows;
        for (int64_t buffer = 0; buffer < count; ++buffer)
            buffers.base[buffer] = static_cast<char*>(call->results) + (count - 1 - buffer) * buffers.rows * hidden * 2;
        code = run_down_to_ranks(call->inner, width, down, routing, buffers, DType::kBFloat16, nullptr);
    }
    if (code != 0 && failure.empty()) failure = "code " + std::to_string(code);
    return failure.c_str();
}

// Of all items of both GEMMs `out` gets, in their order, which GEMM's, the tile and the column.
void lagged_items(int32_t tiles, int32_t group, int32_t first_columns, int32_t second_columns, int32_t lag,
                  int32_t* out) {
    using namespace weave::moe_experts;
    const LaggedOrder order{{tiles, first_columns, group}, {tiles, second_columns, group}, lag};
    for (int32_t index = 0; index < order.num_items(); ++index) {
        const EitherItem found = order.item(index);
        out[3 * index] = found.second;
        out[3 * index + 1] = found.item.tile;
        out[3 * index + 2] = found.item.column;
    }
}

// Of an expert's rows, `out` gets the first position and the count of each CTA of the tile that begins at `first`.
void cut_tile(int32_t begin, int32_t first, int32_t end, int32_t* out) {
    using namespace weave::moe_experts;
    for (int32_t rank = 0; rank < 2; ++rank) {
        const Rows own = own_rows(even_rows(begin, first, end, kTileRows), rank);
        out[2 * rank] = own.first;
        out[2 * rank + 1] = own.count;
    }
}
}
