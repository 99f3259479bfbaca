"""Choices that save something together are made together, and reported as they will run."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from tests.graphs import forms, toys
from tests.graphs.preview import previewed
from tests.graphs.toys import Offer
from tests.graphs.traces import context_of, framed, traced_chain
from tests.rewrites.test_all_reduce_rms_norm import inputs
from weaveopt import backend, cost_model
from weaveopt.pipeline.decide import DecidedGraph, decide
from weaveopt.pipeline.price import PricedGraph, price
from weaveopt.records.candidate import LEAVE, Estimate, Fabric, Term, error_between_us
from weaveopt.records.report import Decision
from weaveopt.rewrites import RULES
from weaveopt.rewrites.reduction.candidates import FusedReductionPlan
from weaveopt.rule import Chosen, Context, Proposal, RuleSet

NODE_US = toys.node_us()
SHM, PEER = Fabric.SHM, Fabric.PEER


def decided(graph: toys.Graph, error: float = 0.0, **settings: object) -> tuple[Decision, ...]:
    """The decisions; an estimate has the term `shared` where the next site is rewritten on the same fabric."""
    known = toys.context(replace(toys.MACHINE, relative_error=error), **settings)
    decisions = toys.decided(graph, toys.rules(toys.Chained(error=error)), known).decisions
    following = [*decisions[1:], None]
    for index, (decision, after) in enumerate(zip(decisions, following, strict=True)):
        if decision.rewritten:
            assert decision.chosen.estimate is not None
            terms = {term.name: term.us for term in decision.chosen.estimate.terms}
            alike = after is not None and after.rewritten and after.chosen.fabric is decision.chosen.fabric
            continues = alike and graph.sites[index + 1].structure.continues  # type: ignore[attr-defined]
            assert continues or "shared" not in terms
    return decisions


def chosen(decisions: Sequence[Decision]) -> list[str]:
    return [d.chosen.fabric.value if d.rewritten else LEAVE for d in decisions]


def whole(us: float, gather_us: float, fabric: Fabric = SHM) -> Offer:
    """`us` more than the site as it is with its sum sharded; `gather_us` on top of that to gather the sum."""
    return Offer(-us - gather_us, fabric, gather_us)


def test_a_lone_site_pays_for_the_whole_sum() -> None:
    (decision,) = decided(toys.chain([[whole(-5.0, 10.0)]]))
    assert not decision.rewritten
    ((candidate,),) = [decision.alternatives]
    (reason,) = candidate.rejections
    assert reason.code == "no_saving" and candidate.estimate is not None and decision.baseline is not None
    told_us = dict(reason.values)["predicted_us"]
    assert told_us == round(decision.baseline.us + 5.0, 2) == round(candidate.estimate.us, 2)
    (decision,) = decided(toys.chain([[whole(-5.0, 4.0)]]))
    assert decision.rewritten and decision.saving_us == pytest.approx(1.0)


def test_a_chain_pays_where_its_sites_alone_would_not() -> None:
    offers = [[whole(-5.0, 10.0)], [whole(-5.0, 10.0)], [whole(-5.0, 0.0)]]
    decisions = decided(toys.chain(offers))
    assert chosen(decisions) == ["shm"] * 3
    assert [d.saving_us for d in decisions] == pytest.approx([5.0] * 3)
    # Something else reads the middle sum: the second site is dear, and with it goes what the first one saves.
    assert chosen(decided(toys.chain(offers, broken_after=1))) == [LEAVE, LEAVE, "shm"]


def test_a_site_that_loses_is_rewritten_for_its_neighbour() -> None:
    decisions = decided(toys.chain([[whole(-5.0, 10.0)], [whole(2.0, 0.0)]]))
    assert chosen(decisions) == ["shm", "shm"] and decisions[1].saving_us == pytest.approx(-2.0)
    left = decided(toys.chain([[whole(-5.0, 10.0)], [whole(6.0, 0.0)]]))
    assert chosen(left) == [LEAVE, LEAVE]
    left = decided(toys.chain([[whole(-12.0, 4.0)], [whole(6.0, 0.0)]]))
    assert chosen(left) == ["shm", LEAVE]
    (reason,) = left[1].alternatives[0].rejections
    assert reason.code == "no_saving" and dict(reason.values)["neighbours_gain_us"] == 4.0


def test_different_candidates_break_the_sharing() -> None:
    """Each site's own best is on another fabric; together they are better on one."""
    offers = [
        [whole(-20.0, 10.0), whole(-19.0, 10.0, PEER)],
        [whole(-3.0, 0.0), whole(-5.0, 0.0, PEER)],
    ]
    decisions = decided(toys.chain(offers))
    assert chosen(decisions) == ["peer", "peer"]
    codes = [[r.code for c in d.alternatives for r in c.rejections] for d in decisions]
    assert codes == [["slower_candidate"], ["slower_candidate"]]
    assert chosen(decided(toys.chain(offers, broken_after=0))) == ["shm", "peer"]


def test_a_rewrite_saves_more_than_the_models_error() -> None:
    """As it is u ± e, rewritten f with an error of 10 % of f: rewritten if u - f > sqrt((f / 10)² + e²)."""
    (left,) = decided(toys.chain([[Offer(-1.0)]]), error=0.1)
    assert left.baseline is not None and left.baseline.error_us > NODE_US / 15
    enough = left.baseline.error_us
    for _ in range(60):
        enough = math.hypot(0.1 * (NODE_US - enough), left.baseline.error_us)
    assert chosen(decided(toys.chain([[Offer(enough + 0.01)]]), error=0.1)) == ["shm"]
    assert chosen(decided(toys.chain([[Offer(enough - 0.01)]]), error=0.1)) == [LEAVE]
    assert chosen(decided(toys.chain([[Offer(-NODE_US)]]), error=0.1, force=("chained",))) == ["shm"]


def test_sites_of_one_kind_are_priced_once() -> None:
    """All have the same candidates; with only usable ones, the rule is asked about the first alone."""
    graph = toys.chain([[Offer(1.0)]] * 4, kind="alike")
    rule = toys.Chained()
    frame = toys.priced(graph, toys.rules(rule), toys.context()).frame
    sites = frame.problem().sites
    assert len({id(site.proposals[0].candidate) for site in sites}) == 1
    assert len({id(site.baseline) for site in sites}) == 1
    assert [site.proposals[0].consumes for site in sites] == [found.nodes for found in graph.sites]
    rule.asked.clear()
    assert len(frame.problem(usable_only=True).sites) == 4 and rule.asked == ["s0"]


@pytest.mark.parametrize("seed", range(120))
def test_chains_are_decided_best(seed: int) -> None:
    """Against all sets of choices of up to six sites on up to two fabrics, chains broken somewhere or not."""
    rng = random.Random(seed)
    num_sites, broken, error = rng.randint(1, 6), rng.choice((None, 0, 1, 2)), rng.choice((0.0, 0.01))
    offers = [
        [
            whole(rng.uniform(-30, 20), rng.choice((0.0, rng.uniform(0, 30))), fabric)
            for fabric in rng.sample((SHM, PEER), 2)
        ]
        for _ in range(num_sites)
    ]
    decisions = decided(toys.chain(offers, broken), error)

    def charged_us(choices: tuple[int, ...]) -> float:
        total = 0.0
        for index, choice in enumerate(choices):
            if choice == 2:
                total += NODE_US
                continue
            offer = offers[index][choice]
            following = choices[index + 1] if index + 1 < num_sites else 2
            shared = following != 2 and offers[index + 1][following].fabric is offer.fabric and broken != index
            total += NODE_US - offer.saves_us - (offer.shared_us if shared else 0.0)
            baseline = decisions[index].baseline
            assert baseline is not None
            total += math.hypot(error * (NODE_US - offer.saves_us), baseline.error_us)
        return total

    best = min(map(charged_us, itertools.product(range(3), repeat=num_sites)))
    fabrics = [[offer.fabric for offer in row] for row in offers]
    got = tuple(row.index(d.chosen.fabric) if d.rewritten else 2 for row, d in zip(fabrics, decisions, strict=True))
    assert charged_us(got) == pytest.approx(best, rel=1e-12)
    predicted = sum(d.chosen.estimate.us + d.saving_error_us for d in decisions)  # type: ignore[union-attr]
    assert predicted == pytest.approx(best, rel=1e-12), "what is told is what counts"


@pytest.mark.parametrize("machine", ["cpu", "h200x4", "h100x8"])
@pytest.mark.parametrize(
    "form", [forms.pre_norm, forms.mixture, forms.gemma_sandwich, forms.chain], ids=lambda f: f.__name__
)
def test_captured_graphs_are_decided_best(
    form: Callable[..., object], machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every set of allowed candidates, settled by the rule and added up from the sites' own estimates."""
    seen: list[tuple[PricedGraph, Context]] = []

    def spying(priced: PricedGraph, rules: RuleSet, context: Context) -> DecidedGraph:
        seen.append((priced, context))
        return decide(priced, rules, context)

    monkeypatch.setattr(backend, "decide", spying)
    weights = forms.make_weights(torch.bfloat16)
    device = cost_model.load(machine).device
    report = previewed(
        lambda x, r: form(weights, x, r), inputs(torch.bfloat16), machine=machine, device=device, static=True, force=()
    )
    assert report.fallbacks == ()
    assert len(report.decisions) == (3 if form is forms.chain else 1)
    ((priced, context),) = seen
    rule = RULES.named("all_reduce_rms_norm")
    sites = priced.problem.sites

    def charged_us(proposals: Sequence[Proposal | None]) -> float:
        rewritten = [Chosen(s.found, p) for s, p in zip(sites, proposals, strict=True) if p is not None]
        settled = rule.settle(rewritten, context)  # type: ignore[attr-defined]
        total = 0.0
        for site, proposal in zip(sites, proposals, strict=True):
            if proposal is None:
                total += site.baseline.us
                continue
            estimate = proposal.candidate.estimate
            lowered = settled.get(site.found.site.id, proposal).plan  # of another rule, where it settled nothing
            assert (
                isinstance(lowered, FusedReductionPlan) == (proposal.candidate.choice == rule.name)
                and estimate is not None
            )
            saved_us = lowered.gather_us if isinstance(lowered, FusedReductionPlan) and lowered.sum_sharded else 0.0
            without = estimate.plus(Estimate((Term("gather", -saved_us),)))
            total += without.us + error_between_us(without, site.baseline)
        return total

    every = [[site.proposal(choice) for choice in range(site.num_choices)] for site in sites]
    best = min(charged_us(proposals) for proposals in itertools.product(*every))
    told = sum(
        d.chosen.estimate.us_with_margin if d.rewritten else d.baseline.us  # type: ignore[union-attr]
        for d in report.decisions
    )
    assert told == pytest.approx(best, rel=1e-12)


def test_eighty_layers_are_decided_within_a_tenth_of_a_second() -> None:
    """161 sites, no two of one kind, every candidate of every fabric; the best of three runs, in CPU seconds."""
    captured = traced_chain([512 + 8 * index for index in range(161)], tokens=2048, hidden=8192, world=8)
    context = context_of(captured, cost_model.load("h100x8"), world=8)
    seconds: list[tuple[float, float]] = []
    for _ in range(3):
        frame = framed(captured, context)
        start = time.process_time()
        priced = price(captured, frame, frame.problem(), context)
        middle = time.process_time()
        decisions = decide(priced, RULES, context).decisions
        seconds.append((middle - start, time.process_time() - middle))
    assert len(decisions) == 161 and len(set(frame.kinds)) == 161
    assert all(d.rewritten for d in decisions) and sum(len(d.alternatives) for d in decisions) > 161 * 4
    assert min(decided for _, decided in seconds) < 0.1, seconds
    assert min(map(sum, seconds)) < 1.0, seconds
