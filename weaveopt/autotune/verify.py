"""Verify: between price and decide, the ranks themselves time the best candidates of each kind of site.

All ranks take the same steps: which sites, which candidates, if one could be made, how long it took (the longest of all
ranks) and if time is left are exchanged through the stores of the graph's groups before any rank acts on them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weaveopt.autotune.candidate_run import CandidateRun, Make, candidate_run_of, running
from weaveopt.autotune.rank_agreement import GroupAgreement, RankAgreement, SingleRank
from weaveopt.autotune.site_timing import Label, SiteTiming, TimingResult, recall, remember, settled, site_timings_of
from weaveopt.cost_model import timing
from weaveopt.errors import AgreementError, PeerTimeoutError
from weaveopt.measure.clock import Clock, CpuClock, CudaClock, Meeting
from weaveopt.pipeline.bind import reserve
from weaveopt.pipeline.price import PricedGraph
from weaveopt.records.candidate import Measured, Rejection
from weaveopt.rule import Context, RuleSet
from weaveopt.wording import counted

_RAISED = (AgreementError, PeerTimeoutError)
"""Errors that end a run everywhere else and so here too."""


@dataclass(frozen=True)
class Verified:
    """A priced graph with measured times, and what there is to say of them, a line each."""

    priced: PricedGraph
    lines: tuple[str, ...]


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
        self._began = time.perf_counter()
        self._is_over = False
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
        if self._is_over or self._has_ended(0.0):
            self.said = self._ended
            return None
        positions: tuple[int | None, ...] = (None, *site_timing.positions)
        labels = [*site_timing.runners]
        failures: dict[Label, Rejection] = {}
        runs: dict[Label, CandidateRun] = {}
        for label, position in zip(labels, positions, strict=True):
            run = self._made(site_timing, position, label, failures)
            if run is not None:
                runs[label] = run
            elif position is None:
                break  # there is nothing to compare with
        expected_us = {} if labels[0] in failures else self._tried(runs, failures)
        if labels[0] in failures:
            self.said = f"not timed: {failures[labels[0]].message}"
            return None
        clock = _clock(site_timing, self._context)
        if self._has_ended(sum(clock.takes_s(us) for us in expected_us.values())):
            self.said = self._ended
            return None
        outcomes: dict[Label, TimingResult] = {**failures, **self._times(site_timing, runs, expected_us, clock)}
        remember(site_timing, outcomes)
        self.said = f"{counted(len(expected_us), 'candidate')} timed at {counted(site_timing.tokens, 'token')}"
        if failures:
            self.said += f", {len(failures)} could not be run"
        return outcomes

    def _made(
        self, site_timing: SiteTiming, position: int | None, label: Label, failures: dict[Label, Rejection]
    ) -> CandidateRun | None:
        """Build a run; None, with a reason, if some rank cannot build it or has no memory for it."""
        run, why = None, ""
        try:
            run = candidate_run_of(self._priced, site_timing.index, position, self._rules, self._context, self._make)
        except _RAISED:
            raise
        except Exception as error:  # whatever went wrong, the others must not wait for it
            why = _words(error)
        if self._failed(label, why, failures):
            return None
        assert run is not None
        # Ranks of a group reserve together, or have all failed.
        whys = [reserve(plan, self._context) for plan in run.plans]
        return None if self._failed(label, "; ".join(filter(None, whys)), failures) else run

    def _tried(self, runs: dict[Label, CandidateRun], failures: dict[Label, Rejection]) -> dict[Label, float]:
        """Each called twice: microseconds of the second call, of all ranks the longest. What fails is dropped."""
        found: dict[Label, float] = {}
        for label, run in runs.items():
            why, us = "", 0.0
            try:
                with running():
                    for _ in range(2):
                        _finish()
                        start = time.perf_counter()
                        run.launch(0)
                        _finish()
                        us = (time.perf_counter() - start) * 1e6
            except _RAISED:
                raise
            except Exception as error:
                why = _words(error)
            if not self._failed(label, why, failures):
                [found[label]] = self._agreement.most([us])
        return found

    def _times(
        self, site_timing: SiteTiming, runs: dict[Label, CandidateRun], expected_us: dict[Label, float], clock: Clock
    ) -> dict[Label, Measured]:
        with running():
            launches = [runs[label].launch for label in expected_us]
            samples = clock.in_turns(launches, [*expected_us.values()], self._group_agreement(site_timing))
        values = [value for sample in samples for value in (sample.us, sample.spread)]
        answers = self._agreement.most(values)  # ranks of other groups have the same graph
        pairs = zip(expected_us, answers[::2], answers[1::2], strict=True)
        return {label: Measured(round(us, 3), round(timing.error_of(spread), 4)) for label, us, spread in pairs}

    def _group_agreement(self, site_timing: SiteTiming) -> Meeting:
        for group in site_timing.site.found.site.groups:
            if self._context.topologies[group].world > 1:
                return GroupAgreement(group, self._context.config.compile_timeout_s)
        return SingleRank()

    def _failed(self, label: Label, why: str, failures: dict[Label, Rejection]) -> bool:
        """Record a failure; True if any rank has one."""
        [failed] = self._agreement.most([float(bool(why))])
        if failed:
            found = why or "another rank could not"
            failures[label] = Rejection("not_run", f"it could not be run by itself on the ranks: {found}")
        return bool(failed)

    def _has_ended(self, more_s: float) -> bool:
        """True if the time budget does not allow `more_s` more; the same on all ranks."""
        [spent_s] = self._agreement.most([time.perf_counter() - self._began + more_s])
        self._is_over = spent_s > self._context.config.verify_budget_s
        return self._is_over

    @property
    def _ended(self) -> str:
        budget_s = self._context.config.verify_budget_s
        return f"not timed: the budget of {budget_s:g} s (option verify_budget_s) is spent"


def _clock(site_timing: SiteTiming, context: Context) -> Clock:
    groups = site_timing.site.found.site.groups
    return _clock_of(context.topologies[groups[0]].device if groups else context.machine.device)


@functools.cache
def _clock_of(device: str) -> Clock:
    return CudaClock() if device == "cuda" else CpuClock()


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _words(error: Exception) -> str:
    lines: Sequence[str] = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
