"""Sites of a graph whose candidates are timed, each kind once, and the times that are known.

A time belongs to what a site computes, its token count, its group and the candidate, and is measured once in a process.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from weaveopt.cost_model import timing
from weaveopt.fabrics.topology import Topology
from weaveopt.inductor.kernels import GraphKernel
from weaveopt.pipeline.price import PricedGraph
from weaveopt.records.candidate import LEAVE, Candidate, Estimate, Fabric, Measured, Rejection, Values
from weaveopt.rule import Context, PricedSite, Proposal

Label = tuple[str, Fabric, str, Values]
"""A candidate, whatever it is predicted to take."""
TimingResult = Measured | Rejection
"""Result of timing a candidate: a time, or the reason why it could not be run."""
_LEFT: Label = (LEAVE, Fabric.LIBRARY, "", ())


@dataclass(frozen=True)
class SiteTiming:
    """A kind of site, and those of its candidates that are timed in comparison with the unmodified site."""

    index: int
    """Position of the first site of the kind."""
    site: PricedSite
    positions: tuple[int, ...]
    """Positions of the proposals that run."""
    key: Hashable
    """Key of the site's computation and group, for any token count."""
    works: Hashable
    """Key of its kernels' work, token count included."""

    @property
    def tokens(self) -> int:
        return self.site.found.site.tokens.hint

    @property
    def runners(self) -> dict[Label, Estimate]:
        """Predictions of everything that is timed; the unmodified site comes first."""
        found = {_LEFT: self.site.baseline}
        for position in self.positions:
            candidate = self.site.proposals[position].candidate
            assert candidate.estimate is not None, f"{candidate.choice} has no price"
            found[_label(candidate)] = candidate.estimate
        return found

    def words(self, group: str) -> str:
        """Text for the comparison between the ranks of a group. Other groups of a mesh have different names."""
        site = self.site.found.site
        known = f"{site.kind} {site.tokens} {len(self.positions)}"
        if site.groups and group not in site.groups:
            return known
        return f"{known} {site.id} {site.facts} {list(self.runners)}"


def site_timings_of(priced: PricedGraph, context: Context) -> tuple[SiteTiming, ...]:
    """Sites to time, one a kind, in graph order. Sites without usable candidates have none, nor have those of several
    groups or of one whose ranks synchronize in calls only: they compile at other times, and none can time a call by
    itself."""
    frame, found = priced.frame, []
    for index in dict.fromkeys(frame.kinds):
        site = priced.problem.sites[index]
        names = {position: site.proposals[position].candidate for position in site.choices}
        forced = [position for position in site.choices if names[position].choice in site.forced]
        candidates = {position: names[position] for position in forced or site.choices}
        groups = site.found.site.groups
        if not candidates or len(groups) > 1 or not {*groups} <= {*priced.captured.groups}:
            continue
        if site.found.facts is None:
            continue
        runners = [_runner(each) for each in candidates.values()]
        if any(runner is None for runner in runners):
            continue  # what has no price cannot be compared
        taken = timing.shortlist([runner for runner in runners if runner is not None])
        labelled = {_label(candidates[at]): at for at in reversed([[*candidates][each] for each in taken])}
        positions = tuple(reversed(labelled.values()))
        timed = site.found.nodes | site.found.consumers if site.replaces_consumers else site.found.nodes
        kernels = frame.kernels(index, timed)
        found.append(SiteTiming(index, site, positions, _key(site, kernels, context), _works(kernels)))
    return tuple(found)


def _runner(candidate: Candidate) -> timing.Runner | None:
    estimate = candidate.estimate
    if estimate is None:
        return None
    return timing.Runner(f"{candidate.choice} {candidate.fabric.value}", estimate.us, estimate.error_us)


def _label(candidate: Candidate) -> Label:
    return (candidate.choice, candidate.fabric, candidate.variant, candidate.parameters)


def _key(site: PricedSite, kernels: tuple[GraphKernel, ...], context: Context) -> Hashable:
    known = site.found.site
    where = tuple(_place(context.topologies[group]) for group in known.groups)
    names = tuple(kernel.name for kernel in kernels)
    return (known.kind, where, site.found.facts, known.description, names, context.machine.device)


def _place(topology: Topology) -> Hashable:
    return (topology.group.ranks, topology.hosts, topology.device)


def _works(kernels: tuple[GraphKernel, ...]) -> Hashable:
    return tuple((kernel.name, kernel.work) for kernel in kernels)


# --- what was timed in this process -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TimedRun:
    outcomes: Mapping[Label, TimingResult]
    predicted: Mapping[Label, float]


_runs: dict[Hashable, dict[tuple[int, Hashable], _TimedRun]] = {}


def forget() -> None:
    """Drop all times that this process measured."""
    _runs.clear()


def remember(site_timing: SiteTiming, outcomes: Mapping[Label, TimingResult]) -> None:
    predicted = {label: estimate.us for label, estimate in site_timing.runners.items()}
    known = _runs.setdefault(site_timing.key, {}).setdefault((site_timing.tokens, site_timing.works), _TimedRun({}, {}))
    run = _TimedRun({**known.outcomes, **outcomes}, {**known.predicted, **predicted})
    _runs[site_timing.key][site_timing.tokens, site_timing.works] = run


def recall(site_timing: SiteTiming) -> tuple[int, dict[Label, TimingResult]] | None:
    """The token count that all runners of a site were timed at, and their times as they are here.

    The same count, else the nearest: then a time is the prediction times what was measured over what was predicted.
    """
    known = _runs.get(site_timing.key, {})
    wanted = site_timing.runners
    run = known.get((site_timing.tokens, site_timing.works))
    if run is not None and wanted.keys() <= run.outcomes.keys():
        return site_timing.tokens, {label: run.outcomes[label] for label in wanted}
    near: dict[int, dict[Label, Label]] = {}
    runs: dict[int, _TimedRun] = {}
    for (tokens, _), each in known.items():
        pairs = None if tokens == site_timing.tokens else _pairs(wanted, each)  # of equal counts, kernels that differ
        if pairs is not None:
            near.setdefault(tokens, pairs)
            runs.setdefault(tokens, each)
    nearest = timing.nearest(tuple(near), site_timing.tokens)
    if nearest is None:
        return None
    found: dict[Label, TimingResult] = {}
    for label, estimate in wanted.items():
        other = near[nearest][label]
        outcome = runs[nearest].outcomes[other]
        if isinstance(outcome, Measured):
            outcome = replace(outcome, us=round(outcome.us * estimate.us / runs[nearest].predicted[other], 3))
        found[label] = outcome
    return nearest, found


def _pairs(wanted: Mapping[Label, Estimate], run: _TimedRun) -> dict[Label, Label] | None:
    """Match each candidate to one that was timed at another token count; None if some candidate has no match.

    Parameters change with the token count: a candidate is known by rule, fabric and kernel, if one alone has them.
    """
    found = {}
    for label in wanted:
        same = [each for each in run.outcomes if each[:3] == label[:3]]
        exact = [each for each in same if each == label] or same
        if len(exact) != 1 or run.predicted[exact[0]] <= 0.0:
            return None
        found[label] = exact[0]
    return found if len(set(found.values())) == len(found) else None


# --- what comes of it -------------------------------------------------------------------------------------------------


def settled(site_timing: SiteTiming, outcomes: Mapping[Label, TimingResult]) -> PricedSite | None:
    """The site with measured times, and without the candidates that were not timed or could not be run.

    None where the site as it is could not be run: there is nothing to compare with.
    """
    left = outcomes[_LEFT]
    if isinstance(left, Rejection):
        return None
    site, proposals = site_timing.site, list(site_timing.site.proposals)
    for position in site.choices:
        proposals[position] = _settled(proposals[position], position in site_timing.positions, outcomes)
    choices = tuple(position for position in site.choices if proposals[position].candidate.allowed)
    baseline = replace(site.baseline, measured=left)
    return replace(site, baseline=baseline, proposals=tuple(proposals), choices=choices)


def _settled(proposal: Proposal, ran: bool, outcomes: Mapping[Label, TimingResult]) -> Proposal:
    candidate = proposal.candidate
    outcome = outcomes[_label(candidate)] if ran else _NOT_TIMED
    if isinstance(outcome, Rejection):
        return replace(proposal, candidate=replace(candidate, rejections=(outcome,)))
    assert candidate.estimate is not None
    return replace(proposal, candidate=replace(candidate, estimate=replace(candidate.estimate, measured=outcome)))


_NOT_TIMED = Rejection("not_timed", "other candidates were predicted faster, and those were timed")
