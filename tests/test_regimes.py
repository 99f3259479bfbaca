"""Regimes: boundaries where a linear scan finds them; of many, those that matter; at most four."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache

import pytest
import torch.fx as fx

from tests.machines import Times, made_up
from weaveopt import cost_model
from weaveopt.cli import report_json
from weaveopt.config import Config
from weaveopt.cost_model.machine import Machine
from weaveopt.decision import (
    LEAVE,
    Algorithm,
    Candidate,
    Estimate,
    Fabric,
    GraphReport,
    Product,
    Regime,
    Report,
    Site,
    Term,
    Workload,
)
from weaveopt.pricing import PricedSite, Problem, price
from weaveopt.regimes import MAX_REGIMES, Served, Stretch, regimes, stretches, structure_of
from weaveopt.rewrites import RULES
from weaveopt.rule import Context, Finding, Match
from weaveopt.runtime import topology

HIDDEN, LAST = 1024, 300


def problems(machine: Machine, num_sites: int = 3, world: int = 2) -> Callable[[int], Problem]:
    """A chain, priced as if only so many tokens came."""
    context = Context(Config(), machine, {"0": topology.fake(world, device=machine.device)})

    @cache
    def at(tokens: int) -> Problem:
        graph, total, found = fx.Graph(), None, []
        for index in range(num_sites):
            reduced = graph.placeholder(f"x{index}")
            made = graph.call_function(max, (reduced,) if total is None else (reduced, total))
            last = index == num_sites - 1
            workload = Workload(
                tokens, tokens, HIDDEN, "bfloat16", world, product=Product(tokens, 512, HIDDEN),
                has_residual=total is not None, sum_is_used=not last, sum_may_shard=not last, min_tokens=tokens,
            )  # fmt: skip
            site = Site(f"s{index}", RULES[0].name, "0", "", (reduced.name,), workload)
            found.append(Finding(site, Match(frozenset({made}), total, made)))
            total = made
        return price(found, RULES, context)

    return at


def scanned(at: Callable[[int], Problem], last: int) -> list[Stretch]:
    """By looking at every count."""
    structures = [structure_of(at(tokens), at(tokens).best()) for tokens in range(1, last + 1)]
    found, first = [], 1
    for _, run in itertools.groupby(structures):
        length = len(list(run))
        found.append(Stretch(first, first + length - 1))
        first += length
    return found


def grid(machine: Machine, last: int = LAST) -> tuple[int, ...]:
    return cost_model.token_grid(machine, HIDDEN, "bfloat16", 1, last)


def wavy(rng: random.Random) -> Machine:
    """The library and the fused kernel overtake each other several times."""

    def times() -> Times:
        counts = sorted(rng.sample(range(2, LAST), 5))
        return dict(zip([1, *counts], itertools.accumulate(rng.uniform(1, 60) for _ in range(6)), strict=True))

    return made_up(times(), times(), HIDDEN * 2)


@pytest.mark.parametrize("seed", range(20))
def test_boundaries_are_those_of_a_linear_scan(seed: int) -> None:
    machine = wavy(random.Random(seed))
    at = problems(machine)
    found = stretches(lambda tokens: structure_of(at(tokens), at(tokens).best()), grid(machine))
    assert list(found) == scanned(at, LAST)
    served = regimes(at, grid(machine))
    assert len(served) == min(len(found), MAX_REGIMES)
    assert all(s.last > s.first for s in regimes(at, grid(machine), narrowest=2))
    assert served[0].first == 1 and served[-1].last == LAST
    assert all(a.last + 1 == b.first for a, b in itertools.pairwise(served))
    assert {s.last for s in served} <= {s.last for s in found}
    assert all(s.first <= s.decided_as.first and s.decided_as.last <= s.last for s in served)


@pytest.mark.parametrize(("name", "world"), [("h200x4", 4), ("h100x8", 8), ("cpu", 2)])
def test_boundaries_on_shipped_profiles(name: str, world: int) -> None:
    machine = cost_model.load(name)
    at = problems(machine, world=world)
    assert list(stretches(lambda t: structure_of(at(t), at(t).best()), grid(machine, 300))) == scanned(at, 300)


def one_site(saved_us: Callable[[int], float]) -> Callable[[int], Problem]:
    """100 us as it is, and so much less rewritten."""

    def at(tokens: int) -> Problem:
        leave = Candidate(LEAVE, Fabric.LIBRARY, Algorithm.LIBRARY, estimate=Estimate((Term("all", 100.0),)))
        estimate = Estimate((Term("all", 100.0 - saved_us(tokens)),))
        rewrite = Candidate("rule", Fabric.SHM, Algorithm.TWO_SHOT, estimate=estimate)
        site = PricedSite(Site("s", "rule", "0", "", ("s",), None), leave, (rewrite,), (0,))
        return Problem((site,), {}, ())

    return at


def test_what_matters_least_goes_together() -> None:
    """Seven stretches of ten counts, two of them hardly worth a change."""
    saved = (50.0, -1.0, 50.0, -50.0, 1.0, -50.0, 50.0)
    at = one_site(lambda tokens: saved[(tokens - 1) // 10])
    assert len(stretches(lambda tokens: at(tokens).best(), range(1, 71))) == 7
    assert regimes(at, range(1, 71)) == (
        Served(1, 30, Stretch(1, 10)),
        Served(31, 60, Stretch(31, 40)),
        Served(61, 70, Stretch(61, 70)),
    )
    everything = regimes(at, range(1, 71), max_regimes=1)
    assert everything == (Served(1, 70, Stretch(1, 10)),)
    assert len(regimes(at, range(1, 71), max_regimes=7)) == 7
    assert regimes(at, range(1, 71), max_regimes=7, narrowest=31) == (Served(1, 70, Stretch(1, 10)),)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cut_loses_less(seed: int) -> None:
    """Against every way to cut up to eight stretches into at most four runs, each decided as one of its stretches."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(5, 8))]
    saved = [sign * rng.choice((1.0, rng.uniform(0, 60))) for sign, _ in zip(itertools.cycle((1, -1)), sizes)]
    saving = [us for us, size in zip(saved, sizes, strict=True) for _ in range(size)]
    at = one_site(lambda tokens: saving[tokens - 1])
    served = regimes(at, range(1, len(saving) + 1))
    assert 1 <= len(served) <= MAX_REGIMES

    def lost(rewritten: bool, tokens: int) -> float:
        saved_us = saving[tokens - 1]
        return max(-saved_us if rewritten else saved_us, 0.0) / (200.0 - max(saved_us, 0.0))

    def run(first: int, last: int) -> float:
        kinds = {saving[tokens - 1] > 0 for tokens in range(first, last + 1)}
        return min(sum(lost(kind, tokens) for tokens in range(first, last + 1)) for kind in kinds)

    ends = list(itertools.accumulate(sizes))
    cuts = [cut for num in range(MAX_REGIMES) for cut in itertools.combinations(ends[:-1], num)]
    best = min(sum(run(a + 1, b) for a, b in itertools.pairwise((0, *cut, ends[-1]))) for cut in cuts)
    got = sum(lost(saving[s.decided_as.first - 1] > 0, t) for s in served for t in range(s.first, s.last + 1))
    assert got == pytest.approx(best)


@pytest.mark.parametrize("regime", [None, Regime(2, 48), Regime(49, None)])
def test_the_regime_is_told_in_json(regime: Regime | None) -> None:
    report = Report("m", 2, None, (GraphReport("graph0", "prefill", 64, regime=regime),))
    assert report_json.from_json(report_json.to_json(report)) == report
