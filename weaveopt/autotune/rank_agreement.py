"""Exchange between ranks that time candidates, through the stores of their groups.

No collective of torch runs for it but the small all-reduce that lines GPUs up, so a rank that does not come is an
error on all others, within the time that ranks wait for one that is still compiling.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weaveopt.fabrics import topology
from weaveopt.measure.clock import Sample

WHAT = "candidates to time (option verify)"
SPREADS = 2
"""Whoever shares a group with a rank hears of it at once, and who shares one with those in the second round."""


@dataclass(frozen=True)
class RankAgreement:
    """The ranks of all groups that a graph communicates in; without any, this rank alone."""

    groups: tuple[str, ...]
    """Sorted, so no two ranks wait for each other."""
    timeout_s: float

    def most(self, values: Sequence[float]) -> list[float]:
        """Maximum of each value over all ranks. Raises `AgreementError` if a rank does not take part."""
        found = list(values)
        for _ in range(SPREADS):
            for group in self.groups:
                found = _largest(group, found, self.timeout_s)
        return found

    def alike(self, texts: Mapping[str, str]) -> bool:
        """True if in every group all ranks have the same text for it; the same answer on all ranks."""
        differ = 0.0
        for group in self.groups:
            number = float(int(hashlib.sha256(texts[group].encode()).hexdigest()[:12], 16))
            high, low = _largest(group, [number, -number], self.timeout_s)
            differ = max(differ, float(high != -low))
        return self.most([differ]) == [0.0]


@dataclass(frozen=True)
class SingleRank:
    """A site that communicates in no group: every rank times it for itself."""

    def barrier(self) -> None:
        _finish()

    def slowest(self, samples: Sequence[Sample]) -> list[Sample]:
        return list(samples)

    def align(self, signal: torch.Tensor) -> None:
        pass


@dataclass(frozen=True)
class GroupAgreement:
    """The ranks of one group, in the middle of whatever else they do."""

    group: str
    timeout_s: float

    def barrier(self) -> None:
        _finish()
        _largest(self.group, [], self.timeout_s)

    def slowest(self, samples: Sequence[Sample]) -> list[Sample]:
        values = [value for sample in samples for value in (sample.us, sample.spread)]
        found = _largest(self.group, values, self.timeout_s)
        return [Sample(us, spread) for us, spread in zip(found[::2], found[1::2], strict=True)]

    def align(self, signal: torch.Tensor) -> None:
        dist.all_reduce(signal, group=topology.process_group(self.group))


def _largest(group: str, values: list[float], timeout_s: float) -> list[float]:
    channel = topology.exchange(group, timeout_s)
    answers = channel.gather({"values": json.dumps(values)}, WHAT, timeout_s)
    rows = [json.loads(str(each["values"])) for each in answers]
    assert len({len(row) for row in rows}) == 1, f"ranks of {group!r} sent {[len(row) for row in rows]} values"
    return [max(column) for column in zip(*rows, strict=True)]


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
