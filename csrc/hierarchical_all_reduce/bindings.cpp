// The Python face of the exchange between hosts.
#include "base/bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "all_reduce_norm/handle.h"
#include "hierarchical_all_reduce/doubling.h"
#include "hierarchical_all_reduce/hosts.h"
#include "hierarchical_all_reduce/schedule.h"

namespace py = pybind11;

namespace weave {

void bind_hierarchical_all_reduce(py::module_& m);

namespace {

using hosts::Exchange;

// Also keeps the connections.
struct HostsHandle : AllReduceNormHandle {
    std::shared_ptr<fabric::tcp::Group> wire;

    HostsHandle(std::shared_ptr<GroupHandle> group, std::shared_ptr<fabric::tcp::Group> connections, hosts::HostMap map,
                hosts::Table table, const AllReduceNormSite& site, int32_t max_threads)
        : AllReduceNormHandle(
              group, std::make_unique<hosts::AllReduceNormOfHosts>(check(*group, site), *connections, std::move(map),
                                                                   std::move(table), site, max_threads)),
          wire(std::move(connections)) {}

    const hosts::AllReduceNormOfHosts& hosts_op() const { return static_cast<const hosts::AllReduceNormOfHosts&>(*op); }
    Status status() const override { return hosts_op().status(); }
};

std::unique_ptr<HostsHandle> make(std::shared_ptr<GroupHandle> group, std::shared_ptr<fabric::tcp::Group> connections,
                                  int32_t host, std::vector<std::vector<int32_t>> ranks,
                                  const std::vector<std::pair<int64_t, Exchange>>& rows, const AllReduceNormSite& site,
                                  int32_t max_threads) {
    if (rows.empty()) throw std::invalid_argument("no row says how calls are exchanged between hosts");
    hosts::Table table;
    for (const auto& [max_tokens, exchange] : rows)
        table.push_back({max_tokens, exchange});
    return std::make_unique<HostsHandle>(std::move(group), std::move(connections),
                                         hosts::HostMap{host, std::move(ranks)}, std::move(table), site, max_threads);
}

}  // namespace

void bind_hierarchical_all_reduce(py::module_& m) {
    py::enum_<Exchange>(m, "HostExchange")
        .value("one_shot", Exchange::kOneShot)
        .value("two_shot", Exchange::kTwoShot)
        .value("doubling", Exchange::kDoubling)
        .value("halving", Exchange::kHalving);
    py::class_<HostsHandle, AllReduceNormHandle>(m, "AllReduceNormOfHosts")
        .def(py::init(&make), py::arg("group"), py::arg("wire"), py::arg("host"), py::arg("ranks"), py::arg("table"),
             py::arg("site"), py::arg("max_threads"))
        .def_property_readonly("message_bytes",
                               [](const HostsHandle& handle) { return handle.hosts_op().message_bytes(); });
    m.def("host_peers", &hosts::peers, py::arg("exchange"), py::arg("host"), py::arg("hosts"),
          "The hosts that `host` of `hosts` exchanges messages with.");
    m.def(
        "host_schedule",
        [](Exchange exchange, int32_t host, int32_t num_hosts) {
            std::vector<py::tuple> found;
            for (const hosts::Step& step : hosts::schedule(exchange, host, num_hosts)) {
                found.push_back(py::make_tuple(step.peer, step.is_finished, step.sent.begin, step.sent.end,
                                               step.received.begin, step.received.end));
            }
            return found;
        },
        py::arg("exchange"), py::arg("host"), py::arg("hosts"),
        "Of the recursive exchanges: (peer, whether sums are finished, parts sent, parts received), in order.");
    py::enum_<hosts::Transfer>(m, "HostTransfer")
        .value("packet", hosts::Transfer::kPacket)
        .value("flagged_row", hosts::Transfer::kFlaggedRow);
    m.def("host_buffers", &hosts::doubling_needs, py::arg("transfer"), py::arg("tokens"), py::arg("hidden"),
          py::arg("hosts"), py::arg("ranks_of_host"),
          "What recursive doubling between GPUs of several hosts needs of every arena.");
    m.def("host_parts", &hosts::num_parts, py::arg("exchange"), py::arg("hosts"),
          "Parts that the rows of a host are divided into.");
}

}  // namespace weave
