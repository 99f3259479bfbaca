// The Python face of the GPU fabric. Plain C++: everything that needs CUDA's headers is declared in peer.h.
#ifdef WEAVE_WITH_CUDA
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <vector>

#include "base/bindings.h"
#include "fabric/host.h"
#include "fabric/peer.h"
#include "fabric/side_stream.h"

namespace py = pybind11;

namespace weave {

using fabric::Fill;
using fabric::HostGroup;
using fabric::PeerGroup;
using fabric::SideStream;
using fabric::StreamCrossing;

void bind_fabric_cuda(py::module_& m) {
    py::class_<PeerGroup, std::shared_ptr<PeerGroup>>(m, "PeerGroup")
        .def(py::init([](std::vector<uint64_t> bases, uint64_t multicast, int32_t rank, int32_t device,
                         int64_t num_bytes, const std::vector<std::tuple<int64_t, int64_t, uint32_t>>& fills) {
                 std::vector<Fill> words;
                 for (const auto& [offset, bytes, word] : fills)
                     words.push_back({offset, bytes, word});
                 py::gil_scoped_release release;
                 return std::make_shared<PeerGroup>(std::move(bases), multicast, rank, device, num_bytes, words);
             }),
             py::arg("bases"), py::arg("multicast"), py::arg("rank"), py::arg("device"), py::arg("num_bytes"),
             py::arg("fills"))
        .def_property_readonly("status", &PeerGroup::status)
        .def("acknowledge", &PeerGroup::acknowledge)
        .def("abort", &PeerGroup::abort, py::arg("code"))
        .def("retire", &PeerGroup::retire);
    py::class_<HostGroup, PeerGroup, std::shared_ptr<HostGroup>>(m, "HostGroup")
        .def(py::init([](std::vector<std::shared_ptr<fabric::shm::Segment>> segments, int32_t rank, int32_t device) {
                 for (const auto& segment : segments)
                     given("a segment", segment);
                 py::gil_scoped_release release;
                 return std::make_shared<HostGroup>(std::move(segments), rank, device);
             }),
             py::arg("segments"), py::arg("rank"), py::arg("device"));
    m.def("why_no_host_memory", &fabric::why_no_host_memory, py::arg("device"),
          py::call_guard<py::gil_scoped_release>(),
          "Why the GPU cannot use memory of the host that processes share; empty where it can.");
    m.def("has_peer_atomics", &fabric::has_peer_atomics, py::arg("device"), py::arg("peer"),
          py::call_guard<py::gil_scoped_release>(), "Whether a GPU supports native atomics on the memory of another.");
    py::class_<SideStream, std::shared_ptr<SideStream>>(m, "SideStream")
        .def(py::init<int32_t>(), py::arg("device"))
        .def_property_readonly("handle",
                               [](const SideStream& stream) { return reinterpret_cast<uintptr_t>(stream.handle()); })
        .def_property_readonly("device", &SideStream::device);
    py::class_<StreamCrossing>(m, "StreamCrossing")
        .def(py::init([](const std::shared_ptr<SideStream>& stream) {
                 return std::make_unique<StreamCrossing>(given("stream", stream));
             }),
             py::arg("stream"))
        .def(
            "fork",
            [](StreamCrossing& crossing, uintptr_t current) { return crossing.fork(reinterpret_cast<void*>(current)); },
            py::arg("current"), "The side stream waits for all that the raw stream `current` has; a CUDA error code.")
        .def("launched", &StreamCrossing::launched, "Marks the end of a call on the side stream; a CUDA error code.")
        .def(
            "join",
            [](StreamCrossing& crossing, uintptr_t current) { return crossing.join(reinterpret_cast<void*>(current)); },
            py::arg("current"), "The raw stream `current` waits for the marked end; a CUDA error code.");
    m.def("cuda_error_text", &fabric::error_text, py::arg("code"));
    m.def("has_code", &fabric::has_code, py::arg("device"), py::call_guard<py::gil_scoped_release>(),
          "Whether this build has kernels that the GPU can run, as machine code or as PTX.");
    m.attr("CUDA_ARCHS") = WEAVE_CUDA_ARCHS;
}

}  // namespace weave
#endif
