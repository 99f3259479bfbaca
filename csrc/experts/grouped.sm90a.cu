#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "experts/both.cuh"
#include "experts/gather_rows.h"
#include "experts/grouped.cuh"
#include "experts/grouped.h"
#include "experts/wide.cuh"
#include "gemm/gemm.h"
#include "gemm/tensor_map.h"

namespace weave::moe_experts {
namespace {

constexpr int64_t kMostNumbers = int64_t{1} << 31;

// Rows of the weight are contiguous, with one depth after the other.
bool is_transposed(const Weight& weight) {
    return weight.depth_stride != 1;
}

Work work_of(const Weight& weight, const Routing& routing, int64_t depth, int64_t width, bool gated, void* out) {
    Work work{};
    work.table = routing.table;
    work.order = routing.order;
    work.bias = weight.bias;
    work.bias_stride = weight.rows;
    work.bias_step = 1;
    work.out = out;
    work.choices = 1;
    work.depth = static_cast<int32_t>(depth);
    work.blocks = gemm::ceiling(depth, kDepth);
    work.width = static_cast<int32_t>(width);
    work.columns = gemm::ceiling(width, tile_columns(gated));
    work.group = std::max(routing.group, 1);
    work.tile_rows = routing.tile_rows;
    return work;
}

// Rows `first`, `first + step`, ... of each of a range's experts, `count` of them; `step` is 1 where they are side by
// side.
int make_weight_map(CUtensorMap& map, const Weight& weight, const ExpertRange& range, DType dtype, int64_t depth,
                    int64_t first, int64_t step, int64_t count, int32_t box_rows = kBlockRows) {
    const char* data = static_cast<const char*>(range.data) + first * weight.row_stride * size_of(dtype);
    if (is_transposed(weight))
        return gemm::make_stack_map(map, data, dtype, range.experts, depth, count, weight.expert_stride,
                                    weight.depth_stride, kDepth);
    return gemm::make_stack_map(map, data, dtype, range.experts, count, depth, weight.expert_stride,
                                step * weight.row_stride, box_rows);
}

// CTAs of a persistent grid: one an SM, in whole clusters.
int32_t num_ctas() {
    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    return num_sms / gemm::kClusterCtas * gemm::kClusterCtas;
}

template <class W>
int launch(const W& work, Product product, const Weight& weight, bool wide, DType dtype, void* stream) {
    const bool transposed = is_transposed(weight);
    if (dtype == DType::kBFloat16)
        return wide ? launch_wide<__nv_bfloat16>(work, product, num_ctas(), stream)
                    : launch_product<__nv_bfloat16>(work, product, transposed, num_ctas(), stream);
    if (dtype == DType::kFloat16)
        return wide ? launch_wide<__half>(work, product, num_ctas(), stream)
                    : launch_product<__half>(work, product, transposed, num_ctas(), stream);
    return cudaErrorInvalidValue;
}

// `make_maps(maps, range)` makes the maps of a range's weight.
template <class MakeMaps>
int enqueue(Work& work, Product product, const Weight& weight, bool wide, DType dtype, const MakeMaps& make_maps,
            void* stream) {
    if (work.tile_rows < 1 || work.tile_rows > (wide ? kWideRows : kTileRows)) return cudaErrorInvalidValue;
    if (weight.num_ranges < 1 || weight.num_ranges > kMostRanges) return cudaErrorInvalidValue;
    if (weight.num_ranges == 1) {
        const int error = make_maps(work.weight, weight.ranges[0]);
        return error != cudaSuccess ? error : launch(work, product, weight, wide, dtype, stream);
    }
    RangedWork ranged{};
    static_cast<Work&>(ranged) = work;
    std::fill_n(ranged.first, kMostRanges, INT32_MAX);
    int64_t first = 0;
    for (int32_t i = 0; i < weight.num_ranges; ++i) {
        const int error = make_maps(ranged.ranges[i], weight.ranges[i]);
        if (error != cudaSuccess) return error;
        ranged.first[i] = static_cast<int32_t>(first);
        first += weight.ranges[i].experts;
    }
    return launch(ranged, product, weight, wide, dtype, stream);
}

Product first_product(const Weight& weight, const Gate& gate) {
    const bool pairs = is_transposed(weight) && gate.gated && gate.interleaved;
    return pairs ? Product::kPairs : gate.gated ? Product::kGated : Product::kPlain;
}

// Of a first GEMM that is not wide, all but the maps of its weight.
Work first_work(const void* x, int64_t x_stride, int64_t hidden, int32_t choices, const Weight& weight,
                const Routing& routing, const Gate& gate, void* inner) {
    const int64_t width = gate.gated ? weight.rows / 2 : weight.rows;
    Work work = work_of(weight, routing, hidden, width, gate.gated, inner);
    work.x = static_cast<const uint8_t*>(x);
    work.x_chunks = static_cast<int32_t>(x_stride / kChunkElements);
    work.choices = choices;
    work.activation = static_cast<Activation>(gate.activation);
    work.alpha = gate.alpha;
    work.limit = gate.limit;
    if (first_product(weight, gate) == Product::kGated) {
        work.bias_step = gate.interleaved ? 2 : 1;
        work.up_bias = gate.interleaved ? 1 : static_cast<int32_t>(width);
    }
    return work;
}

// Of gates and of ups where they are found apart, else one.
int make_first_maps(CUtensorMap (&maps)[2], const Work& work, const Weight& weight, const ExpertRange& range,
                    const Gate& gate, int64_t hidden, DType dtype) {
    if (first_product(weight, gate) != Product::kGated)
        return make_weight_map(maps[0], weight, range, dtype, hidden, 0, 1, weight.rows);
    int error = cudaSuccess;
    for (int32_t i = 0; i < 2 && error == cudaSuccess; ++i)
        error = make_weight_map(maps[i], weight, range, dtype, hidden, i * work.up_bias, work.bias_step, work.width);
    return error;
}

// The same for wide.cuh: one, of both together.
int make_wide_first_map(CUtensorMap& map, const Work& work, const Weight& weight, const ExpertRange& range,
                        const Gate& gate, int64_t hidden, DType dtype) {
    if (first_product(weight, gate) != Product::kGated)
        return make_weight_map(map, weight, range, dtype, hidden, 0, 1, weight.rows, kWideWeightRows);
    const int64_t stride = work.bias_step * weight.row_stride, between = work.up_bias * weight.row_stride;
    return gemm::make_gate_map(map,
                               {range.data, range.experts, work.width, hidden, weight.expert_stride, stride, between},
                               dtype, kWideWeightRows / (2 * kOctetRows));
}

bool is_too_large(const Routing& routing, int32_t choices, int64_t x_stride) {
    const int64_t tokens = routing.num_rows / choices;
    return routing.num_rows >= kMostNumbers || tokens * x_stride / kChunkElements >= kMostNumbers;
}

int run_second(Product product, const void* inner, int64_t inner_width, const Weight& weight, const Routing& routing,
               void* results, const ResultBuffers& buffers, DType dtype, bool wide, void* stream) {
    if (routing.num_rows == 0) return cudaSuccess;
    if (routing.num_rows >= kMostNumbers || (wide && !can_be_wide(weight))) return cudaErrorInvalidValue;
    Work work = work_of(weight, routing, inner_width, weight.rows, false, results);
    work.buffers = buffers;
    const int error = gemm::make_map(work.rows, inner, dtype, routing.num_rows, inner_width, inner_width,
                                     wide ? kWideBoxRows : kLoadRows);
    if (error != cudaSuccess) return error;
    const auto make_maps = [&](CUtensorMap(&maps)[2], const ExpertRange& range) {
        return make_weight_map(maps[0], weight, range, dtype, inner_width, 0, 1, weight.rows,
                               wide ? kWideWeightRows : kBlockRows);
    };
    return enqueue(work, product, weight, wide, dtype, make_maps, stream);
}

}  // namespace

const char* unsupported(DType dtype, int64_t hidden, int64_t inner, uint64_t addresses, int32_t device) {
    if (addresses % 16 != 0) return "tensors and their rows have to begin at multiples of 16 bytes";
    return gemm::unsupported(dtype, hidden, inner, device);
}

bool can_be_wide(const Weight& weight) {
    return !is_transposed(weight);
}

int run_gate_up(const void* x, int64_t x_stride, int64_t hidden, int32_t choices, const Weight& weight,
                const Routing& routing, const Gate& gate, void* inner, DType dtype, void* gathered, void* stream) {
    if (routing.num_rows == 0) return cudaSuccess;
    const bool wide = gathered != nullptr;
    if (is_too_large(routing, choices, x_stride) || (wide && !can_be_wide(weight))) return cudaErrorInvalidValue;
    const Product product = first_product(weight, gate);
    Work work = first_work(x, x_stride, hidden, choices, weight, routing, gate, inner);
    if (!wide) {
        const auto make_maps = [&](CUtensorMap(&maps)[2], const ExpertRange& range) {
            return make_first_maps(maps, work, weight, range, gate, hidden, dtype);
        };
        return enqueue(work, product, weight, false, dtype, make_maps, stream);
    }
    int error = gather_rows({work.x, work.x_chunks, static_cast<int32_t>(hidden / kChunkElements), choices, gathered},
                            routing, stream);
    if (error == cudaSuccess)
        error = gemm::make_map(work.rows, gathered, dtype, routing.num_rows, hidden, hidden, kWideBoxRows);
    if (error != cudaSuccess) return error;
    const auto make_maps = [&](CUtensorMap(&maps)[2], const ExpertRange& range) {
        return make_wide_first_map(maps[0], work, weight, range, gate, hidden, dtype);
    };
    return enqueue(work, product, weight, true, dtype, make_maps, stream);
}

int run_both(const void* x, int64_t x_stride, int64_t hidden, int32_t choices, const Weight& gate_up,
             const Weight& down, const Routing& routing, const Gate& gate, void* inner, void* results, DType dtype,
             int32_t lag, void* stream) {
    if (routing.num_rows == 0) return cudaSuccess;
    const bool transposed = is_transposed(gate_up);
    const bool tiles_fit = routing.tile_rows >= 1 && routing.tile_rows <= kTileRows;
    const bool one_range = gate_up.num_ranges == 1 && down.num_ranges == 1;
    if (is_too_large(routing, choices, x_stride) || transposed != is_transposed(down) || !tiles_fit || lag < 0 ||
        !one_range)
        return cudaErrorInvalidValue;
    BothWork work{};
    work.first = first_work(x, x_stride, hidden, choices, gate_up, routing, gate, inner);
    const int64_t width = work.first.width;
    work.second = work_of(down, routing, width, down.rows, false, results);
    work.table = routing.table;
    const int32_t ctas = num_ctas();
    work.lag = groups_of(lag * (ctas / gemm::kClusterCtas), work.first.group, work.first.columns);
    int error = make_first_maps(work.first.weight, work.first, gate_up, gate_up.ranges[0], gate, hidden, dtype);
    if (error == cudaSuccess)
        error = gemm::make_map(work.second.rows, inner, dtype, routing.num_rows, width, width, kLoadRows);
    if (error == cudaSuccess)
        error = make_weight_map(work.second.weight[0], down, down.ranges[0], dtype, width, 0, 1, down.rows);
    if (error != cudaSuccess) return error;
    const Product first = first_product(gate_up, gate);
    if (dtype == DType::kBFloat16) return launch_both<__nv_bfloat16>(work, first, transposed, ctas, stream);
    if (dtype == DType::kFloat16) return launch_both<__half>(work, first, transposed, ctas, stream);
    return cudaErrorInvalidValue;
}

int run_down(const void* inner, int64_t inner_width, const Weight& weight, const Routing& routing, void* results,
             DType dtype, bool wide, void* stream) {
    return run_second(Product::kDown, inner, inner_width, weight, routing, results, {}, dtype, wide, stream);
}

int run_down_to_ranks(const void* inner, int64_t inner_width, const Weight& weight, const Routing& routing,
                      const ResultBuffers& buffers, DType dtype, void* stream) {
    if (buffers.rows < 1 || buffers.rows > int64_t{1} << kBufferShift ||
        routing.num_rows > kMostResultBuffers * buffers.rows)
        return cudaErrorInvalidValue;
    return run_second(Product::kToRanks, inner, inner_width, weight, routing, nullptr, buffers, dtype, false, stream);
}

}  // namespace weave::moe_experts
