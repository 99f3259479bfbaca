// The Python face of gemm_reduce_scatter on GPUs. Plain C++: everything that needs CUDA's headers is declared in gpu.h
// and pushed_tiles.h.
#ifdef WEAVE_WITH_CUDA
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "base/bindings.h"
#include "base/timeout.h"
#include "fabric/peer.h"
#include "gemm_comm/pushed_tiles.h"
#include "gemm_comm/reduce_scatter/gpu.h"
#include "reduction/layout.h"
#include "reduction/parameters.h"

namespace py = pybind11;

namespace weave {

void bind_gemm_reduce_scatter_cuda(py::module_& m);

namespace {

using fabric::PeerGroup;

// A site bound to the arenas of its group. Partial rows of all its calls go into one buffer, "staging".
class GpuGemmReduceScatter {
  public:
    GpuGemmReduceScatter(std::shared_ptr<PeerGroup> group, uint32_t tag, DType dtype, int64_t hidden, float scale,
                         int32_t channel, double timeout_s, int64_t staging_offset, int64_t staging_bytes)
        : group_(given("group", group)), dtype_(known("dtype", dtype, DType::kFloat16)), staging_bytes_(staging_bytes) {
        within("hidden", hidden, 1, kMostRow);
        expect_inside("staging", staging_offset, staging_bytes, group_->num_bytes());
        if (staging_offset < static_cast<int64_t>(fabric::kHeaderBytes) || staging_offset % gpu::kBufferAlignment != 0)
            throw std::invalid_argument("staging at " + std::to_string(staging_offset) + ": expected a multiple of " +
                                        std::to_string(gpu::kBufferAlignment) + " after the header");
        call_.group = group_->view(channel, nanoseconds_of(timeout_s));
        call_.hidden = static_cast<int32_t>(hidden);
        call_.site = tag;
        call_.scale = scale;
        call_.buffers.staging_offset = staging_offset;
        call_.buffers.staging_bytes = staging_bytes;
    }

    // The sum of this rank's part [outer, block] of what all ranks' GEMMs wrote to the beginning of "staging". A CUDA
    // error code.
    int sum_parts(int64_t tokens, int64_t outer, int64_t block, uintptr_t out, uintptr_t stream) const {
        within("tokens", tokens, 0, kMostCount);
        const int64_t bytes =
            weave::product_of("the partial result", {outer, block, call_.group.world, size_of(dtype_)});
        expect_address("out", out, bytes > 0);
        if (bytes > staging_bytes_) throw std::invalid_argument("the partial result is larger than its buffer");
        const gpu::PartSum given{call_.group,
                                 call_.buffers.staging_offset,
                                 outer,
                                 block,
                                 reinterpret_cast<void*>(out),
                                 static_cast<int32_t>(tokens),
                                 call_.site,
                                 call_.scale};
        // A launch blocks where the queue is full, which may be because a kernel waits for a peer: the watchdog,
        // another thread of this interpreter, must get to run then.
        py::gil_scoped_release release;
        return gpu::run_part_sum(given, dtype_, reinterpret_cast<void*>(stream));
    }

    // The sum of this rank's rows of the product `a` [tokens, k] times `matrix` [hidden, k]^T, in one kernel that sends
    // tiles to the owners of their rows. `tokens` divide by the ranks. A CUDA error code.
    int run_tiles(int64_t tokens, const gpu::TileConfig& tiles, uintptr_t a, int64_t a_stride,
                  const gpu::Matrix& matrix, uintptr_t out, uintptr_t stream) const {
        gpu::Call call = tiles_call(tokens);
        call.sum = reinterpret_cast<void*>(out - before_own_rows(call));
        return launched(call, tiles, {reinterpret_cast<const void*>(a), a_stride, matrix}, stream);
    }

    // The same of the sum and `residual`, and the norm of that: all of them this rank's rows [own rows, hidden]. Of
    // `parameters` the norm's weight. A CUDA error code.
    int run_tiles_norm(int64_t tokens, const gpu::TileConfig& tiles, uintptr_t a, int64_t a_stride,
                       const gpu::Matrix& matrix, uintptr_t residual, const NormSpec& norm,
                       const ReductionParameters& parameters, uintptr_t normalized, uintptr_t sum,
                       uintptr_t stream) const {
        gpu::Call call = tiles_call(tokens);
        call.residual = reinterpret_cast<const void*>(residual - before_own_rows(call));
        call.sum = reinterpret_cast<void*>(sum - before_own_rows(call));
        call.normalized = reinterpret_cast<void*>(normalized);
        call.norm.spec = norm;
        known("the norm", norm.kind, NormKind::kLayer);
        gpu::set_parameters(call, parameters);
        return launched(call, tiles, {reinterpret_cast<const void*>(a), a_stride, matrix}, stream);
    }

  private:
    gpu::Call tiles_call(int64_t tokens) const {
        within("tokens", tokens, 0, kMostCount);
        if (tokens % call_.group.world != 0)
            throw std::invalid_argument(std::to_string(tokens) + " rows do not divide by the ranks");
        gpu::Call call = call_;
        call.tokens = static_cast<int32_t>(tokens);
        return call;
    }

    // Bytes of the rows of the ranks before this one: kernels count rows of sum and residual from the group's first.
    uintptr_t before_own_rows(const gpu::Call& call) const {
        const int64_t own_rows = call.tokens / call.group.world;
        return static_cast<uintptr_t>(call.group.rank * own_rows * call.hidden * size_of(dtype_));
    }

    int launched(const gpu::Call& call, const gpu::TileConfig& tiles, const gpu::Product& product,
                 uintptr_t stream) const {
        py::gil_scoped_release release;
        return gpu::run_pushed_tiles(call, product, tiles, gpu::NormalizedRows::kSharded, dtype_,
                                     reinterpret_cast<void*>(stream));
    }

    std::shared_ptr<PeerGroup> group_;
    DType dtype_;
    int64_t staging_bytes_;
    gpu::Call call_{};
};

}  // namespace

void bind_gemm_reduce_scatter_cuda(py::module_& m) {
    py::class_<GpuGemmReduceScatter>(m, "GpuGemmReduceScatter")
        .def(py::init<std::shared_ptr<PeerGroup>, uint32_t, DType, int64_t, float, int32_t, double, int64_t, int64_t>(),
             py::arg("group"), py::arg("tag"), py::arg("dtype"), py::arg("hidden"), py::arg("scale"),
             py::arg("channel"), py::arg("timeout_s"), py::arg("staging_offset"), py::arg("staging_bytes"))
        .def("sum_parts", &GpuGemmReduceScatter::sum_parts)
        .def("run_tiles", &GpuGemmReduceScatter::run_tiles)
        .def("run_tiles_norm", &GpuGemmReduceScatter::run_tiles_norm);
}

}  // namespace weave
#endif
