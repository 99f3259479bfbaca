"""Step 3: choose a candidate for every site: the set of non-overlapping ones with the largest predicted saving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weaveopt import cost_model
from weaveopt.decision import LEAVE, Algorithm, Candidate, Decision, Estimate, Fabric, Rejection, Site
from weaveopt.rule import Context, Finding, Rule


def decide(findings: Sequence[Finding], rules: Sequence[Rule], context: Context) -> tuple[Decision, ...]:
    """One decision for every finding, in order. Uses only what is identical on all ranks of a group."""
    by_name = {rule.name: rule for rule in rules}
    priced = [_price(finding, by_name[finding.site.rule], context) for finding in findings]
    winners = _best_set(priced, findings)
    return tuple(_decision(row, index in winners) for index, row in enumerate(priced))


@dataclass(frozen=True)
class _Priced:
    """A site with all its candidates; `best` is the allowed one that saves most, if any saves enough."""

    site: Site
    leave: Candidate
    candidates: tuple[Candidate, ...]
    best: int | None

    @property
    def saving_us(self) -> float:
        if self.best is None:
            return 0.0
        return _saving_us(self.leave.estimate, self.candidates[self.best].estimate)


def _saving_us(unfused: Estimate | None, fused: Estimate | None) -> float:
    return 0.0 if unfused is None or fused is None else unfused.us - fused.us


def _price(finding: Finding, rule: Rule, context: Context) -> _Priced:
    site = finding.site
    unfused = None if site.workload is None else cost_model.estimate_unfused(context.machine, site.workload)
    leave = Candidate(LEAVE, Fabric.LIBRARY, Algorithm.LIBRARY, estimate=unfused)
    if finding.match is None:
        refused = Candidate(rule.name, Fabric.LIBRARY, Algorithm.LIBRARY, rejections=site.rejections)
        return _Priced(site, leave, (refused,), None)
    forced = rule.name in context.config.force
    extra: tuple[Rejection, ...] = ()
    if rule.name in context.config.disable:
        extra = (Rejection("disabled", "the rule is switched off by an option", (("rule", rule.name),)),)
    candidates = tuple(
        replace(candidate, rejections=(*candidate.rejections, *extra, *_too_little(candidate, unfused, forced)))
        for candidate in rule.candidates(site, context)
    )
    allowed = [index for index, candidate in enumerate(candidates) if candidate.allowed]
    best = max(allowed, key=lambda i: (_saving_us(unfused, candidates[i].estimate), -i), default=None)
    return _Priced(site, leave, candidates, best)


def _too_little(candidate: Candidate, unfused: Estimate | None, forced: bool) -> tuple[Rejection, ...]:
    """A rewrite needs a predicted saving beyond the model's own error."""
    if forced or unfused is None or candidate.estimate is None:
        return ()
    saving = unfused.us - candidate.estimate.us
    if saving > candidate.estimate.error_us:
        return ()
    values = (
        ("unfused_us", round(unfused.us, 2)),
        ("predicted_us", round(candidate.estimate.us, 2)),
        ("error_us", round(candidate.estimate.error_us, 2)),
    )
    return (Rejection("no_saving", "the predicted saving does not exceed the model's own error", values),)


def _best_set(priced: Sequence[_Priced], findings: Sequence[Finding]) -> frozenset[int]:
    """Indices to rewrite. Sites that share nodes exclude each other; exact within each tangle of sites.

    Ties go to the earlier site, so that all ranks break them alike.
    """
    nodes = [finding.match.interior if finding.match is not None else frozenset() for finding in findings]
    eligible = [index for index, row in enumerate(priced) if row.best is not None]
    owners: dict[object, list[int]] = {}
    for index in eligible:
        for node in nodes[index]:
            owners.setdefault(node, []).append(index)
    rivals: dict[int, set[int]] = {index: set() for index in eligible}
    for sharing in owners.values():
        for index in sharing:
            rivals[index].update(other for other in sharing if other != index)
    chosen: set[int] = set()
    seen: set[int] = set()
    for index in eligible:
        if index not in seen:
            tangle = _reachable(index, rivals)
            seen |= tangle
            chosen |= _heaviest(sorted(tangle), rivals, priced)[1]
    return frozenset(chosen)


def _reachable(start: int, rivals: dict[int, set[int]]) -> set[int]:
    reached = {start}
    pending = [start]
    while pending:
        for other in rivals[pending.pop()] - reached:
            reached.add(other)
            pending.append(other)
    return reached


def _heaviest(
    candidates: list[int], rivals: dict[int, set[int]], priced: Sequence[_Priced]
) -> tuple[float, frozenset[int]]:
    """The heaviest independent set of `candidates` (ascending), by taking or leaving the first."""
    if not candidates:
        return 0.0, frozenset()
    first, rest = candidates[0], candidates[1:]
    with_rest = _heaviest([index for index in rest if index not in rivals[first]], rivals, priced)
    taken = (with_rest[0] + priced[first].saving_us, with_rest[1] | {first})
    if not rivals[first] & set(rest):
        return taken
    left = _heaviest(rest, rivals, priced)
    return taken if taken[0] >= left[0] else left


def _decision(row: _Priced, wins: bool) -> Decision:
    candidates = row.candidates
    if wins and row.best is not None:
        chosen = candidates[row.best]
        others = (row.leave, *(c for c in candidates if c is not chosen))
        return Decision(row.site, chosen, others, row.leave.estimate)
    if row.best is not None:
        overlap = Rejection("overlaps", "another rewrite that saves more uses the same nodes")
        candidates = tuple(replace(c, rejections=(*c.rejections, overlap)) if c.allowed else c for c in candidates)
    return Decision(row.site, row.leave, candidates, row.leave.estimate)
