"""Sites that hand a sharded sum to each other are decided together, and priced as they will run."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.fx as fx

from tests import forms
from tests.preview import previewed
from tests.rewrites.test_all_reduce_rms_norm import inputs
from weaveopt import backend, cost_model
from weaveopt.config import Config
from weaveopt.fabrics import topology
from weaveopt.pipeline.decide import decide
from weaveopt.pipeline.plan import plan
from weaveopt.records.candidate import LEAVE, Algorithm, Candidate, Estimate, Fabric, Term
from weaveopt.records.report import Decision
from weaveopt.records.site import Product, Site, Workload
from weaveopt.rewrites import RULES
from weaveopt.rewrites.all_reduce_rms_norm.estimate import estimate_unfused
from weaveopt.rule import ArenaNeed, Context, Finding, Match, Rule

MACHINE = cost_model.load("cpu")
UNFUSED_US = estimate_unfused(MACHINE, Workload(64, 64, 1024, "bfloat16", 2)).us
Offer = tuple[Fabric, float, float]
"""A fabric, the time with the sum sharded, and what it takes longer to hand it out whole."""


@dataclass(frozen=True)
class Chained:
    """A rule whose candidates cost what a test says, site by site."""

    offers: list[list[Offer]]
    error: float = 0.0
    name: str = "chained"
    asked: list[str] = field(default_factory=list)

    def find(self, graph: fx.Graph, context: Context) -> list[Finding]:
        raise NotImplementedError

    def candidates(self, site: Site, context: Context, usable_only: bool = False) -> tuple[Candidate, ...]:
        self.asked.append(site.id)
        return tuple(
            Candidate(
                self.name,
                fabric,
                Algorithm.TWO_SHOT,
                estimate=Estimate((Term("all", us),), self.error),
                whole=Estimate((Term("all", us), Term("gather", gather_us)), self.error),
            )
            for fabric, us, gather_us in self.offers[int(site.id[1:])]
        )

    def need(self, decision: Decision) -> ArenaNeed:
        return ArenaNeed(4096, 4096)

    def replace(self, *_: object) -> tuple[str, ...]:
        raise NotImplementedError


def chain(num_sites: int, break_after: int | None = None) -> list[Finding]:
    """x -> s0 -> s1 -> ..., each the residual of the next; something else reads the sum of `break_after` too."""
    graph = fx.Graph()
    total: fx.Node | None = None
    found = []
    for index in range(num_sites):
        reduced = graph.placeholder(f"x{index}")
        made = graph.call_function(max, (reduced,) if total is None else (reduced, total))
        normed = graph.call_function(abs, (made,))
        if index == break_after:
            graph.call_function(len, (made,))
        # The tables of a chain are alike, the products are not.
        workload = Workload(64, 64, 1024, "bfloat16", 2, product=Product(64, index + 1, 1))
        site = Site(f"s{index}", "chained", "0", "", (reduced.name,), workload)
        found.append(Finding(site, Match(frozenset({made, normed}), total, made)))
        total = made
    return found


def decided(
    offers: list[list[Offer]], findings: list[Finding], error: float = 0.0, **settings: object
) -> list[Decision]:
    """Times are relative to what the site takes unfused; `plan` shards the sums that were priced as sharded."""
    unfused = [estimate_unfused(MACHINE, f.site.workload).us for f in findings]  # type: ignore[arg-type]
    rule = Chained(
        [[(f, base + us, more) for f, us, more in row] for base, row in zip(unfused, offers, strict=True)], error
    )
    context = Context(Config(**settings), MACHINE, {"0": topology.fake(2)})  # type: ignore[arg-type]
    decisions = decide(findings, [rule], context)
    placed = {p.site: p for each in plan(findings, decisions, [rule]) for p in each.placements}
    for decision in decisions:
        assert all(c.whole is None for c in (decision.chosen, *decision.alternatives)), "settled"
        if decision.rewritten:
            assert decision.chosen.estimate is not None
            terms = {term.name for term in decision.chosen.estimate.terms}
            assert ("gather" not in terms) is placed[decision.site.id].sum_sharded
    return list(decisions)


SHM, PEER = Fabric.SHM, Fabric.PEER


def chosen(decisions: Sequence[Decision]) -> list[str]:
    return [d.chosen.fabric.value if d.rewritten else LEAVE for d in decisions]


def test_a_lone_site_pays_for_the_whole_sum() -> None:
    (decision,) = decided([[(SHM, -5.0, 10.0)]], chain(1))
    assert not decision.rewritten
    ((candidate,),) = [decision.alternatives]
    (reason,) = candidate.rejections
    assert reason.code == "no_saving" and candidate.estimate is not None and decision.unfused is not None
    assert dict(reason.values)["predicted_us"] == round(decision.unfused.us + 5.0, 2) == round(candidate.estimate.us, 2)
    (decision,) = decided([[(SHM, -5.0, 4.0)]], chain(1))
    assert decision.rewritten and decision.saving_us == pytest.approx(1.0)


def test_a_chain_pays_where_its_sites_alone_would_not() -> None:
    offers = [[(SHM, -5.0, 10.0)], [(SHM, -5.0, 10.0)], [(SHM, -5.0, 0.0)]]
    assert chosen(decided(offers, chain(3))) == ["shm"] * 3
    # Something else reads the middle sum: the second site is dear, and with it goes what the first one saves.
    assert chosen(decided(offers, chain(3, break_after=1))) == [LEAVE, LEAVE, "shm"]


def test_a_site_that_loses_is_rewritten_for_its_neighbour() -> None:
    findings = chain(2)
    decisions = decided([[(SHM, -5.0, 10.0)], [(SHM, 2.0, 0.0)]], findings)
    assert chosen(decisions) == ["shm", "shm"] and decisions[1].saving_us == pytest.approx(-2.0)
    left = decided([[(SHM, -5.0, 10.0)], [(SHM, 6.0, 0.0)]], findings)
    assert chosen(left) == [LEAVE, LEAVE]
    left = decided([[(SHM, -12.0, 4.0)], [(SHM, 6.0, 0.0)]], findings)
    assert chosen(left) == ["shm", LEAVE]
    (reason,) = left[1].alternatives[0].rejections
    assert reason.code == "no_saving" and dict(reason.values)["neighbours_gain_us"] == 4.0


def test_different_candidates_break_the_sharing() -> None:
    """Each site's own best is on another fabric; together they are better on one."""
    offers = [[(SHM, -20.0, 10.0), (PEER, -19.0, 10.0)], [(SHM, -3.0, 0.0), (PEER, -5.0, 0.0)]]
    decisions = decided(offers, chain(2))
    assert chosen(decisions) == ["peer", "peer"]
    codes = [[r.code for c in d.alternatives for r in c.rejections] for d in decisions]
    assert codes == [["slower_candidate"], ["slower_candidate"]]
    assert chosen(decided(offers, chain(2, break_after=0))) == ["shm", "peer"]


def test_a_rewrite_saves_more_than_the_models_error() -> None:
    """Unfused u, fused f with an error of 10 % of f: rewritten if u - f > f / 10."""
    u = estimate_unfused(MACHINE, chain(1)[0].site.workload).us  # type: ignore[arg-type]
    assert chosen(decided([[(SHM, -u / 11 - 0.01, 0.0)]], chain(1), error=0.1)) == ["shm"]
    assert chosen(decided([[(SHM, -u / 11 + 0.01, 0.0)]], chain(1), error=0.1)) == [LEAVE]
    assert chosen(decided([[(SHM, u, 0.0)]], chain(1), error=0.1, force=("chained",))) == ["shm"]


def test_sites_alike_are_asked_for_once() -> None:
    findings = chain(4)
    alike = [replace(f, site=replace(f.site, workload=findings[0].site.workload)) for f in findings]
    rule = Chained([[(SHM, 1.0, 0.0)]] * 4)
    decide(alike, [rule], Context(Config(), MACHINE, {"0": topology.fake(2)}))
    assert rule.asked == ["s0"]


@pytest.mark.parametrize("seed", range(120))
def test_chains_are_decided_best(seed: int) -> None:
    """Against all sets of choices of up to six sites on up to two fabrics, chains broken somewhere or not."""
    rng = random.Random(seed)
    num_sites, broken, error = rng.randint(1, 6), rng.choice((None, 0, 1, 2)), rng.choice((0.0, 0.01))
    offers = [
        [(fabric, rng.uniform(-30, 20), rng.choice((0.0, rng.uniform(0, 30)))) for fabric in rng.sample((SHM, PEER), 2)]
        for _ in range(num_sites)
    ]
    findings = chain(num_sites, broken)
    decisions = decided(offers, findings, error)
    unfused = [d.unfused.us for d in decisions if d.unfused is not None]

    def careful_us(choices: tuple[int, ...]) -> float:
        total = 0.0
        for index, choice in enumerate(choices):
            if choice == 2:
                total += unfused[index]
                continue
            fabric, us, gather_us = offers[index][choice]
            following = choices[index + 1] if index + 1 < num_sites else 2
            sharded = following != 2 and offers[index + 1][following][0] is fabric and broken != index
            total += (unfused[index] + us + (0.0 if sharded else gather_us)) * (1 + error)
        return total

    best = min(map(careful_us, itertools.product(range(3), repeat=num_sites)))
    fabrics = [[offer[0] for offer in row] for row in offers]
    got = tuple(row.index(d.chosen.fabric) if d.rewritten else 2 for row, d in zip(fabrics, decisions, strict=True))
    assert careful_us(got) == pytest.approx(best, rel=1e-12)
    predicted = sum(d.chosen.estimate.us + d.rewritten * d.chosen.estimate.error_us for d in decisions)  # type: ignore[union-attr]
    assert predicted == pytest.approx(best, rel=1e-12), "what is told is what counts"


Captured = tuple[Sequence[Finding], Sequence[Rule], Context]


@pytest.mark.parametrize("machine", ["cpu", "h200x4", "h100x8"])
@pytest.mark.parametrize(
    "form", [forms.pre_norm, forms.mixture, forms.gemma_sandwich, forms.chain], ids=lambda f: f.__name__
)
def test_captured_graphs_are_decided_best(
    form: Callable[..., object], machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every set of allowed candidates, laid out by `plan` and added up from the rule's own estimates."""
    seen: list[Captured] = []

    def spying(findings: Sequence[Finding], rules: Sequence[Rule], context: Context) -> tuple[Decision, ...]:
        seen.append((findings, rules, context))
        return decide(findings, rules, context)

    monkeypatch.setattr(backend, "decide", spying)
    weights = forms.make_weights(torch.bfloat16)
    device = cost_model.load(machine).device
    report = previewed(
        lambda x, r: form(weights, x, r), inputs(torch.bfloat16), machine=machine, device=device, static=True, force=()
    )
    assert report.fallbacks == ()
    ((findings, rules, context),) = seen
    options: list[list[Decision]] = []
    for found, decision in zip(findings, report.decisions, strict=True):
        (rule,) = (rule for rule in rules if rule.name == found.site.rule)
        offered = rule.candidates(found.site, context) if found.match is not None else ()
        leave = Candidate(LEAVE, Fabric.LIBRARY, Algorithm.LIBRARY, estimate=decision.unfused)
        options.append([Decision(found.site, c, (), decision.unfused) for c in (*offered, leave) if c.allowed])
    assert len(report.decisions) == (3 if form is forms.chain else 1)

    def careful_us(decisions: Sequence[Decision]) -> float:
        sharded = {p.site: p.sum_sharded for each in plan(findings, decisions, rules) for p in each.placements}
        total = 0.0
        for each in decisions:
            whole = each.chosen.whole if not sharded.get(each.site.id) else None
            estimate = whole or each.chosen.estimate
            assert estimate is not None
            total += estimate.us + (estimate.error_us if each.rewritten else 0.0)
        return total

    best = min(careful_us(choices) for choices in itertools.product(*options))
    assert careful_us(report.decisions) == pytest.approx(best, rel=1e-12)


def test_eighty_layers_are_decided_within_a_second() -> None:
    """161 sites, every candidate of every fabric; the best of three runs."""
    total: fx.Node | None = None
    graph, findings = fx.Graph(), []
    for index in range(161):
        reduced = graph.placeholder(f"x{index}")
        made = graph.call_function(max, (reduced,) if total is None else (reduced, total))
        last = index == 160
        workload = Workload(2048, 2048, 8192, "bfloat16", 8, product=Product(2048, 1024 + index, 8192))
        workload = replace(workload, has_residual=index > 0, sum_is_used=not last, sum_may_shard=not last)
        site = Site(f"s{index}", RULES[0].name, "0", "", (reduced.name,), workload)
        findings.append(Finding(site, Match(frozenset({made}), total, made)))
        total = made
    dgx = cost_model.load("h100x8")
    context = Context(Config(), dgx, {"0": topology.fake(8, device="cuda")})
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        decisions = decide(findings, RULES, context)
        seconds.append(time.perf_counter() - start)
    assert all(d.rewritten for d in decisions) and sum(map(len, (d.alternatives for d in decisions))) > 161 * 4
    assert min(seconds) < 1.0, seconds
