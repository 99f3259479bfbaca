// The Python face of all_gather_gemm on CPU ranks.
#include "base/bindings.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>

#include "all_gather_gemm/shm.h"

namespace py = pybind11;

namespace weave {

void bind_all_gather_gemm(py::module_& m);

namespace {

struct AllGatherGemmHandle {
    std::shared_ptr<GroupHandle> owner;
    int64_t partial_bytes;
    AllGatherGemm op;

    AllGatherGemmHandle(std::shared_ptr<GroupHandle> group, const fabric::shm::RowsSite& site, int32_t max_threads)
        : owner(std::move(group)),
          partial_bytes(site.partial_bytes),
          op(owner->group, site, static_cast<int64_t>(owner->segments.at(0)->data_bytes()), max_threads) {}

    int run(int64_t tokens, int64_t outer, int64_t block_bytes, uintptr_t shard, uintptr_t whole, int32_t num_threads) {
        if (outer * block_bytes > partial_bytes) throw std::invalid_argument("the shard is larger than its buffer");
        py::gil_scoped_release release;
        return static_cast<int>(op.run(tokens, {outer, block_bytes}, reinterpret_cast<const void*>(shard),
                                       reinterpret_cast<void*>(whole), num_threads)
                                    .code);
    }
};

}  // namespace

void bind_all_gather_gemm(py::module_& m) {
    py::class_<AllGatherGemmHandle>(m, "AllGatherGemm")
        .def(py::init<std::shared_ptr<GroupHandle>, const fabric::shm::RowsSite&, int32_t>(), py::arg("group"),
             py::arg("site"), py::arg("max_threads"))
        .def_property_readonly("status", [](const AllGatherGemmHandle& handle) { return handle.owner->group.status(); })
        .def("run", &AllGatherGemmHandle::run);
}

}  // namespace weave
