#include <cuda_runtime.h>

#include <algorithm>

#include "gemm/gemm.h"
#include "gemm/tensor_map.h"
#include "moe_experts/few_rows.cuh"
#include "moe_experts/grouped.cuh"
#include "moe_experts/grouped.h"

namespace weave::moe_experts {
namespace {

constexpr int64_t kMostNumbers = int64_t{1} << 31;

bool is_split(int32_t splits) {
    return splits == 0 || splits == 1 || splits == 2 || splits == 4 || splits == kMostSplits;
}

// What both kernels take. `splits` as in grouped.h.
Work work_of(const Weight& weight, const Routing& routing, int64_t depth, int64_t width, bool gated, int32_t splits,
             void* out) {
    const int32_t many = gated ? kBoxRows : kWeightRows;
    Work work{};
    work.table = routing.table;
    work.order = routing.order;
    work.bias = weight.bias;
    work.bias_stride = weight.rows;
    work.bias_step = 1;
    work.out = out;
    work.choices = 1;
    work.depth = static_cast<int32_t>(depth);
    work.blocks = gemm::ceiling(depth, splits == 0 ? kDepth : kFewDepth);
    work.width = static_cast<int32_t>(width);
    work.columns = gemm::ceiling(width, splits == 0 ? many : few_tile_columns(gated));
    work.group = std::max(routing.group, 1);
    return work;
}

// Rows `first`, `first + step`, ... of each expert's weight, `count` of them.
int make_weight_map(CUtensorMap& map, const Weight& weight, DType dtype, int64_t depth, int64_t first, int64_t step,
                    int64_t count, int32_t splits) {
    const char* data = static_cast<const char*>(weight.data) + first * weight.row_stride * size_of(dtype);
    return gemm::make_stack_map(map, data, dtype, weight.experts, count, depth, weight.expert_stride,
                                step * weight.row_stride, splits == 0 ? kBoxRows : kFewBoxRows);
}

int enqueue(const Work& work, Product product, int32_t splits, DType dtype, void* stream) {
    if (splits != 0 && dtype == DType::kBFloat16) return enqueue_few_bf16(work, product, splits, stream);
    if (splits != 0 && dtype == DType::kFloat16) return enqueue_few_fp16(work, product, splits, stream);
    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    const int32_t num_ctas = num_sms / gemm::kClusterCtas * gemm::kClusterCtas;
    if (dtype == DType::kBFloat16) return enqueue_bf16(work, product, num_ctas, stream);
    if (dtype == DType::kFloat16) return enqueue_fp16(work, product, num_ctas, stream);
    return cudaErrorInvalidValue;
}

}  // namespace

const char* unsupported(DType dtype, int64_t hidden, int64_t inner, uint64_t addresses, int32_t device) {
    if (addresses % 16 != 0) return "tensors and their rows have to begin at multiples of 16 bytes";
    return gemm::unsupported(dtype, hidden, inner, device);
}

int run_gate_up(const void* x, int64_t x_stride, int64_t hidden, int32_t choices, const Weight& weight,
                const Routing& routing, const Gate& gate, int32_t splits, void* inner, DType dtype, void* stream) {
    if (routing.num_rows == 0) return cudaSuccess;
    const int64_t width = gate.gated ? weight.rows / 2 : weight.rows;
    const int64_t tokens = routing.num_rows / choices;
    if (routing.num_rows >= kMostNumbers || tokens * x_stride / kChunkElements >= kMostNumbers || !is_split(splits))
        return cudaErrorInvalidValue;
    Work work = work_of(weight, routing, hidden, width, gate.gated, splits, inner);
    work.x = static_cast<const uint8_t*>(x);
    work.x_chunks = static_cast<int32_t>(x_stride / kChunkElements);
    work.choices = choices;
    work.activation = static_cast<Activation>(gate.activation);
    work.alpha = gate.alpha;
    work.limit = gate.limit;
    if (gate.gated) {
        work.bias_step = gate.interleaved ? 2 : 1;
        work.up_bias = gate.interleaved ? 1 : static_cast<int32_t>(width);
    }
    int error = cudaSuccess;
    for (int32_t box = 0; box < kBoxes && error == cudaSuccess; ++box)
        error = make_weight_map(work.weight[box], weight, dtype, hidden, gate.gated ? box * work.up_bias : 0,
                                work.bias_step, width, splits);
    if (error != cudaSuccess) return error;
    return enqueue(work, gate.gated ? Product::kGated : Product::kPlain, splits, dtype, stream);
}

int run_down(const void* inner, int64_t inner_width, const Weight& weight, const Routing& routing, int32_t splits,
             void* results, DType dtype, void* stream) {
    if (routing.num_rows == 0) return cudaSuccess;
    const int64_t chunks = inner_width / kChunkElements;
    if (routing.num_rows >= kMostNumbers || !is_split(splits)) return cudaErrorInvalidValue;
    Work work = work_of(weight, routing, inner_width, weight.rows, false, splits, results);
    int error = cudaSuccess;
    if (splits == 0) {
        error = gemm::make_map(work.rows, inner, dtype, routing.num_rows, inner_width, inner_width, kPanelRows);
    } else {
        if (routing.num_rows * chunks >= kMostNumbers) return cudaErrorInvalidValue;
        work.x = static_cast<const uint8_t*>(inner);
        work.x_chunks = static_cast<int32_t>(chunks);
    }
    for (int32_t box = 0; box < kBoxes && error == cudaSuccess; ++box)
        error = make_weight_map(work.weight[box], weight, dtype, inner_width, 0, 1, weight.rows, splits);
    if (error != cudaSuccess) return error;
    return enqueue(work, Product::kDown, splits, dtype, stream);
}

}  // namespace weave::moe_experts
