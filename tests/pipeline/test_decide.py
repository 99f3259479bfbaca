"""The chosen set is the best one of those that go together; every refusal is kept; ties break alike everywhere."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch.fx as fx

from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.fabrics import topology
from weaveopt.pipeline.decide import decide
from weaveopt.records.candidate import LEAVE, Algorithm, Candidate, Estimate, Fabric, Rejection, Term
from weaveopt.records.report import Decision
from weaveopt.records.site import Site, Workload
from weaveopt.rewrites.all_reduce_rms_norm.estimate import estimate_unfused
from weaveopt.rule import ArenaNeed, Context, Finding, Match

MACHINE = cost_model.load("cpu")
WORKLOAD = Workload(tokens=64, max_tokens=64, hidden=1024, dtype="bfloat16", world=2)
UNFUSED_US = estimate_unfused(MACHINE, WORKLOAD).us


@dataclass(frozen=True)
class Priced:
    """A rule whose candidates cost what a test says."""

    cost_us: dict[str, float]
    name: str = "priced"

    def find(self, graph: fx.Graph, context: Context) -> list[Finding]:
        raise NotImplementedError

    def candidates(self, site: Site, context: Context, usable_only: bool = False) -> tuple[Candidate, ...]:
        estimate = Estimate((Term("all", self.cost_us[site.id]),), relative_error=0.0)
        refused = Candidate(self.name, Fabric.PEER, Algorithm.TWO_SHOT, rejections=(Rejection("no_kernel", "none"),))
        return (Candidate(self.name, Fabric.SHM, Algorithm.ONE_SHOT, estimate=estimate), refused)

    def need(self, decision: Decision) -> ArenaNeed:
        raise NotImplementedError

    def replace(self, *_: object) -> tuple[str, ...]:
        raise NotImplementedError


def make_nodes(count: int) -> list[fx.Node]:
    graph = fx.Graph()
    return [graph.placeholder(f"x{i}") for i in range(count)]


_counts = itertools.count(65)


def finding(name: str, nodes: list[fx.Node]) -> Finding:
    """A site unlike all others: sites alike have the same candidates."""
    workload = replace(WORKLOAD, max_tokens=next(_counts))
    site = Site(id=name, rule="priced", group="0", module="", collectives=(name,), workload=workload)
    return Finding(site, Match(frozenset(nodes)))


def context(**settings: tuple[str, ...]) -> Context:
    return Context(Config(**settings), MACHINE, {"0": topology.fake(2)})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_the_set_is_the_best_one(seed: int) -> None:
    """Against brute force over all subsets of up to nine sites that share nodes at random."""
    rng = random.Random(seed)
    nodes = make_nodes(8)
    names = [f"s{i}" for i in range(rng.randint(1, 9))]
    findings = [finding(name, rng.sample(nodes, rng.randint(1, 3))) for name in names]
    rule = Priced({name: UNFUSED_US * rng.uniform(0.1, 0.9) for name in names})
    decisions = decide(findings, [rule], context())

    def saving(chosen: tuple[int, ...]) -> float:
        sets = [findings[i].match.interior for i in chosen]  # type: ignore[union-attr]
        if any(a & b for a, b in itertools.combinations(sets, 2)):
            return -1.0
        return sum(UNFUSED_US - rule.cost_us[names[i]] for i in chosen)

    indices = range(len(names))
    best = max(saving(s) for size in range(len(names) + 1) for s in itertools.combinations(indices, size))
    got = tuple(i for i in indices if decisions[i].rewritten)
    assert saving(got) == pytest.approx(best)
    for decision in decisions:
        if not decision.rewritten:
            assert any(r.code == "overlaps" for c in decision.alternatives for r in c.rejections)


def test_a_rewrite_needs_a_saving_and_says_so() -> None:
    (nodes,) = [make_nodes(1)]
    (decision,) = decide([finding("a", nodes)], [Priced({"a": UNFUSED_US * 1.01})], context())
    assert decision.chosen.choice == LEAVE and decision.unfused is not None
    (reason,) = decision.alternatives[0].rejections
    assert reason.code == "no_saving" and dict(reason.values)["unfused_us"] == round(UNFUSED_US, 2)


def test_force_overrides_the_model_and_disable_overrides_force() -> None:
    nodes = make_nodes(1)
    rule = Priced({"a": UNFUSED_US * 2})
    (forced,) = decide([finding("a", nodes)], [rule], context(force=("priced",)))
    (disabled,) = decide([finding("a", nodes)], [rule], context(force=("priced",), disable=("priced",)))
    assert forced.rewritten and forced.saving_us < 0
    assert not disabled.rewritten and disabled.alternatives[0].rejections[0].code == "disabled"


def test_all_reasons_of_all_candidates_are_kept() -> None:
    (decision,) = decide([finding("a", make_nodes(1))], [Priced({"a": 1.0})], context(disable=("priced",)))
    codes = [[r.code for r in c.rejections] for c in decision.alternatives]
    assert codes == [["disabled"], ["no_kernel", "disabled"]]


def test_a_site_that_was_not_matched_keeps_its_reasons() -> None:
    reason = Rejection("no_norm_follows", "nothing", (("node", "add"),))
    site = Site("a", "priced", "0", "", ("a",), None, rejections=(reason,))
    (decision,) = decide([Finding(site, None)], [Priced({})], context())
    assert decision.chosen.choice == LEAVE and decision.alternatives[0].rejections == (reason,)


def test_ties_go_to_the_earlier_site() -> None:
    nodes = make_nodes(1)
    rows = decide([finding("a", nodes), finding("b", nodes)], [Priced({"a": 1.0, "b": 1.0})], context())
    assert [row.rewritten for row in rows] == [True, False]
