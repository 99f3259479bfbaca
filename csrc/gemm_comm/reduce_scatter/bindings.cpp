// The Python face of gemm_reduce_scatter on CPU ranks.
#include "base/bindings.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>

#include "gemm_comm/reduce_scatter/shm.h"

namespace py = pybind11;

namespace weave {

void bind_gemm_reduce_scatter(py::module_& m);

namespace {

struct GemmReduceScatterHandle {
    std::shared_ptr<GroupHandle> owner;
    int64_t partial_bytes;
    DType dtype;
    GemmReduceScatter op;

    GemmReduceScatterHandle(std::shared_ptr<GroupHandle> group, const fabric::shm::RowsSite& site, DType type,
                            int32_t max_threads)
        : owner(given("group", group)),
          partial_bytes(site.partial_bytes),
          dtype(known("dtype", type, DType::kFloat16)),
          op(owner->group, site, owner->data_bytes(), type,
             static_cast<int32_t>(within("max_threads", max_threads, 1, kMostThreads))) {}

    int enter(int64_t tokens) {
        Status status;
        {
            py::gil_scoped_release release;
            status = op.call().enter(tokens);
        }
        return code_of(status);
    }

    int run(int64_t tokens, int64_t outer, int64_t inner, int64_t row, float scale, uintptr_t out,
            int32_t num_threads) {
        owner->expect_held();
        const fabric::shm::Held held(owner->group);
        const int64_t bytes = product_of("the partial result", {owner->world(), outer, inner, row, size_of(dtype)});
        if (bytes > partial_bytes) throw std::invalid_argument("the partial result is larger than its buffer");
        within("row", row, 0, kMostRow);
        expect_address("out", out, bytes > 0);
        Status status;
        {
            py::gil_scoped_release release;
            status = op.run(tokens, {outer, inner, row}, scale, reinterpret_cast<void*>(out), num_threads);
        }
        return code_of(status);
    }
};

}  // namespace

void bind_gemm_reduce_scatter(py::module_& m) {
    py::class_<GemmReduceScatterHandle>(m, "GemmReduceScatter")
        .def(py::init<std::shared_ptr<GroupHandle>, const fabric::shm::RowsSite&, DType, int32_t>(), py::arg("group"),
             py::arg("site"), py::arg("dtype"), py::arg("max_threads"))
        .def_property_readonly("status",
                               [](const GemmReduceScatterHandle& handle) { return handle.owner->group.status(); })
        .def_property_readonly("next_parity",
                               [](GemmReduceScatterHandle& handle) { return handle.op.call().next_parity(); })
        .def("enter", &GemmReduceScatterHandle::enter)
        .def("abandon", [](GemmReduceScatterHandle& handle) { handle.owner->group.abandon(); })
        .def("run", &GemmReduceScatterHandle::run);
}

}  // namespace weave
