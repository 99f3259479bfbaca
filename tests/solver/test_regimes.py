"""Regimes: boundaries where a linear scan finds them; of many, those that matter; at most four."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import pytest

from tests.emulation.machines import Times, made_up
from tests.graphs import toys
from tests.graphs.reductions import Reductions, total_of
from tests.graphs.traces import context_of, framed, traced_chain
from tests.ranks.simulated import TEST_ALL
from weaveopt import cost_model
from weaveopt.cost_model.machine import Machine
from weaveopt.pipeline.costs import Choices
from weaveopt.pipeline.problem import Problem, ProblemTemplate
from weaveopt.records.report import GraphReport, Regime, Report
from weaveopt.records.site import TokenCounts
from weaveopt.reporting import document as report_json
from weaveopt.reporting.document_reader import from_json
from weaveopt.rewrites import RULES
from weaveopt.rule import Context, FoundSite, Proposal, RuleSet
from weaveopt.solver.regimes import MAX_REGIMES, DecidedRange, Served, regimes, stretches, structure_of
from weaveopt.solver.selection import EXCLUDED

HIDDEN, LAST = 1024, 300
RULE = RULES.named("all_reduce_rms_norm")


def problems(machine: Machine, num_sites: int = 3, world: int = 2) -> Callable[[int], Problem]:
    """A chain, priced as if only so many tokens came."""
    captured = traced_chain([512] * num_sites, 64, HIDDEN, world)
    frame = framed(captured, context_of(captured, machine, world))

    @cache
    def at(tokens: int) -> Problem:
        return frame.problem(dict.fromkeys(range(num_sites), TokenCounts(tokens, tokens, tokens)), usable_only=True)

    return at


def scanned(at: Callable[[int], Problem], last: int) -> list[DecidedRange]:
    """Stretches found by a scan of every token count."""
    structures = [structure_of(at(tokens), at(tokens).best()) for tokens in range(1, last + 1)]
    found, first = [], 1
    for _, run in itertools.groupby(structures):
        length = len(list(run))
        found.append(DecidedRange(first, first + length - 1))
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


@pytest.mark.parametrize("seed", range(8 if TEST_ALL else 3))
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
    return lambda tokens: toys.lone_problem(100.0, saved_us(tokens))


def test_what_matters_least_goes_together() -> None:
    """Seven stretches of ten counts, two of them hardly worth a change."""
    saved = (50.0, -1.0, 50.0, -50.0, 1.0, -50.0, 50.0)
    at = one_site(lambda tokens: saved[(tokens - 1) // 10])
    assert len(stretches(lambda tokens: at(tokens).best(), range(1, 71))) == 7
    assert regimes(at, range(1, 71)) == (
        Served(1, 30, DecidedRange(1, 10)),
        Served(31, 60, DecidedRange(31, 40)),
        Served(61, 70, DecidedRange(61, 70)),
    )
    everything = regimes(at, range(1, 71), max_regimes=1)
    assert everything == (Served(1, 70, DecidedRange(1, 10)),)
    assert len(regimes(at, range(1, 71), max_regimes=7)) == 7
    assert regimes(at, range(1, 71), max_regimes=7, narrowest=31) == (Served(1, 70, DecidedRange(1, 10)),)


@pytest.mark.parametrize("seed", range(12))
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
    assert from_json(report_json.to_json(report)) == report


def tangled(rng: random.Random, machine: Machine, world: int) -> tuple[Reductions, list[int]]:
    """A few sites whose residuals are sums of earlier ones: some read twice or elsewhere, some overlap, some are not
    matched, some have a fixed count; and the positions of those whose count varies."""
    made = Reductions(64, HIDDEN if machine.device == "cpu" else 8192, world)
    sums, varying = [], []
    for index in range(rng.randint(2, 5)):
        found = made.site(
            rng.choice(sums[-2:]) if sums and rng.random() < 0.8 else None,
            rng.choice((512, 4096)),
            num_norms=rng.choice((1, 1, 2)),
            sum_read_by_reductions=rng.random() < 0.8,
            tokens=TokenCounts(64, most=4096),
            sharing=rng.choice(made.sites).nodes if made.sites and rng.random() < 0.2 else (),
            refused=rng.random() < 0.1,
        )
        if rng.random() < 0.2:
            made.call(len, total_of(found))
        sums.append(total_of(found))
        if not made.sites[-1].site.rejections and rng.random() < 0.9:
            varying.append(index)
    return made, varying


class Exhaustive(Problem):
    """Looks at every set of choices, with exact sums."""

    def best(self) -> Choices:
        unchanged = tuple(len(site.choices) for site in self.sites)
        # Choices of rules that are forced, at the sites that have one.
        must = {}
        for index, site in enumerate(self.sites):
            names = [site.proposals[at].candidate.choice for at in site.choices]
            if any(name in site.forced for name in names):
                must[index] = {choice for choice, name in enumerate(names) if name in site.forced}
        terms = [*(each.with_margin(self.sites) for each in self.interactions), *self.exclusions]

        def key(choices: Choices) -> tuple[int, Fraction, int, Choices]:
            together = [each.us(choices) for each in terms]
            own = [row[choice] for row, choice in zip(self.costs_us, choices, strict=True)]
            changed = sum(a != b for a, b in zip(choices, unchanged, strict=True))
            left = sum(choices[index] not in wanted for index, wanted in must.items())
            return left, sum(map(Fraction, own + together), Fraction()), changed, choices

        every = itertools.product(*(range(count + 1) for count in unchanged))
        return min((c for c in every if all(each.us(c) != EXCLUDED for each in terms)), key=key)


FREE, FORCED = (), (RULE.name,)
CASES = list(itertools.product(range(8), (FREE, FORCED)))
"""Seeds, and the rules that are forced."""
QUICK = [(0, FREE), (1, FORCED), (2, FREE), (3, FREE), (3, FORCED), (5, FREE), (6, FORCED)]
"""Those of them that take little; between them, they come by all that any of them comes by."""


def _named(value: object) -> str:
    return str(value) if isinstance(value, int) else "forced" if value else "free"


@pytest.mark.parametrize(("seed", "force"), CASES if TEST_ALL else QUICK, ids=_named)
def test_kinds_priced_once_are_decided_as_every_site_by_itself(seed: int, force: tuple[str, ...]) -> None:
    """Against asking for every candidate of every site at a count, and trying every set of choices."""
    rng = random.Random(seed)
    machine, world = (wavy(rng), 2) if seed % 2 else (cost_model.load(rng.choice(("h200x4", "h100x8"))), 4)
    made, varying = tangled(rng, machine, world)
    context = context_of(made.captured(), machine, world, force=force)
    frame, apart = (ProblemTemplate(made.captured(), made.sites, RULES, context) for _ in range(2))
    apart.kinds = tuple(range(len(made.sites)))
    # Sites are of one kind only where their counts vary alike.
    steady = [index for index in range(len(made.sites)) if index not in varying]
    frame.kinds = tuple(index if index in steady or kind in steady else kind for index, kind in enumerate(frame.kinds))

    def counts_at(tokens: int) -> dict[int, TokenCounts]:
        return dict.fromkeys(varying, TokenCounts(tokens, tokens, tokens))

    @cache
    def at(tokens: int) -> Problem:
        return frame.problem(counts_at(tokens), usable_only=True)

    @cache
    def plainly_at(tokens: int) -> Problem:
        problem = apart.problem(counts_at(tokens))
        return Exhaustive(problem.sites, problem.interactions, problem.exclusions)

    for tokens in (*range(1, 11), *range(13, 41, 4), 300, 4096):
        quick, plain = at(tokens), plainly_at(tokens)
        choices, wanted = quick.best(), plain.best()
        assert structure_of(quick, choices) == structure_of(plain, wanted)
        assert (quick.baseline_us, quick.us(choices)) == (plain.baseline_us, plain.us(wanted))
        assert (quick.interactions, quick.exclusions) == (plain.interactions, plain.exclusions)
    grid = (*range(1, 41, 8), 300, 700, 4096)
    assert regimes(at, grid) == regimes(plainly_at, grid)


def test_a_kind_is_asked_for_once() -> None:
    """160 sites of two GEMMs: three kinds with the last one, and no estimate of what is rejected."""
    machine = cost_model.load("h200x4")
    asked: list[tuple[object, int]] = []

    class Asked:
        name, kinds = RULE.name, RULE.kinds
        interactions = RULE.interactions  # type: ignore[attr-defined]

        def propose(
            self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
        ) -> tuple[Proposal, ...]:
            proposed = tuple(RULE.propose(found, tokens, context, usable_only))
            asked.append((found.facts, sum(not each.candidate.allowed for each in proposed)))
            return proposed

    captured = traced_chain([(2048, 7168)[index % 2] for index in range(160)], 64, 8192, 4)
    context = context_of(captured, machine, 4)
    found = framed(captured, context).sites
    rules: RuleSet = toys.rules(Asked())  # type: ignore[arg-type]
    frame = ProblemTemplate(captured, found, rules, context)
    problem = frame.problem(usable_only=True)
    assert len(problem.sites) == 160 and len(problem.interactions) == 159
    assert len(asked) == len(set(asked)) == 3 and {rejected for _, rejected in asked} == {0}
    plain = frame.problem()
    assert structure_of(problem, problem.best()) == structure_of(plain, plain.best())


def test_sums_of_equal_kinds_may_be_covered_by_others() -> None:
    """Two sums, each with two readers: one of the second's covers all that reads it, so that it is enough by itself."""
    made = Reductions(hidden=HIDDEN)
    for covers_both in (False, True):
        total = total_of(made.site())
        reader = made.site(total)
        made.site(total, sharing=[total_of(reader)] if covers_both else ())
    captured = made.captured()
    context = context_of(captured, cost_model.load("cpu"))
    frame, apart = (ProblemTemplate(captured, made.sites, toys.rules(RULE), context) for _ in range(2))
    apart.kinds = tuple(range(len(made.sites)))
    quick, plain = frame.problem(usable_only=True), apart.problem()
    assert (quick.interactions, quick.exclusions) == (plain.interactions, plain.exclusions)
    assert [each.sites for each in quick.interactions] == [(0, 1, 2), (3, 4, 5)]
    assert [len(each.terms) for each in quick.interactions] == [1, 2]
