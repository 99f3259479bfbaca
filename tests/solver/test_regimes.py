"""Regimes: boundaries where a linear scan finds them; of many, those that matter; at most four."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
import torch.fx as fx

from tests.machines import Times, made_up
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.cost_model.machine import Machine
from weaveopt.fabrics import topology
from weaveopt.pipeline.price import Choices, PricedSite, Problem, frame, price
from weaveopt.records.candidate import LEAVE, Algorithm, Candidate, Estimate, Fabric, Term
from weaveopt.records.report import GraphReport, Regime, Report
from weaveopt.records.site import Product, Site, Workload
from weaveopt.reporting import document as report_json
from weaveopt.rewrites import RULES
from weaveopt.rule import Context, Finding, Match, Rule
from weaveopt.solver.regimes import MAX_REGIMES, Served, Stretch, regimes, stretches, structure_of
from weaveopt.solver.selection import EXCLUDED

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


def tangled(rng: random.Random, machine: Machine, world: int) -> tuple[list[Finding], frozenset[str]]:
    """A few sites whose residuals are sums of earlier ones: some read twice or elsewhere, some overlap, some are not
    matched, some have a fixed count; and those whose count varies."""
    graph, sums, found, interiors = fx.Graph(), [], [], []
    hidden = HIDDEN if machine.device == "cpu" else 8192
    for index in range(rng.randint(2, 5)):
        reduced = graph.placeholder(f"x{index}")
        residual = rng.choice(sums[-2:]) if sums and rng.random() < 0.8 else None
        made = graph.call_function(max, (reduced,) if residual is None else (reduced, residual))
        if rng.random() < 0.2:
            graph.call_function(len, (made,))
        interior = {made} | (rng.choice(interiors) if interiors and rng.random() < 0.2 else set())
        interiors.append(interior)
        workload = Workload(
            64, 4096, hidden, "bfloat16", world, product=Product(64, rng.choice((512, 4096)), hidden),
            num_norms=rng.choice((1, 1, 2)), has_residual=residual is not None, sum_may_shard=rng.random() < 0.8,
        )  # fmt: skip
        match = None if rng.random() < 0.1 else Match(frozenset(interior), residual, made)
        found.append(Finding(Site(f"s{index}", RULES[0].name, "0", "", (reduced.name,), workload), match))
        sums.append(made)
    return found, frozenset(f.site.id for f in found if f.match is not None and rng.random() < 0.9)


def workload_at(finding: Finding, tokens: int, varying: frozenset[str]) -> Workload | None:
    workload = finding.site.workload
    if workload is None or workload.product is None or finding.site.id not in varying:
        return workload
    product = replace(workload.product, m=tokens)
    return replace(workload, tokens=tokens, max_tokens=tokens, min_tokens=tokens, product=product)


class Exhaustive(Problem):
    """Looks at every set of choices, with exact sums."""

    def best(self) -> Choices:
        unchanged = tuple(len(site.choices) for site in self.sites)
        must = [index for index, site in enumerate(self.sites) if site.forced and site.choices]

        def key(choices: Choices) -> tuple[int, Fraction, int, Choices]:
            terms = [each.us(choices) for each in self.interactions]
            own = [site.costs_us[choice] for site, choice in zip(self.sites, choices, strict=True)]
            changed = sum(a != b for a, b in zip(choices, unchanged, strict=True))
            left = sum(choices[index] == unchanged[index] for index in must)
            return left, sum(map(Fraction, own + terms), Fraction()), changed, choices

        every = itertools.product(*(range(count + 1) for count in unchanged))
        return min((c for c in every if all(each.us(c) != EXCLUDED for each in self.interactions)), key=key)


@pytest.mark.parametrize("force", [(), (RULES[0].name,)], ids=["free", "forced"])
@pytest.mark.parametrize("seed", range(25))
def test_kinds_priced_once_are_decided_as_every_site_by_itself(seed: int, force: tuple[str, ...]) -> None:
    """Against asking for every candidate of every site at every count, and trying every set of choices."""
    rng = random.Random(seed)
    machine, world = (wavy(rng), 2) if seed % 2 else (cost_model.load(rng.choice(("h200x4", "h100x8"))), 4)
    context = Context(Config(force=force), machine, {"0": topology.fake(world, device=machine.device)})
    findings, varying = tangled(rng, machine, world)
    framed = frame(findings, lambda finding: (finding.site.workload, finding.site.id in varying))

    @cache
    def at(tokens: int) -> Problem:
        return framed.price(lambda finding: workload_at(finding, tokens, varying), RULES, context)

    @cache
    def plainly_at(tokens: int) -> Problem:
        those = [replace(f, site=replace(f.site, workload=workload_at(f, tokens, varying))) for f in findings]
        problem = price(those, RULES, context)
        return Exhaustive(problem.sites, problem.sums, problem.exclusions)

    counts = range(1, 41)
    for tokens in (*counts, 300, 4096):
        quick, plain = at(tokens), plainly_at(tokens)
        choices, wanted = quick.best(), plain.best()
        assert structure_of(quick, choices) == structure_of(plain, wanted)
        assert (quick.unfused_us, quick.us(choices)) == (plain.unfused_us, plain.us(wanted))
        assert (quick.sums, quick.exclusions) == (plain.sums, plain.exclusions)
    grid = (*counts[::8], 300, 700, 4096)
    assert regimes(at, grid) == regimes(plainly_at, grid)


def test_a_kind_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """160 sites of two products: four kinds with the first and the last one, and no estimate of what is rejected."""
    machine = cost_model.load("h200x4")
    context = Context(Config(), machine, {"0": topology.fake(4, device="cuda")})
    asked: list[tuple[Workload | None, int]] = []

    class Asked:
        name = RULES[0].name

        def candidates(self, site: Site, context: Context, usable_only: bool = False) -> Sequence[Candidate]:
            found = RULES[0].candidates(site, context, usable_only)
            asked.append((site.workload, sum(not candidate.allowed for candidate in found)))
            return found

    graph, total, found = fx.Graph(), None, []
    for index in range(160):
        reduced = graph.placeholder(f"x{index}")
        made = graph.call_function(max, (reduced,) if total is None else (reduced, total))
        workload = Workload(
            64, 64, 8192, "bfloat16", 4, product=Product(64, (2048, 7168)[index % 2], 8192),
            has_residual=total is not None, sum_is_used=index < 159, sum_may_shard=index < 159,
        )  # fmt: skip
        found.append(
            Finding(Site(f"s{index}", Asked.name, "0", "", (), workload), Match(frozenset({made}), total, made))
        )
        total = made
    rule: Rule = Asked()  # type: ignore[assignment]
    problem = frame(found, lambda finding: finding.site.workload).price(lambda f: f.site.workload, [rule], context)
    assert len(problem.sites) == 160 and len(problem.sums) == 159
    assert len(asked) == len(set(asked)) == 4 and {rejected for _, rejected in asked} == {0}
    plain = price(found, RULES, context)
    assert structure_of(problem, problem.best()) == structure_of(plain, plain.best())


def test_sums_of_equal_kinds_may_be_covered_by_others() -> None:
    """Two sums, each with two readers: one of the second's covers all that reads it, so that it is enough by itself."""
    context = Context(Config(), cost_model.load("cpu"), {"0": topology.fake(2)})
    workload = Workload(64, 64, HIDDEN, "bfloat16", 2, product=Product(64, 512, HIDDEN), sum_may_shard=True)
    graph, found = fx.Graph(), []
    for number in range(2):
        made = graph.call_function(max, (graph.placeholder(f"x{number}"),))
        readers = [graph.call_function(max, (graph.placeholder(f"r{number}_{each}"), made)) for each in range(2)]
        interiors = [frozenset({made}), frozenset(readers if number else readers[:1]), frozenset(readers[1:])]
        matches = [
            Match(interiors[0], None, made),
            *(Match(interiors[1 + each], made, readers[each]) for each in (0, 1)),
        ]
        found += [
            Finding(Site(f"s{number}_{index}", RULES[0].name, "0", "", (), workload), match)
            for index, match in enumerate(matches)
        ]
    quick = frame(found, lambda finding: None).price(lambda finding: workload, RULES, context)
    plain = price(found, RULES, context)
    assert (quick.sums, quick.exclusions) == (plain.sums, plain.exclusions)
    assert [len(quick.sums[maker].terms) for maker in (0, 3)] == [1, 2]
