// The Python face of all_gather_gemm on CPU ranks.
#include "base/bindings.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>

#include "gemm_comm/all_gather/multiply.h"
#include "gemm_comm/all_gather/shm.h"

namespace py = pybind11;

namespace weave {

void bind_all_gather_gemm(py::module_& m);

namespace {

struct AllGatherGemmHandle {
    std::shared_ptr<GroupHandle> owner;
    int64_t partial_bytes;
    AllGatherGemm op;

    AllGatherGemmHandle(std::shared_ptr<GroupHandle> group, const fabric::shm::RowsSite& site, int32_t max_threads)
        : owner(given("group", group)),
          partial_bytes(site.partial_bytes),
          op(owner->group, site, owner->data_bytes(),
             static_cast<int32_t>(within("max_threads", max_threads, 1, kMostThreads))) {}

    int run(int64_t tokens, int64_t outer, int64_t block_bytes, uintptr_t shard, uintptr_t whole, int32_t num_threads) {
        const int64_t bytes = product_of("the shard", {outer, block_bytes});
        if (bytes > partial_bytes) throw std::invalid_argument("the shard is larger than its buffer");
        expect_address("shard", shard, bytes > 0);
        expect_address("whole", whole, bytes > 0);
        Status status;
        {
            py::gil_scoped_release release;
            status = op.run(tokens, {outer, block_bytes}, reinterpret_cast<const void*>(shard),
                            reinterpret_cast<void*>(whole), num_threads);
        }
        return code_of(status);
    }
};

}  // namespace

void bind_all_gather_gemm(py::module_& m) {
    py::class_<AllGatherGemmHandle>(m, "AllGatherGemm")
        .def(py::init<std::shared_ptr<GroupHandle>, const fabric::shm::RowsSite&, int32_t>(), py::arg("group"),
             py::arg("site"), py::arg("max_threads"))
        .def_property_readonly("status", [](const AllGatherGemmHandle& handle) { return handle.owner->group.status(); })
        .def("run", &AllGatherGemmHandle::run);
    m.attr("GATHER_SPARE_CTAS") = gpu::kGatherSpareCtas;
}

}  // namespace weave
