"""Arena plans: bytes known ahead, no overlap of what is live together, sharded values only where that is right."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch.fx as fx

from tests.pipeline.test_decide import Priced
from weaveopt.pipeline.plan import _Interval, _place, plan
from weaveopt.records.candidate import Algorithm, Candidate, Fabric, Form, Lowering
from weaveopt.records.memory import BufferPlan, RegionNeed
from weaveopt.records.report import Decision
from weaveopt.records.site import Site, Workload
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


class Sharing(Priced):
    """Sites on GPUs: what they need differs by site."""

    def need(self, decision: Decision) -> RegionNeed:
        tokens = decision.chosen.lowerings[-1].max_tokens
        return RegionNeed(256 * tokens, 512 * (200 - tokens), 1024 * tokens, 256 if tokens == 30 else 0)


def gpu_row(name: str, tokens: int, match: Match, fabric: Fabric = Fabric.PEER) -> tuple[Finding, Decision]:
    found, decision = row(name, tokens, match)
    table = (Lowering(tokens // 2, Algorithm.ONE_SHOT, Form.MAIL), Lowering(tokens, Algorithm.TWO_SHOT, Form.BULK, 64))
    return found, replace(decision, chosen=replace(decision.chosen, fabric=fabric, lowerings=table))


def shared(*rows: tuple[Finding, Decision]) -> BufferPlan:
    findings, decisions = zip(*rows, strict=True)
    (only,) = plan(findings, decisions, [Sharing({})])
    return only


def test_sites_of_a_gpu_group_share_the_regions() -> None:
    _, total, total2 = chain_graph()
    found = shared(gpu_row("a", 100, Match(frozenset([total]))), gpu_row("b", 40, Match(frozenset([total2]))))
    assert (found.fabric, found.regions) == (Fabric.PEER, RegionNeed(25600, 81920, 102400))
    # csrc/fabric/peer.h: header, two mailboxes, staging, output
    assert [(s.offset, s.bytes) for s in found.slots] == [(65536, 51200), (116736, 81920), (198656, 102400)]
    assert found.bytes == 301056
    assert all(slot.owners == ("a", "b") for slot in found.slots)
    placed = [(p.site, p.max_tokens, p.partial_offset, p.partial_bytes, p.output_offset) for p in found.placements]
    assert placed == [("a", 100, 0, 0, 0), ("b", 40, 0, 0, 0)]


def test_a_product_that_writes_into_the_arena_has_the_last_region() -> None:
    _, total, total2 = chain_graph()
    rows = gpu_row("a", 30, Match(frozenset([total])), Fabric.MULTIMEM), gpu_row("b", 40, Match(frozenset([total2])))
    found = shared(*rows)
    assert found.fabric is Fabric.MULTIMEM, "what maps it by multicast too"
    last = found.slots[-1]
    assert last.bytes == 256 and last.offset + 256 == found.bytes


@pytest.mark.parametrize(("tokens", "ctas", "sharded"), [(40, 64, True), (40, 32, False), (42, 64, False)])
def test_a_sum_is_sharded_only_between_equal_tables(tokens: int, ctas: int, sharded: bool) -> None:
    _, total, total2 = chain_graph()
    a = gpu_row("a", 40, Match(frozenset([total]), sharded_output=total))
    found, decision = gpu_row("b", 40, Match(frozenset([total2]), sharded_input=total))
    first, last = decision.chosen.lowerings
    table = (first, replace(last, max_tokens=tokens, num_ctas=ctas))
    placements = shared(a, (found, replace(decision, chosen=replace(decision.chosen, lowerings=table)))).placements
    assert [p.sum_sharded for p in placements] == [sharded, False]
    assert [p.residual_sharded for p in placements] == [False, sharded]


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
