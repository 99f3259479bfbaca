// The Python face of the experts of a mixture on GPUs. Plain C++: everything that needs CUDA's headers is declared in
// grouped.h, pulls.h and routing.h.
#include "base/bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <vector>

#include "experts/grouped.h"
#include "experts/pulls.h"
#include "experts/routing.h"
#include "experts/tiles.h"

namespace py = pybind11;

namespace weave {

constexpr int32_t kMaxLanes = 8;

void bind_moe_experts(py::module_& m) {
    m.attr("EXPERT_TILE_ROWS") = py::int_(moe_experts::kTileRows);
    m.attr("WIDE_EXPERT_TILE_ROWS") = py::int_(moe_experts::kWideRows);
    m.attr("MOST_EXPERT_RANGES") = py::int_(moe_experts::kMostRanges);
    m.def(
        "expert_row_counts",
        [](int64_t num_rows, int32_t num_experts) {
            within("num_experts", num_experts, 0, kMostCount);
            return moe_experts::num_counts(within("num_rows", num_rows, 0, kMostBytes), num_experts);
        },
        py::arg("num_rows"), py::arg("num_experts"), "How many int32 numbers sort_expert_rows takes as its workspace.");
}

#ifdef WEAVE_WITH_CUDA
namespace {

using moe_experts::PulledBytes;
using moe_experts::PullMark;
using moe_experts::PullMarks;
using moe_experts::PullStreams;

const PullMarks& all_given(const PullMarks& marks) {
    for (const auto& each : marks)
        given("a mark", each);
    return marks;
}

std::vector<PulledBytes> pulled_bytes(const std::vector<std::tuple<uintptr_t, uintptr_t, int64_t>>& copies) {
    std::vector<PulledBytes> found;
    for (const auto& [to, from, bytes] : copies) {
        within("bytes", bytes, 1, kMostBytes);
        expect_address("to", to, true);
        expect_address("from", from, true);
        found.push_back(
            {reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), static_cast<std::size_t>(bytes)});
    }
    return found;
}

void bind_pulls(py::module_& m) {
    py::class_<PullMark, std::shared_ptr<PullMark>>(m, "PullMark", "A point in the work of a GPU.")
        .def_property_readonly("capture", [](const PullMark& mark) { return mark.capture; });
    py::class_<PullStreams, std::shared_ptr<PullStreams>>(m, "PullStreams")
        .def(py::init([](int32_t device, int32_t lanes) {
                 within("lanes", lanes, 1, kMaxLanes);
                 return std::make_shared<PullStreams>(device, lanes);
             }),
             py::arg("device"), py::arg("lanes"))
        .def_static(
            "capture_of", [](uintptr_t current) { return PullStreams::capture_of(reinterpret_cast<void*>(current)); },
            py::arg("current"), "Identifies the capture that a raw stream is part of; 0: none.")
        .def(
            "mark",
            [](PullStreams& streams, uintptr_t current) { return streams.mark(reinterpret_cast<void*>(current)); },
            py::arg("current"), "All that the raw stream has.")
        .def(
            "wait",
            [](PullStreams& streams, uintptr_t current, const std::shared_ptr<PullMark>& mark) {
                streams.wait(reinterpret_cast<void*>(current), *given("mark", mark));
            },
            py::arg("current"), py::arg("mark"), "What the raw stream gets from here on runs after the mark.")
        .def(
            "pull",
            [](PullStreams& streams, uintptr_t current,
               const std::vector<std::tuple<uintptr_t, uintptr_t, int64_t>>& copies, const PullMarks& after) {
                return streams.pull(reinterpret_cast<void*>(current), pulled_bytes(copies), all_given(after));
            },
            py::arg("current"), py::arg("copies"), py::arg("after"),
            "Copies (to, from, bytes) by copy engines, which follow the marks; part of the capture of the raw stream "
            "where it is part of one. The mark of their end.")
        .def(
            "settle",
            [](PullStreams& streams, const PullMarks& marks) {
                all_given(marks);
                py::gil_scoped_release release;
                streams.settle(marks);
            },
            py::arg("marks"), "Waits on the host until these have been reached; for marks outside of a capture.");
}

}  // namespace

void bind_moe_experts_cuda(py::module_& m) {
    bind_pulls(m);
    using moe_experts::Gate;
    using moe_experts::Routing;
    using moe_experts::Weight;
    py::class_<Weight>(m, "ExpertWeight")
        .def(py::init([](uintptr_t data, int64_t experts, int64_t rows, int64_t expert_stride, int64_t row_stride,
                         int64_t depth_stride, uintptr_t bias) {
                 within("experts", experts, 0, kMostCount);
                 within("rows", rows, 0, kMostRow);
                 return Weight{{{reinterpret_cast<const void*>(data), experts}},
                               1,
                               rows,
                               expert_stride,
                               row_stride,
                               depth_stride,
                               reinterpret_cast<const void*>(bias)};
             }),
             py::arg("data"), py::arg("experts"), py::arg("rows"), py::arg("expert_stride"), py::arg("row_stride"),
             py::arg("depth_stride"), py::arg("bias"),
             "[experts, rows, depth]: addresses, strides in elements, of which that of rows or of the depth is 1; a "
             "bias of 0 is none.")
        .def(
            "add_range",
            [](Weight& weight, uintptr_t data, int64_t experts) {
                within("ranges", weight.num_ranges, 1, moe_experts::kMostRanges - 1);
                within("experts", experts, 1, kMostCount);
                weight.ranges[weight.num_ranges++] = {reinterpret_cast<const void*>(data), experts};
            },
            py::arg("data"), py::arg("experts"), "Further experts, at another address and of the same strides.");
    py::class_<Routing>(m, "ExpertRouting")
        .def(py::init([](uintptr_t order, uintptr_t table, int64_t num_rows, int32_t group, int32_t tile_rows) {
                 within("num_rows", num_rows, 0, kMostCount);
                 within("tile_rows", tile_rows, 1, kMostCount);
                 return Routing{reinterpret_cast<const int32_t*>(order), reinterpret_cast<int32_t*>(table), num_rows,
                                group, tile_rows};
             }),
             py::arg("order"), py::arg("table"), py::arg("num_rows"), py::arg("group"), py::arg("tile_rows"),
             "What the routing kernels left, in tiles of at most EXPERT_TILE_ROWS, or WIDE_EXPERT_TILE_ROWS.");
    py::class_<Gate>(m, "ExpertGate")
        .def(py::init([](bool gated, bool interleaved, int32_t activation, float alpha, float limit) {
                 return Gate{gated, interleaved, activation, alpha, limit};
             }),
             py::arg("gated"), py::arg("interleaved"), py::arg("activation"), py::arg("alpha"), py::arg("limit"));
    m.def(
        "experts_gate_up",
        [](uintptr_t x, int64_t x_stride, int64_t hidden, int32_t choices, const Weight& weight, const Routing& routing,
           const Gate& gate, uintptr_t inner, DType dtype, uintptr_t gathered, uintptr_t stream) {
            known("dtype", dtype, DType::kFloat16);
            within("hidden", hidden, 1, kMostRow);
            within("choices", choices, 1, kMostCount);
            py::gil_scoped_release release;
            return moe_experts::run_gate_up(reinterpret_cast<const void*>(x), x_stride, hidden, choices, weight,
                                            routing, gate, reinterpret_cast<void*>(inner), dtype,
                                            reinterpret_cast<void*>(gathered), reinterpret_cast<void*>(stream));
        },
        py::arg("x"), py::arg("x_stride"), py::arg("hidden"), py::arg("choices"), py::arg("weight"), py::arg("routing"),
        py::arg("gate"), py::arg("inner"), py::arg("dtype"), py::arg("gathered"), py::arg("stream"),
        "inner[p] = act(x[order[p] / choices] @ weight[expert of p].T + bias) on Hopper. A CUDA error code.");
    m.def(
        "experts_down",
        [](uintptr_t inner, int64_t inner_width, const Weight& weight, const Routing& routing, uintptr_t results,
           DType dtype, bool wide, uintptr_t stream) {
            known("dtype", dtype, DType::kFloat16);
            within("inner_width", inner_width, 1, kMostRow);
            py::gil_scoped_release release;
            return moe_experts::run_down(reinterpret_cast<const void*>(inner), inner_width, weight, routing,
                                         reinterpret_cast<void*>(results), dtype, wide,
                                         reinterpret_cast<void*>(stream));
        },
        py::arg("inner"), py::arg("inner_width"), py::arg("weight"), py::arg("routing"), py::arg("results"),
        py::arg("dtype"), py::arg("wide"), py::arg("stream"),
        "results[order[p]] = inner[p] @ weight[expert of p].T + bias on Hopper. A CUDA error code.");
    m.def(
        "experts_both",
        [](uintptr_t x, int64_t x_stride, int64_t hidden, int32_t choices, const Weight& gate_up, const Weight& down,
           const Routing& routing, const Gate& gate, uintptr_t inner, uintptr_t results, DType dtype, int32_t lag,
           uintptr_t stream) {
            known("dtype", dtype, DType::kFloat16);
            within("hidden", hidden, 1, kMostRow);
            within("choices", choices, 1, kMostCount);
            py::gil_scoped_release release;
            return moe_experts::run_both(reinterpret_cast<const void*>(x), x_stride, hidden, choices, gate_up, down,
                                         routing, gate, reinterpret_cast<void*>(inner),
                                         reinterpret_cast<void*>(results), dtype, lag, reinterpret_cast<void*>(stream));
        },
        py::arg("x"), py::arg("x_stride"), py::arg("hidden"), py::arg("choices"), py::arg("gate_up"), py::arg("down"),
        py::arg("routing"), py::arg("gate"), py::arg("inner"), py::arg("results"), py::arg("dtype"), py::arg("lag"),
        py::arg("stream"),
        "experts_gate_up and experts_down in one kernel, which takes each routing once. A CUDA error code.");
    m.def(
        "sort_expert_rows",
        [](uintptr_t experts, int64_t num_rows, int32_t num_experts, int32_t tile_rows, uintptr_t counts,
           uintptr_t order, uintptr_t table, bool early, uintptr_t stream) {
            within("num_rows", num_rows, 0, kMostCount);
            within("num_experts", num_experts, 0, kMostCount);
            within("tile_rows", tile_rows, 1, kMostCount);
            expect_address("experts", experts, num_rows > 0);
            expect_address("order", order, num_rows > 0);
            expect_address("table", table, true);
            py::gil_scoped_release release;
            return moe_experts::sort_rows({reinterpret_cast<const int64_t*>(experts), num_rows, num_experts, tile_rows,
                                           reinterpret_cast<int32_t*>(counts), reinterpret_cast<int32_t*>(order),
                                           reinterpret_cast<int32_t*>(table)},
                                          early, reinterpret_cast<void*>(stream));
        },
        py::arg("experts"), py::arg("num_rows"), py::arg("num_experts"), py::arg("tile_rows"), py::arg("counts"),
        py::arg("order"), py::arg("table"), py::arg("early"), py::arg("stream"),
        "order, table = the rows of `experts` (int64) sorted by expert, in tiles of `tile_rows`, as routing_kernels.py "
        "says. `counts`: a workspace of expert_row_counts numbers. A CUDA error code.");
    m.def("experts_unsupported", &moe_experts::unsupported, py::arg("dtype"), py::arg("hidden"), py::arg("inner"),
          py::arg("addresses"), py::arg("device"),
          "Why the device cannot run them; empty where it can. `addresses`: the or of all addresses and strides in "
          "bytes.");
}
#endif

}  // namespace weave
