// The Python face of mixtures whose tokens are sharded, on CPU ranks.
#include "base/bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "moe_sharded/shm.h"

namespace py = pybind11;

namespace weave {

void bind_moe_sharded(py::module_& m);

namespace {

struct ShardedMixtureHandle {
    std::shared_ptr<GroupHandle> owner;
    moe::ShardedMixture op;

    ShardedMixtureHandle(std::shared_ptr<GroupHandle> group, const moe::Site& site, const std::string& isa)
        : owner(std::move(group)),
          op(owner->group, site, static_cast<int64_t>(owner->segments.at(0)->data_bytes()), rows(isa)) {}

    static const RowFunctions& rows(const std::string& isa) {
        if (isa.empty()) return choose_rows();
        for (const RowFunctions* functions : usable_rows()) {
            if (isa == functions->isa) return *functions;
        }
        throw std::invalid_argument("this processor does not run " + isa);
    }
};

}  // namespace

void bind_moe_sharded(py::module_& m) {
    using moe::Site;
    py::class_<Site>(m, "ShardedMixtureSite")
        .def(py::init<>())
        .def_readwrite("tag", &Site::tag)
        .def_readwrite("dispatch_offset", &Site::dispatch_offset)
        .def_readwrite("combine_offset", &Site::combine_offset)
        .def_readwrite("max_tokens", &Site::max_tokens)
        .def_readwrite("choices", &Site::choices)
        .def_readwrite("num_experts", &Site::num_experts)
        .def_readwrite("hidden", &Site::hidden)
        .def_readwrite("dtype", &Site::dtype)
        .def_readwrite("timeout_s", &Site::timeout_s);
    m.def(
        "sharded_mixture_needs",
        [](int32_t world, int64_t max_tokens, int64_t choices, int64_t row_bytes) {
            return moe::Layout(world, max_tokens, choices, row_bytes).needs();
        },
        py::arg("world"), py::arg("max_tokens"), py::arg("choices"), py::arg("row_bytes"),
        "What a call needs in every rank's arena: what others push here, and what comes home.");
    using Handle = ShardedMixtureHandle;
    py::class_<Handle>(m, "ShardedMixture")
        .def(py::init<std::shared_ptr<GroupHandle>, const Site&, const std::string&>(), py::arg("group"),
             py::arg("site"), py::arg("isa") = "")
        .def_property_readonly("status", [](const Handle& handle) { return handle.owner->group.status(); })
        .def_property_readonly("rows_dispatched", [](const Handle& handle) { return handle.op.traffic().dispatched; })
        .def_property_readonly("rows_returned", [](const Handle& handle) { return handle.op.traffic().returned; })
        .def("enter", [](Handle& handle) { return static_cast<int>(handle.op.enter().code); })
        .def(
            "dispatch",
            [](Handle& handle, uintptr_t x, uintptr_t experts, int64_t tokens, int32_t num_threads) {
                py::gil_scoped_release release;
                handle.op.dispatch(reinterpret_cast<const void*>(x), reinterpret_cast<const int64_t*>(experts), tokens,
                                   num_threads);
            },
            py::arg("x"), py::arg("experts"), py::arg("tokens"), py::arg("num_threads"))
        .def(
            "collect",
            [](Handle& handle, int32_t first, int32_t last) {
                py::gil_scoped_release release;
                int64_t num_routes = 0;
                const Status status = handle.op.collect(first, last, num_routes);
                return std::make_pair(static_cast<int>(status.code), num_routes);
            },
            py::arg("first"), py::arg("last"),
            "A code, and how many routes there are; -1 where a rank has more tokens than were planned for.")
        .def(
            "gather",
            [](const Handle& handle, uintptr_t rows, uintptr_t experts, int32_t num_threads) {
                py::gil_scoped_release release;
                handle.op.gather(reinterpret_cast<void*>(rows), reinterpret_cast<int64_t*>(experts), num_threads);
            },
            py::arg("rows"), py::arg("experts"), py::arg("num_threads"))
        .def(
            "send_home",
            [](Handle& handle, uintptr_t results, int32_t num_threads) {
                py::gil_scoped_release release;
                handle.op.send_home(reinterpret_cast<const void*>(results), num_threads);
            },
            py::arg("results"), py::arg("num_threads"))
        .def(
            "finish",
            [](Handle& handle, uintptr_t weights, uintptr_t out, int32_t num_threads) {
                py::gil_scoped_release release;
                return static_cast<int>(
                    handle.op.finish(reinterpret_cast<const float*>(weights), reinterpret_cast<void*>(out), num_threads)
                        .code);
            },
            py::arg("weights"), py::arg("out"), py::arg("num_threads"))
        .def("abandon",
             [](Handle& handle) {
                 py::gil_scoped_release release;
                 return static_cast<int>(handle.op.abandon().code);
             })
        .def("fail", [](Handle& handle) { handle.op.fail(); })
        .def("leave", [](Handle& handle) { handle.op.group().leave(); });
}

}  // namespace weave
