"""Compare values that are taken for replicated: that all ranks hold the same where a rewrite takes that for granted.

A residual, a norm weight or a bias is the same on all ranks of a tensor-parallel group, but nothing in a graph
says so. Where ranks divide the tokens, a residual that differs would give wrong rows; so the first call of every
site compares a few numbers of each value, through the store and with a timeout. All ranks get the same answer.

The answer holds for later calls only if the values of this one could have shown a difference. Values that are not
finite or not there (no tokens), and a residual of zeros, say nothing of the next ones: the next call compares again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weaveopt.fabrics import topology

Named = tuple[str, torch.Tensor | None]
RESIDUAL = "residual"
"""The name of what differs from call to call; all other values are parameters, which may well be zeros for good."""
_TOLERANCE = 0.02
"""Tolerance relative to the value's norm: far above rounding differences between processors, far below another
value."""
_SAMPLES = 1 << 20
"""Elements that are looked at, evenly spread: a whole residual in float64 could take gigabytes of a GPU."""


@dataclass(frozen=True)
class Comparison:
    """Result of comparing the ranks' values in one call; the same on all of them."""

    difference: str | None
    """The site, the value and two ranks, where a value differs beyond rounding."""
    proven: bool
    """True if the same holds for later calls."""


@dataclass(frozen=True)
class _Marks:
    """A few numbers of one value, of a part of a large one."""

    finite: list[float]
    """Norm and two projections of the finite elements, which differ by about the norm for two unrelated values."""
    others: list[float]
    """Two sums over which elements are NaN and infinities: exact, zeros if there are none."""
    is_evidence: bool
    """True if the value could have shown a difference that later calls have."""


def compare(group: str, where: str, values: Sequence[Named], timeout_s: float) -> Comparison:
    """Compares `values` among the ranks of `group`, which all call it.

    Raises `AgreementError` if a rank does not come within `timeout_s`.
    """
    present = [(name, value) for name, value in values if value is not None]
    if not present:
        return Comparison(None, proven=True)
    channel = topology.exchange(group, timeout_s)
    marks = {name: vars(_marks(name, value)) for name, value in present}
    answers = channel.gather({"marks": json.dumps(marks)}, f"the first call of {where}", timeout_s)
    everyone = [{k: _Marks(**v) for k, v in json.loads(str(record["marks"])).items()} for record in answers]
    proven = all(mark.is_evidence for each in everyone for mark in each.values())
    ranks = channel.group.ranks
    for name, first in everyone[0].items():
        for rank, other in zip(ranks[1:], everyone[1:], strict=True):
            if name not in other or not _close(first, other[name]):
                channel.settle()
                difference = (
                    f"{where}: the {name} on rank {ranks[0]} is not the one on rank {rank}. The rewrite needs it "
                    f"replicated on all ranks of group {group!r}, as under tensor parallelism"
                )
                return Comparison(difference, proven)
    return Comparison(None, proven)


def _marks(name: str, value: torch.Tensor) -> _Marks:
    x = value.detach().flatten()
    x = x[:: max(1, x.numel() // _SAMPLES)].double()
    position = torch.arange(x.numel(), dtype=torch.float64, device=x.device)
    kind = (x.isnan() + 2 * x.isposinf() + 3 * x.isneginf()).double()
    x = x.masked_fill(kind != 0, 0.0)
    projections = [torch.dot(x, torch.sin(position * factor + 1.0)).item() for factor in (1.7, 0.37)]
    others = [kind.sum().item(), torch.dot(kind, position + 1.0).item()]
    norm = x.norm().item()
    is_evidence = x.numel() > 0 and others[0] == 0 and (norm > 0 or name != RESIDUAL)
    return _Marks([norm, *projections], others, is_evidence)


def _close(a: _Marks, b: _Marks) -> bool:
    most = _TOLERANCE * max(abs(a.finite[0]), abs(b.finite[0]))
    return a.others == b.others and all(abs(x - y) <= most for x, y in zip(a.finite, b.finite, strict=True))
