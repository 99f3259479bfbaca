"""Reasons against rewrites, in short: each once, with the sites where it holds and the range of the deciding values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from weaveopt.records.candidate import LEAVE, Candidate, Rejection, Scalar, Values
from weaveopt.records.report import Decision


@dataclass
class Reason:
    """One rejection, with the sites and candidates that it applies to."""

    choice: str
    """The rule whose candidates it is about; empty where it holds for every rule."""
    code: str
    message: str
    sites: dict[str, int] = field(default_factory=dict)
    """Site id -> places of the model it stands for."""
    candidates: dict[str, list[str]] = field(default_factory=dict)
    """Fabric -> kernels; empty where the reason holds for the site as such."""
    values: list[Values] = field(default_factory=list)

    @property
    def num_places(self) -> int:
        return sum(self.sites.values())

    def where(self, tried: dict[str, list[str]]) -> str:
        """`peer, shm one_shot`: kernels only where not all that were tried on the fabric are meant."""
        if not self.candidates:
            return "every fabric"
        words = []
        for fabric, kernels in self.candidates.items():
            whole = set(kernels) == set(tried.get(fabric, ()))
            words.append(fabric if whole else f"{fabric} {' and '.join(kernels)}")
        return ", ".join(words)

    def sentence(self) -> str:
        names = dict.fromkeys(name for values in self.values for name, _ in values)
        parts = [f"{name}={_range([dict(v)[name] for v in self.values if name in dict(v)])}" for name in names]
        return f"{self.message} ({', '.join(parts)})" if parts else self.message


ABSENT = frozenset(
    (
        "better_fabric",
        "fabric_needs_cpu",
        "fabric_needs_cuda",
        "fabric_needs_hosts",
        "fabric_needs_one_host",
        "fabric_not_on_machine",
    )
)
"""Codes of what a machine or a group lacks, or has a better fabric for: no measurement brings the fabric."""


def absent_fabrics(decisions: Iterable[Decision]) -> dict[str, str]:
    """Fabrics that cannot be there, each with why in one line: none of their candidates could ever be used."""
    why: dict[str, str] = {}
    usable: set[str] = set()
    for decision in decisions:
        for candidate in (decision.chosen, *decision.alternatives):
            fabric = candidate.fabric.value
            reason = next((each for each in candidate.rejections if each.code in ABSENT), None)
            if reason is None:
                usable.add(fabric)
                continue
            values = ", ".join(f"{name}={value}" for name, value in reason.values if value != fabric)
            named = reason.message if reason.message.startswith(fabric) else f"{fabric}: {reason.message}"
            why.setdefault(fabric, f"{named} ({values})" if values else named)
    return {fabric: words for fabric, words in why.items() if fabric not in usable}


def collect(decisions: Sequence[Decision], without: Collection[str] = ()) -> list[Reason]:
    """Collect all reasons of all candidates except those on the fabrics `without`, in order of first appearance."""
    found: dict[tuple[str, str, str], Reason] = {}
    for decision in decisions:
        for choice, candidate, rejection in _rejections(decision):
            if candidate is not None and candidate.fabric.value in without:
                continue
            key = (choice, rejection.code, rejection.message)
            reason = found.setdefault(key, Reason(*key))
            reason.sites[decision.site.id] = decision.site.count
            reason.values.append(rejection.values)
            if candidate is not None:
                kernels = reason.candidates.setdefault(candidate.fabric.value, [])
                if kernel_of(candidate) not in kernels:
                    kernels.append(kernel_of(candidate))
    return list(found.values())


def tried(decisions: Iterable[Decision]) -> dict[str, list[str]]:
    """Fabric -> every kernel that some candidate uses on it, left places aside."""
    fabrics: dict[str, list[str]] = {}
    for decision in decisions:
        for candidate in (decision.chosen, *decision.alternatives):
            kernels = fabrics.setdefault(candidate.fabric.value, [])
            if candidate.choice != LEAVE and kernel_of(candidate) not in kernels:
                kernels.append(kernel_of(candidate))
    return fabrics


def kernel_of(candidate: Candidate) -> str:
    """`two_shot bulk`; the rule's name where it has one kernel only."""
    return candidate.variant or candidate.choice


def collapse(module: str) -> str:
    """`model.layers.17.mlp.down_proj` as `model.layers.*.mlp.down_proj`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", module)


def _rejections(decision: Decision) -> Iterable[tuple[str, Candidate | None, Rejection]]:
    for rejection in decision.site.rejections:
        yield "", None, rejection
    for candidate in (decision.chosen, *decision.alternatives):
        for rejection in candidate.rejections:
            yield candidate.choice, candidate, rejection


def _range(values: Sequence[Scalar]) -> str:
    """One value, `least…greatest` of numbers, or every text that occurs."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values) and len(set(numbers)) > 1:
        return f"{_number(min(numbers))}…{_number(max(numbers))}"
    return "|".join(dict.fromkeys(_number(v) for v in values))


def _number(value: Scalar) -> str:
    return f"{value:,.1f}" if isinstance(value, float) and abs(value) >= 0.1 else str(value)
