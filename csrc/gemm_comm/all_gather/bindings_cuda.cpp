// The Python face of all_gather_gemm on GPUs. Plain C++: everything that needs CUDA's headers is declared in gpu.h.
#ifdef WEAVE_WITH_CUDA
#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "base/bindings.h"
#include "base/timeout.h"
#include "fabric/peer.h"
#include "gemm_comm/all_gather/gpu.h"
#include "gemm_comm/all_gather/multiply.h"

namespace py = pybind11;

namespace weave {

void bind_all_gather_gemm_cuda(py::module_& m);

namespace {

using fabric::PeerGroup;

// A site bound to the arenas of its group. `begin` opens a call, whose other steps speak of it until the next one.
class GpuAllGatherGemm {
  public:
    GpuAllGatherGemm(std::shared_ptr<PeerGroup> group, uint32_t tag, DType dtype, int64_t hidden, int32_t channel,
                     double timeout_s, int64_t rows_offset, int64_t rows_bytes)
        : group_(given("group", group)),
          dtype_(known("dtype", dtype, DType::kFloat16)),
          row_bytes_(within("hidden", hidden, 1, kMostRow) * size_of(dtype)),
          rows_bytes_(rows_bytes) {
        expect_inside("gathered rows", rows_offset, rows_bytes, group_->num_bytes());
        if (rows_offset < static_cast<int64_t>(fabric::kHeaderBytes) || rows_offset % 256 != 0)
            throw std::invalid_argument("gathered rows at " + std::to_string(rows_offset) +
                                        ": expected a multiple of 256 after the header");
        call_.group = group_->view(channel, nanoseconds_of(timeout_s));
        call_.rows_offset = rows_offset;
        call_.site = tag;
    }

    // Of `outer` blocks of `inner` rows a rank, at `shard`. `keeps_own`: copied to this rank's own gathered rows too.
    // CUDA error codes; the same of what follows.
    int begin(int64_t outer, int64_t inner, uintptr_t shard, bool keeps_own, uintptr_t main, uintptr_t side) {
        within("tokens", product_of("tokens", {outer, inner, call_.group.world}), 0, kMostCount);
        const int64_t bytes = product_of("the gathered rows", {outer, inner, row_bytes_, call_.group.world});
        if (bytes > rows_bytes_) throw std::invalid_argument("the gathered rows are larger than their buffer");
        expect_address("shard", shard, bytes > 0);
        call_.outer = outer;
        call_.block_bytes = inner * row_bytes_;
        call_.shard = reinterpret_cast<const void*>(shard);
        call_.tokens = static_cast<int32_t>(outer * inner * call_.group.world);
        // A launch blocks where the queue is full, which may be because a kernel waits for a peer: the watchdog,
        // another thread of this interpreter, must get to run then.
        py::gil_scoped_release release;
        int error = gpu::open_gather(call_, reinterpret_cast<void*>(main));
        if (error == 0) error = fork_.follow(reinterpret_cast<void*>(main), reinterpret_cast<void*>(side));
        if (error == 0) error = gpu::push_shard(call_, reinterpret_cast<void*>(side));
        if (error == 0 && keeps_own) error = gpu::keep_shard(call_, reinterpret_cast<void*>(main));
        return error;
    }
    int await_shards(uintptr_t main) const {
        py::gil_scoped_release release;
        return gpu::await_shards(call_, reinterpret_cast<void*>(main));
    }
    int multiply(int32_t tile_columns, int32_t group_pairs, uintptr_t weight, int64_t weight_stride, uintptr_t bias,
                 int64_t n, uintptr_t out, uintptr_t main) const {
        within("n", n, 0, kMostCount);
        within("tile_columns", tile_columns, 1, kMostCount);
        expect_address("weight", weight, n > 0);
        expect_address("out", out, n > 0);
        const gpu::GatheredProduct product{reinterpret_cast<const void*>(weight), reinterpret_cast<const void*>(bias),
                                           reinterpret_cast<void*>(out),          n,
                                           row_bytes_ / size_of(dtype_),          weight_stride};
        const gpu::GatherCut cut{tile_columns, group_pairs};
        py::gil_scoped_release release;
        return gpu::run_gathered_product(call_, product, cut, dtype_, reinterpret_cast<void*>(main));
    }
    int hand_out(uintptr_t rows, uintptr_t side) const {
        py::gil_scoped_release release;
        return gpu::hand_out(call_, reinterpret_cast<void*>(rows), reinterpret_cast<void*>(side));
    }
    // The last step of every call, also of one that failed.
    int end(uintptr_t main, uintptr_t side) {
        py::gil_scoped_release release;
        return join_.follow(reinterpret_cast<void*>(side), reinterpret_cast<void*>(main));
    }

  private:
    std::shared_ptr<PeerGroup> group_;
    DType dtype_;
    int64_t row_bytes_;
    int64_t rows_bytes_;
    gpu::Gather call_{};
    gpu::Follower fork_, join_;
};

}  // namespace

void bind_all_gather_gemm_cuda(py::module_& m) {
    py::class_<GpuAllGatherGemm>(m, "GpuAllGatherGemm")
        .def(py::init<std::shared_ptr<PeerGroup>, uint32_t, DType, int64_t, int32_t, double, int64_t, int64_t>(),
             py::arg("group"), py::arg("tag"), py::arg("dtype"), py::arg("hidden"), py::arg("channel"),
             py::arg("timeout_s"), py::arg("rows_offset"), py::arg("rows_bytes"))
        .def("begin", &GpuAllGatherGemm::begin)
        .def("await_shards", &GpuAllGatherGemm::await_shards)
        .def("multiply", &GpuAllGatherGemm::multiply)
        .def("hand_out", &GpuAllGatherGemm::hand_out)
        .def("end", &GpuAllGatherGemm::end);
}

}  // namespace weave
#endif
