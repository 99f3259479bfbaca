// The Python module `weaveopt._nvshmem`: arenas of GPUs on several hosts, and the kernels between them. A module of its
// own, so that all else loads where NVSHMEM is not. Enumerations and records are those of `weaveopt._native`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/timeout.h"
#include "fabric/nvshmem.h"
#include "reduction/hosts/gpu.h"
#include "reduction/parameters.h"

namespace py = pybind11;

namespace weave {

namespace {

using fabric::nvshmem::Group;

// What is constant over the calls of a site. Offsets count from the first byte of an arena.
struct HostsSite {
    uint32_t tag = 0;
    int64_t hidden = 0;
    DType dtype = DType::kBFloat16;
    gpu::OutKind out_kind = gpu::OutKind::kSame;
    gpu::QuantKind quant = gpu::QuantKind::kNone;
    NormSpec post;
    NormSpec norm;
    float scale = 1;
    double timeout_s = 120;
    int32_t channel = 0;
    // By the names that doubling_needs() gives them.
    hosts::Places places;
    // The ranks of the group on each host.
    std::vector<std::vector<int32_t>> hosts;
};

// A site bound to the arenas of its group.
class HostsAllReduceNorm {
  public:
    HostsAllReduceNorm(std::shared_ptr<Group> group, const HostsSite& site)
        : group_(std::move(group)),
          sums_bytes_(site.places.sums.num_bytes),
          dtype_(known("dtype", site.dtype, DType::kFloat16)) {
        if (group_ == nullptr) throw std::invalid_argument("group is None");
        known("out_kind", site.out_kind, gpu::OutKind::kFp8);
        known("quant", site.quant, gpu::QuantKind::kPerToken);
        if (site.hidden < 8 || site.hidden > kMostRow || site.hidden % 8 != 0)
            throw std::invalid_argument("rows of " + std::to_string(site.hidden) +
                                        " elements: expected a multiple of 8");
        const hosts::Places& at = site.places;
        fit("host_inbox", at.inbox);
        fit("host_outbox", at.outbox);
        fit("host_row_inbox", at.row_inbox);
        fit("host_row_outbox", at.row_outbox);
        fit("host_flags", at.flags);
        fit("host_sums", at.sums);
        const hosts::HostRanks ranks = hosts::host_ranks(site.hosts, group_->rank());
        if (ranks.num_hosts() * ranks.num_of_host() != group_->world())
            throw std::invalid_argument("hosts of " + std::to_string(ranks.num_hosts() * ranks.num_of_host()) +
                                        " ranks, the group has " + std::to_string(group_->world()));
        exchange_ = hosts::placed(hosts::doubling(ranks), at);
        for (int32_t step = 0; step < exchange_.num_steps; ++step)
            exchange_.step[step].direct = group_->direct(exchange_.step[step].peer);
        for (int32_t other = 0; other < exchange_.num_of_host; ++other) {
            if (other == exchange_.rank_of_host) continue;
            for (hosts::WithinHost* within : {&exchange_.parts[other], &exchange_.finished[other]}) {
                within->to.direct = within->from.direct = group_->direct(within->to.peer);
                if (within->to.direct == nullptr)
                    throw std::invalid_argument("rank " + std::to_string(within->to.peer) +
                                                " is of this host, and its memory is not mapped here");
            }
        }
        call_.group = group_->view(site.channel, nanoseconds_of(site.timeout_s));
        call_.hidden = static_cast<int32_t>(site.hidden);
        call_.site = site.tag;
        call_.out_kind = site.out_kind;
        call_.quant = site.quant;
        call_.scale = site.scale;
        call_.post.spec = site.post;
        call_.norm.spec = site.norm;
    }

    // As GpuAllReduceNorm::run of one host; the kernels differ in how rows travel.
    int run(int64_t tokens, int32_t transfer, int32_t num_ctas, uintptr_t stream, uintptr_t partial, int64_t,
            uintptr_t residual, const ReductionParameters& parameters, uintptr_t normalized, uintptr_t sum,
            uintptr_t row_scale) const {
        gpu::Call call = call_;
        call.tokens = static_cast<int32_t>(within("tokens", tokens, 0, kMostCount));
        call.partial = reinterpret_cast<const void*>(partial);
        call.residual = reinterpret_cast<const void*>(residual);
        gpu::set_parameters(call, parameters);
        call.normalized = reinterpret_cast<void*>(normalized);
        call.sum = reinterpret_cast<void*>(sum);
        call.row_scale = reinterpret_cast<void*>(row_scale);
        const bool keeps_sums = exchange_.num_of_host > 1 || group_->world() > 2;
        if (keeps_sums && hosts::most_rows(tokens, exchange_.num_of_host) * call.hidden * 4 > sums_bytes_)
            throw std::invalid_argument(std::to_string(tokens) + " tokens do not fit the buffer of sums");
        gpu::Launch launch{};
        launch.dtype = dtype_;
        launch.num_ctas = num_ctas;
        launch.stream = reinterpret_cast<void*>(stream);
        // See GpuAllReduceNorm::run: the watchdog must get to run where a launch blocks.
        py::gil_scoped_release release;
        return hosts::run_doubling(
            call, exchange_, known("transfer", static_cast<hosts::Transfer>(transfer), hosts::Transfer::kFlaggedRow),
            launch);
    }

  private:
    void fit(const char* name, const hosts::Place& at) const {
        if (at.num_bytes == 0) return;
        expect_inside(name, at.offset, at.num_bytes, group_->num_bytes());
        if (at.offset >= static_cast<int64_t>(fabric::kHeaderBytes) && at.offset % 16 == 0) return;
        throw std::invalid_argument(std::string(name) + " at " + std::to_string(at.offset) +
                                    ": expected a multiple of 16 after the header");
    }

    std::shared_ptr<Group> group_;
    int64_t sums_bytes_;
    DType dtype_;
    hosts::Doubling exchange_{};
    gpu::Call call_{};
};

}  // namespace
}  // namespace weave

PYBIND11_MODULE(_nvshmem, m) {
    using namespace weave;
    m.doc() = "Arenas of GPUs on several hosts in NVSHMEM's symmetric heap, and the kernels between them.";
    py::module_::import("weaveopt._native");  // whose types are used here
    m.def("version", &fabric::nvshmem::version, "The version of NVSHMEM that this module was built with.");
    m.def(
        "unique_id", [] { return py::bytes(fabric::nvshmem::unique_id()); },
        "What one rank makes and all others need to start.");
    m.def(
        "start",
        [](int32_t rank, int32_t world, const py::bytes& id, int32_t device) {
            const std::string text = id;
            py::gil_scoped_release release;
            fabric::nvshmem::start(rank, world, text, device);
        },
        py::arg("rank"), py::arg("world"), py::arg("unique_id"), py::arg("device"),
        "Joins the ranks of one group, which all call it; once in a process.");
    py::class_<Group, std::shared_ptr<Group>>(m, "NvshmemGroup")
        .def(py::init<int32_t, int64_t, std::vector<std::string>>(), py::arg("device"), py::arg("num_bytes"),
             py::arg("hosts"), py::call_guard<py::gil_scoped_release>())
        .def_static(
            "of_one_process",
            [](int32_t device, int64_t num_bytes, int32_t rank, const std::vector<uintptr_t>& bases) {
                within("rank", rank, 0, static_cast<int64_t>(bases.size()) - 1);
                std::vector<char*> arenas;
                for (const uintptr_t base : bases)
                    arenas.push_back(reinterpret_cast<char*>(base));
                return std::make_shared<Group>(device, num_bytes, rank, std::move(arenas));
            },
            py::arg("device"), py::arg("num_bytes"), py::arg("rank"), py::arg("bases"))
        .def_property_readonly("address", [](const Group& group) { return reinterpret_cast<uintptr_t>(group.base()); })
        .def(
            "is_direct",
            [](const Group& group, int32_t rank) {
                return group.direct(static_cast<int32_t>(within("rank", rank, 0, group.world() - 1))) != nullptr;
            },
            py::arg("rank"))
        .def_property_readonly("status", &Group::status)
        .def("acknowledge", &Group::acknowledge)
        .def("abort", &Group::abort, py::arg("code"))
        .def("retire", [](const Group&) {});
    py::class_<hosts::Place>(m, "HostsPlace")
        .def(py::init([](int64_t offset, int64_t num_bytes) { return hosts::Place{offset, num_bytes}; }),
             py::arg("offset"), py::arg("num_bytes"))
        .def_readonly("offset", &hosts::Place::offset)
        .def_readonly("num_bytes", &hosts::Place::num_bytes);
    py::class_<hosts::Places>(m, "HostsPlaces")
        .def(py::init<>())
        .def_readwrite("inbox", &hosts::Places::inbox)
        .def_readwrite("outbox", &hosts::Places::outbox)
        .def_readwrite("row_inbox", &hosts::Places::row_inbox)
        .def_readwrite("row_outbox", &hosts::Places::row_outbox)
        .def_readwrite("flags", &hosts::Places::flags)
        .def_readwrite("sums", &hosts::Places::sums);
    py::class_<HostsSite>(m, "HostsSite")
        .def(py::init<>())
        .def_readwrite("tag", &HostsSite::tag)
        .def_readwrite("hidden", &HostsSite::hidden)
        .def_readwrite("dtype", &HostsSite::dtype)
        .def_readwrite("out_kind", &HostsSite::out_kind)
        .def_readwrite("quant", &HostsSite::quant)
        .def_readwrite("post", &HostsSite::post)
        .def_readwrite("norm", &HostsSite::norm)
        .def_readwrite("scale", &HostsSite::scale)
        .def_readwrite("timeout_s", &HostsSite::timeout_s)
        .def_readwrite("channel", &HostsSite::channel)
        .def_readwrite("places", &HostsSite::places)
        .def_readwrite("hosts", &HostsSite::hosts);
    py::class_<HostsAllReduceNorm>(m, "HostsAllReduceNorm")
        .def(py::init<std::shared_ptr<Group>, const HostsSite&>(), py::arg("group"), py::arg("site"))
        .def("run", &HostsAllReduceNorm::run);
    m.def("doubling_unsupported", &hosts::doubling_unsupported, py::arg("dtype"), py::arg("hidden"), py::arg("device"),
          "Why the device cannot run the kernel between hosts for such rows; empty where it can.");
}
