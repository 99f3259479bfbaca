"""Verify: between price and decide, the ranks themselves time the best candidates of each kind of site.

All ranks take the same steps: which sites, which candidates, if one could be made, how long it took (the longest of all
ranks) and if time is left are exchanged through the stores of the graph's groups before any rank acts on them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weaveopt.autotune.candidate_run import CandidateRun, Make, candidate_run_of
from weaveopt.autotune.rank_agreement import GroupAgreement, RankAgreement, SingleRank
from weaveopt.autotune.site_timing import Label, SiteTiming, TimingResult, recall, remember, settled, site_timings_of
from weaveopt.autotune.timed_runs import RAISED, TimedRuns, clock_of
from weaveopt.autotune.variant_timing import TimedVariants, time_variants
from weaveopt.measure.clock import Clock, Meeting
from weaveopt.pipeline.bind import reserve
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.pipeline.price import PricedGraph
from weaveopt.rule import Context, RuleSet
from weaveopt.wording import counted, named


@dataclass(frozen=True)
class Verified:
    """A priced graph with measured times, and what there is to say of them, a line each."""

    priced: PricedGraph
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """The option `verify`: sites and whole graphs that the ranks time."""

    rules: RuleSet
    make: Make

    def sites(self, priced: PricedGraph, context: Context) -> Verified:
        """Candidates of the sites of a graph: see `verify`."""
        return verify(priced, self.rules, context, self.make)

    def graphs(self, decided: Sequence[DecidedGraph], context: Context) -> TimedVariants:
        """The captured graph and its variants: see `time_variants`."""
        return time_variants(decided, self.rules, context, self.make)


def verify(priced: PricedGraph, rules: RuleSet, context: Context, make: Make) -> Verified:
    """Times at most a handful of candidates of each kind of site, unfused among them; what is known is not timed again.

    Sites beyond the option `verify_budget_s`, and those that cannot run by themselves, keep their predicted times.
    Raises `AgreementError` and `PeerTimeoutError` as every group_agreement and every operation does.
    """
    topologies = {name: context.topologies[name] for name in priced.captured.groups}
    if any(known.fake for known in topologies.values()):
        return Verified(priced, ("nothing was timed: the process group has no peers",))
    groups = tuple(sorted(name for name, known in topologies.items() if known.world > 1))
    agreement = RankAgreement(groups, context.config.compile_timeout_s)
    site_timings = site_timings_of(priced, context)
    if not agreement.alike({group: "\n".join(each.words(group) for each in site_timings) for group in groups}):
        return Verified(priced, ("nothing was timed: the ranks have other candidates",))  # bind says which
    autotuning = _Autotuning(priced, rules, context, make, agreement)
    sites = list(priced.problem.sites)
    lines = []
    for site_timing in site_timings:
        outcomes = autotuning.outcomes(site_timing)
        site = None if outcomes is None else settled(site_timing, outcomes)
        lines.append(f"{site_timing.site.found.site.id}: {autotuning.said}")
        if site is None:
            continue
        for index, kind in enumerate(priced.frame.kinds):
            # Candidates of sites of one kind are the same objects, unless a site's own nodes allow others.
            own = [each.candidate for each in priced.problem.sites[index].proposals]
            if kind == site_timing.index and own == [each.candidate for each in site_timing.site.proposals]:
                pairs = zip(sites[index].proposals, site.proposals, strict=True)
                proposals = tuple(replace(each, candidate=timed.candidate) for each, timed in pairs)
                sites[index] = replace(site, found=sites[index].found, proposals=proposals)
    problem = priced.frame.problem_of(sites)
    return Verified(replace(priced, problem=problem), tuple(lines))


class _Autotuning:
    """Times one kind of site after the other, and describes the result of the last one."""

    def __init__(
        self, priced: PricedGraph, rules: RuleSet, context: Context, make: Make, agreement: RankAgreement
    ) -> None:
        self._priced, self._rules, self._context, self._make = priced, rules, context, make
        self._agreement = agreement
        self._began, self._is_over = time.perf_counter(), False
        self.said = ""

    def outcomes(self, site_timing: SiteTiming) -> dict[Label, TimingResult] | None:
        """Time every candidate of a site; None if the prediction has to decide."""
        found = recall(site_timing)
        tokens = 0 if found is None else found[0]
        # Ranks may remember differently, those of another group's earlier graphs say.
        most, least = self._agreement.most([float(tokens), -float(tokens)])
        if found is not None and most == -least:
            times = "timed before" if tokens == site_timing.tokens else f"timed before, at {counted(tokens, 'token')}"
            self.said = f"{counted(len(found[1]), 'candidate')}, {times}"
            return found[1]
        timed = TimedRuns[Label](self._agreement, self._context.config.verify_budget_s, began=self._began)
        if self._is_over or timed.has_ended(0.0):
            self._is_over, self.said = True, timed.ended
            return None
        positions: tuple[int | None, ...] = (None, *site_timing.positions)
        labels = [*site_timing.runners]
        runs: dict[Label, CandidateRun] = {}
        for label, position in zip(labels, positions, strict=True):
            run = self._made(site_timing, position, label, timed)
            if run is not None:
                runs[label] = run
            elif position is None:
                break  # there is nothing to compare with
        failures = timed.failures
        expected_us = {} if labels[0] in failures else timed.tried(runs)
        if labels[0] in failures:
            self.said = f"not timed: {failures[labels[0]].message}"
            return None
        clock = _clock(site_timing, self._context)
        if timed.has_ended(sum(clock.takes_s(us) for us in expected_us.values())):
            self._is_over, self.said = True, timed.ended
            return None
        measured = timed.times(runs, expected_us, clock, self._group_agreement(site_timing))
        outcomes: dict[Label, TimingResult] = {**failures, **measured}
        remember(site_timing, outcomes)
        self.said = f"{counted(len(expected_us), 'candidate')} timed at {counted(site_timing.tokens, 'token')}"
        if failures:
            self.said += f", {len(failures)} could not be run"
        return outcomes

    def _made(
        self, site_timing: SiteTiming, position: int | None, label: Label, timed: TimedRuns[Label]
    ) -> CandidateRun | None:
        """Build a run; None, with a reason, if some rank cannot build it or has no memory for it."""
        run, why = None, ""
        try:
            run = candidate_run_of(self._priced, site_timing.index, position, self._rules, self._context, self._make)
        except RAISED:
            raise
        except Exception as error:  # whatever went wrong, the others must not wait for it
            why = named(error)
        if timed.failed(label, why):
            return None
        assert run is not None
        # Ranks of a group reserve together, or have all failed.
        whys = [reserve(plan, self._context) for plan in run.plans]
        return None if timed.failed(label, "; ".join(filter(None, whys))) else run

    def _group_agreement(self, site_timing: SiteTiming) -> Meeting:
        for group in site_timing.site.found.site.groups:
            if self._context.topologies[group].world > 1:
                return GroupAgreement(group, self._context.config.compile_timeout_s)
        return SingleRank()


def _clock(site_timing: SiteTiming, context: Context) -> Clock:
    groups = site_timing.site.found.site.groups
    return clock_of(context.topologies[groups[0]].device if groups else context.machine.device)
