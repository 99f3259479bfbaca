"""The link between hosts from made-up times: what was put in comes out, and what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.graphs.nonempty import some
from weaveopt import cost_model
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.machine import ContentionRow, Link
from weaveopt.errors import WeaveError
from weaveopt.fabrics.topology import Group, Topology
from weaveopt.measure.cases.between_hosts import (
    BURSTS,
    EXCHANGE_BYTES,
    PING_BYTES,
    REDUCED_BYTES,
    HostLink,
    host_ranks,
    shows_bytes,
)
from weaveopt.measure.cases.hosts_contention import HostContention
from weaveopt.measure.clock import Sample
from weaveopt.measure.fit import relative_line
from weaveopt.records.candidate import Fabric

CPU = torch.device("cpu")
GLOO = Link("", 40.0, 2e8)


def measured(link: Link, hosts: int = 2, ranks: int = 2, library: Link = GLOO) -> HostLink:
    """As if between such hosts; the library's all-reduce as its price says."""
    before = cost_model.load("cpu")
    with_library = replace(
        before,
        fabric_costs=tuple(
            replace(costs, inter_host=library) if costs.fabric is Fabric.LIBRARY else costs
            for costs in before.fabric_costs
        ),
    )
    world = hosts * ranks

    def reduced_us(size: int) -> float:
        return cost_model.all_reduce_us(with_library, Fabric.LIBRARY, "library", size, world, hosts)

    return HostLink(
        hosts,
        ranks,
        pings=[(size, Sample(link.step_us + link.us(size), 0.02)) for size in PING_BYTES],
        bursts=[(count, Sample(1.0 + count * link.overhead_us, 0.02)) for count in BURSTS],
        exchanges=[(size, Sample(90.0 + ranks * link.us(size), 0.02)) for size in EXCHANGE_BYTES],
        reduced=[(size, Sample(reduced_us(size), 0.05)) for size in REDUCED_BYTES],
        contention=HostContention(1.08, 1.21, Sample(9000.0, 0.03)),
    )


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_link_comes_out_as_it_is(ranks: int) -> None:
    link = Link("between", 21.5, 1.25e9, overhead_us=4.25)
    found = measured(link, ranks=ranks).link()
    assert found.latency_us == pytest.approx(21.5, rel=1e-3)
    assert found.bytes_per_s == pytest.approx(1.25e9, rel=1e-3)
    assert found.overhead_us == pytest.approx(4.25, rel=1e-3)


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 1), (2, 2), (3, 2), (4, 3)])
def test_the_price_of_the_library_is_its_time(hosts: int, ranks: int) -> None:
    """Oversubscribed cores and the part within a host included."""
    seen = measured(Link("", 20.0, 1e9, 2.0), hosts, ranks)
    machine = seen.renewed(cost_model.load("cpu"), "here", CPU)
    for size, sample in some(seen.reduced):
        told = cost_model.all_reduce_us(machine, Fabric.LIBRARY, "library", size, hosts * ranks, hosts)
        assert told == pytest.approx(sample.us, rel=0.02)


def test_sizes_that_hardly_differ_show_no_bandwidth() -> None:
    """Something else ran during the smallest one, or the link is faster than sizes are large."""
    disturbed = [(64 << 10, Sample(4000.0, 0.5)), (1 << 20, Sample(4001.0, 0.1))]
    assert not shows_bytes(disturbed)
    assert shows_bytes([*disturbed, (4 << 20, Sample(16000.0, 0.1)), (16 << 20, Sample(64000.0, 0.1))])
    assert shows_bytes(measured(Link("", 20.0, 1e9, 2.0)).exchanges)


def test_only_the_link_is_renewed(tmp_path: Path) -> None:
    before = cost_model.load("cpu")
    machine = measured(Link("", 20.0, 1e9, 2.0)).renewed(before, "here", CPU)
    origins = dict(machine.origins)
    assert origins["between"].kind == origins["between.gloo"].kind == "measured"
    assert origins["between"].host.startswith("2 hosts of ") and origins["between"].spread == pytest.approx(0.02)
    assert not any("assumed" in each.note for name, each in machine.origins if name.startswith("between"))
    assert fabric_costs(machine, Fabric.LIBRARY).inter_host is not None
    assert origins["between.contention"].spread == pytest.approx(0.03)
    assert machine.contention is not None and machine.contention.rows == (ContentionRow(1, 1.08, 1.21),)
    kept = replace(
        machine,
        name=before.name,
        origins=before.origins,
        inter_host=before.inter_host,
        fabric_costs=before.fabric_costs,
        contention=before.contention,
    )
    assert kept == before
    path = tmp_path / "here.json"
    path.write_text(cost_model.dumps(machine))
    assert cost_model.load(str(path)) == machine
    again = measured(Link("", 30.0, 1e9, 2.0)).renewed(machine, "here", CPU)
    assert again.inter_host.latency_us == pytest.approx(30.0, rel=1e-3)
    assert [name for name, _ in again.origins] == [name for name, _ in machine.origins]


def test_times_that_contradict_themselves_are_refused() -> None:
    seen = measured(Link("", 20.0, 1e9, 2.0))
    slow_ends = replace(seen, bursts=[(count, Sample(15.0 * count, 0.0)) for count in BURSTS])
    with pytest.raises(WeaveError, match=r"costs each of its two ends 15.0 us, which leaves a latency of -6.0 us"):
        slow_ends.link()
    link = replace(slow_ends, on_one_machine=True).link()
    assert link.latency_us > 0.0 and link.step_us == pytest.approx(24.0), "the sender's call delivers the message"
    falling = replace(seen, exchanges=[(size, Sample(1e9 / size, 0.0)) for size in EXCHANGE_BYTES])
    with pytest.raises(WeaveError, match=r"exchanges of all ranks at once took .* can be negative or nothing"):
        falling.link()
    free = replace(seen, pings=[(size, Sample(0.001 * size, 0.0)) for size in PING_BYTES])
    with pytest.raises(WeaveError, match="measure again on quiet hosts"):
        free.link()
    with pytest.raises(WeaveError, match="the library's all-reduce took"):
        replace(seen, reduced=[(size, Sample(1e9 / size, 0.0)) for size in REDUCED_BYTES]).library(
            cost_model.load("cpu")
        )


def test_small_and_large_times_count_alike() -> None:
    """Least squares of relative errors: ten percent of a large time outweigh no small one."""
    rows = [(float(size), 10.0 + 0.01 * size) for size in (1, 10, 100)] + [(1e6, 1.1 * (10.0 + 0.01 * 1e6))]
    constant, slope = relative_line(rows)
    assert constant == pytest.approx(10.0, rel=0.02) and slope == pytest.approx(0.011, rel=0.02)


def test_hosts_have_equally_many_ranks() -> None:
    def topology(*hosts: str) -> Topology:
        return Topology(Group("0", tuple(range(len(hosts))), 0), hosts, "cpu")

    assert host_ranks(topology("a", "b", "a", "b")) == ((0, 2), (1, 3))
    with pytest.raises(WeaveError, match=r"hosts have \[2, 1\] ranks; start equally many on each"):
        host_ranks(topology("a", "b", "a"))
