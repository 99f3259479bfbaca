"""Arena plans: bytes known ahead, no overlap of what is live together, sharded values only where that is right."""

from __future__ import annotations

import itertools
import random

import pytest
import torch.fx as fx

from tests.pipeline.test_decide import Priced
from weaveopt.decision import Algorithm, Candidate, Decision, Fabric, Site, Workload
from weaveopt.pipeline.plan import _Interval, _place, plan
from weaveopt.rule import ArenaNeed, Finding, Match


class Needing(Priced):
    def need(self, decision: Decision) -> ArenaNeed:
        workload = decision.site.workload
        assert workload is not None
        return ArenaNeed(workload.max_tokens * 10, workload.max_tokens * 6)


def row(name: str, tokens: int, match: Match, group: str = "0", threshold: int = 4) -> tuple[Finding, Decision]:
    workload = Workload(tokens=tokens, max_tokens=tokens, hidden=8, dtype="float32", world=2)
    site = Site(name, "priced", group, "", (name,), workload)
    chosen = Candidate("priced", Fabric.SHM, Algorithm.TWO_SHOT, (("one_shot_max_tokens", threshold),))
    return Finding(site, match), Decision(site, chosen, (), None)


def planned(*rows: tuple[Finding, Decision]) -> dict[str, object]:
    findings, decisions = zip(*rows, strict=True)
    return {p.group: p for p in plan(findings, decisions, [Needing({})])}


def chain_graph() -> list[fx.Node]:
    """x -> total -> total2, where only the second site's addition reads `total`."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(abs, (x,))
    total2 = graph.call_function(abs, (total,))
    graph.output(total2)
    return [x, total, total2]


def test_bytes_cover_the_largest_site_and_slots_do_not_overlap() -> None:
    _, total, total2 = chain_graph()
    plans = planned(row("a", 100, Match(frozenset([total]))), row("b", 3000, Match(frozenset([total2]))))
    (only,) = plans.values()
    assert only.bytes >= 2 * 3000 * 10 + 3000 * 6  # type: ignore[attr-defined]
    spans = sorted((s.offset, s.offset + s.bytes) for s in only.slots)  # type: ignore[attr-defined]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] == only.bytes  # type: ignore[attr-defined]
    assert {p.site: p.max_tokens for p in only.placements} == {"a": 100, "b": 3000}  # type: ignore[attr-defined]


def test_groups_have_arenas_of_their_own() -> None:
    _, total, total2 = chain_graph()
    plans = planned(row("a", 10, Match(frozenset([total])), "0"), row("b", 10, Match(frozenset([total2])), "1"))
    assert sorted(plans) == ["0", "1"]


@pytest.mark.parametrize(
    ("second", "sharded"),
    [({}, True), ({"tokens": 11}, False), ({"group": "1"}, False), ({"threshold": 5}, False)],
)
def test_a_sum_is_sharded_only_between_sites_that_divide_alike(second: dict[str, object], sharded: bool) -> None:
    _, total, total2 = chain_graph()
    settings = {"tokens": 10, **second}
    a = row("a", 10, Match(frozenset([total]), sharded_output=total))
    b = row("b", match=Match(frozenset([total2]), sharded_input=total), **settings)  # type: ignore[arg-type]
    placements = {p.site: p for each in planned(a, b).values() for p in each.placements}  # type: ignore[attr-defined]
    assert placements["a"].sum_sharded is sharded and placements["b"].residual_sharded is sharded


def test_a_sum_that_anything_else_reads_is_whole() -> None:
    _, total, total2 = chain_graph()
    with total.graph.inserting_before(total2):
        total.graph.call_function(len, (total,))
    a = row("a", 10, Match(frozenset([total]), sharded_output=total))
    b = row("b", 10, Match(frozenset([total2]), sharded_input=total))
    placements = [p for each in planned(a, b).values() for p in each.placements]  # type: ignore[attr-defined]
    assert not any(p.sum_sharded or p.residual_sharded for p in placements)


@pytest.mark.parametrize("seed", range(30))
def test_live_intervals_never_overlap(seed: int) -> None:
    rng = random.Random(seed)
    intervals = []
    for index in range(rng.randint(1, 12)):
        start = rng.randint(0, 8)
        intervals.append(_Interval(str(index), rng.randint(1, 30000), start, start + rng.randint(0, 4)))
    offsets = {owner: slot.offset for slot in _place(intervals, base=4096) for owner in slot.owners}
    for a in intervals:
        assert offsets[a.owner] >= 4096 and offsets[a.owner] % 4096 == 0
        for b in intervals:
            together = a.owner != b.owner and a.start <= b.end and b.start <= a.end
            apart = offsets[a.owner] + a.bytes <= offsets[b.owner] or offsets[b.owner] + b.bytes <= offsets[a.owner]
            assert not together or apart
