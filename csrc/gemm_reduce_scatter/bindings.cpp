// The Python face of gemm_reduce_scatter on CPU ranks.
#include "base/bindings.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>

#include "gemm_reduce_scatter/shm.h"

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
        : owner(std::move(group)),
          partial_bytes(site.partial_bytes),
          dtype(type),
          op(owner->group, site, static_cast<int64_t>(owner->segments.at(0)->data_bytes()), type, max_threads) {}

    int run(int64_t tokens, int64_t outer, int64_t inner, int64_t row, float scale, uintptr_t out,
            int32_t num_threads) {
        if (owner->group.world() * outer * inner * row * size_of(dtype) > partial_bytes) {
            owner->group.leave();
            throw std::invalid_argument("the partial result is larger than its buffer");
        }
        py::gil_scoped_release release;
        return static_cast<int>(
            op.run(tokens, {outer, inner, row}, scale, reinterpret_cast<void*>(out), num_threads).code);
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
        .def("enter",
             [](GemmReduceScatterHandle& handle, int64_t tokens) {
                 py::gil_scoped_release release;
                 return static_cast<int>(handle.op.call().enter(tokens).code);
             })
        .def("leave", [](GemmReduceScatterHandle& handle) { handle.owner->group.leave(); })
        .def("run", &GemmReduceScatterHandle::run);
}

}  // namespace weave
