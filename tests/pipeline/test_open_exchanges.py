"""Which choices exclude each other since one waits for peers in line while the other's exchange is in flight."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx

from weaveopt.pipeline.open_exchanges import open_exchanges, waits_excluded
from weaveopt.records.candidate import Candidate, Estimate, Fabric
from weaveopt.records.site import Site
from weaveopt.records.task import Stream, Task
from weaveopt.rule import FoundSite, PricedSite, Proposal
from weaveopt.solver.selection import EXCLUDED

START, WAIT = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default
CANDIDATE = Candidate("rule", Fabric.PEER, estimate=Estimate(()))
IN_LINE, BEGUN = Proposal(CANDIDATE), Proposal(CANDIDATE, tasks=(Task(1.0, Stream.COMMUNICATION, ends_before="r"),))


def graph_of(order: str) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """`a` and `b` start the collectives of two sites, `A` and `B` wait, `r` and `s` read, `k` is other work."""
    graph, nodes = fx.Graph(), {}
    nodes["x"] = graph.placeholder("x")
    sources = {"a": "x", "b": "x", "A": "a", "B": "b", "r": "A", "s": "B", "k": "x"}
    targets = {"a": START, "b": START, "A": WAIT, "B": WAIT}
    for name in order:
        target = targets.get(name, torch.ops.aten.relu.default)
        rest = ("sum", "0") if target is START else ()
        nodes[name] = graph.call_function(target, (nodes[sources[name]], *rest))
        nodes[name].meta["val"] = torch.empty(2, 2, device="meta")
    graph.output([nodes["r"], nodes["s"]])
    return graph, nodes


@pytest.mark.parametrize(
    ("order", "excluded", "concurrent"),
    [
        # One after the other: nothing is in flight while anything else runs.
        ("aArbBs", set(), set()),
        # The second starts before the first is waited for: whatever is in flight there bars the other one in line.
        ("abAkBrs", {("left", 1), ("begun", 1), ("left", 0), ("begun", 0)}, {0, 1}),
        # The second lies between the first's wait and its first reader: the library's is over by then, a begun one not.
        ("aAkbBrs", {("begun", 1)}, set()),
    ],
)
def test_what_is_in_flight_bars_waits_in_line(order: str, excluded: set[tuple[str, int]], concurrent: set[int]) -> None:
    graph, nodes = graph_of(order)
    sites = [
        FoundSite(Site(name, "toy", ("0",), "", (name,), "toy"), frozenset({nodes[name], nodes[name.upper()]}))
        for name in "ab"
    ]
    priced = [PricedSite(each, Estimate(()), (IN_LINE, BEGUN), (0, 1)) for each in sites]
    found = open_exchanges(graph, sites)
    assert {each.site for each in found if each.is_overlapped} == concurrent
    seen = set()
    for exclusion in waits_excluded(found, priced):
        for (own, other), us in exclusion.terms.items():
            assert us == EXCLUDED and other == 0, "only what waits in line is barred"
            seen.add(({1: "begun", 2: "left"}[own], exclusion.sites[1]))
    assert seen == excluded
    assert [each.sites for each in waits_excluded(found, priced)] == [pair for each in found for pair in each.pairs]
