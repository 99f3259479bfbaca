// The Python face of the exchange between hosts.
#include "base/bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "reduction/handle.h"
#include "reduction/hosts/doubling.h"
#include "reduction/hosts/hosts.h"
#include "reduction/hosts/schedule.h"

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
        : AllReduceNormHandle(group, std::make_unique<hosts::AllReduceNormOfHosts>(
                                         check(group, site, max_threads), *connections, std::move(map),
                                         std::move(table), site, max_threads)),
          wire(std::move(connections)) {}

    const hosts::AllReduceNormOfHosts& hosts_op() const { return static_cast<const hosts::AllReduceNormOfHosts&>(*op); }
    Status status() const override { return hosts_op().status(); }
};

// Hosts of equally many ranks, which are 0, 1, ... in some order.
void expect_each_once(const std::vector<std::vector<int32_t>>& ranks) {
    within("the number of hosts", static_cast<int64_t>(ranks.size()), 1, kMostRanks);
    const std::size_t each = ranks[0].size();
    std::vector<bool> seen(ranks.size() * each);
    for (const std::vector<int32_t>& of_host : ranks) {
        if (of_host.size() != each) throw std::invalid_argument("hosts of different numbers of ranks");
        for (const int32_t rank : of_host) {
            if (seen[within("a rank of a host", rank, 0, static_cast<int64_t>(seen.size()) - 1)])
                throw std::invalid_argument("rank " + std::to_string(rank) + " is there twice");
            seen[rank] = true;
        }
    }
}

void expect_hosts(Exchange exchange, int32_t host, int32_t num_hosts) {
    known("exchange", exchange, Exchange::kHalving);
    within("hosts", num_hosts, 1, kMostRanks);
    within("host", host, 0, num_hosts - 1);
}

std::unique_ptr<HostsHandle> make(std::shared_ptr<GroupHandle> group, std::shared_ptr<fabric::tcp::Group> connections,
                                  int32_t host, std::vector<std::vector<int32_t>> ranks,
                                  const std::vector<std::pair<int64_t, Exchange>>& rows, const AllReduceNormSite& site,
                                  int32_t max_threads) {
    if (rows.empty()) throw std::invalid_argument("no row says how calls are exchanged between hosts");
    // Every rank once, and this one where `host` says; the connections are those of one rank of every host.
    expect_each_once(ranks);
    const auto num_hosts = static_cast<int32_t>(ranks.size());
    if (given("wire", connections)->world() != num_hosts || connections->rank() != host ||
        static_cast<int32_t>(ranks.at(0).size()) != given("group", group)->world())
        throw std::invalid_argument("hosts of other ranks than the group and its connections have");
    hosts::Table table;
    for (const auto& [max_tokens, exchange] : rows) {
        within("max_tokens of a row", max_tokens, 0, kMostCount);
        for (const int32_t peer : hosts::peers(known("exchange", exchange, Exchange::kHalving), host, num_hosts)) {
            if (!connections->is_connected(peer))
                throw std::invalid_argument("no connection to host " + std::to_string(peer));
        }
        table.push_back({max_tokens, exchange});
    }
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
    m.def(
        "host_peers",
        [](Exchange exchange, int32_t host, int32_t num_hosts) {
            expect_hosts(exchange, host, num_hosts);
            return hosts::peers(exchange, host, num_hosts);
        },
        py::arg("exchange"), py::arg("host"), py::arg("hosts"),
        "The hosts that `host` of `hosts` exchanges messages with.");
    m.def(
        "host_schedule",
        [](Exchange exchange, int32_t host, int32_t num_hosts) {
            expect_hosts(exchange, host, num_hosts);
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
    m.def(
        "host_buffers",
        [](hosts::Transfer transfer, int64_t tokens, int64_t hidden, int32_t num_hosts, int32_t ranks_of_host) {
            known("transfer", transfer, hosts::Transfer::kFlaggedRow);
            within("tokens", tokens, 0, kMostCount);
            within("hidden", hidden, 1, kMostRow);
            within("hosts", num_hosts, 1, kMostRanks);
            within("ranks_of_host", ranks_of_host, 1, kMostRanks);
            product_of("messages", {tokens + ranks_of_host, hidden + 16, 64, ranks_of_host + 16});
            return hosts::doubling_needs(transfer, tokens, hidden, num_hosts, ranks_of_host);
        },
        py::arg("transfer"), py::arg("tokens"), py::arg("hidden"), py::arg("hosts"), py::arg("ranks_of_host"),
        "What recursive doubling between GPUs of several hosts needs of every arena.");
    m.def(
        "host_parts",
        [](Exchange exchange, int32_t num_hosts) {
            expect_hosts(exchange, 0, num_hosts);
            return hosts::num_parts(exchange, num_hosts);
        },
        py::arg("exchange"), py::arg("hosts"), "Parts that the rows of a host are divided into.");
}

}  // namespace weave
