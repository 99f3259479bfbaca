"""Check once that values are replicated: that all ranks hold the same where a rewrite takes that for granted.

A residual, a norm weight or a bias is the same on all ranks of a tensor-parallel group, but nothing in a graph
says so. Where ranks divide the tokens, a residual that differs would give wrong rows; so the first call of every
site compares a few numbers of each value, through the store and with a timeout. All ranks get the same answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch

from weaveopt.fabrics import topology

Named = tuple[str, torch.Tensor | None]
_TOLERANCE = 0.02
"""Of the value's own norm: far above what rounding on unlike processors makes, far below another value."""
_SAMPLES = 1 << 20
"""Elements that are looked at, evenly spread: a whole residual in float64 could take gigabytes of a GPU."""


def first_difference(group: str, where: str, values: Sequence[Named], timeout_s: float) -> str | None:
    """The site, the value and two ranks, if a value differs beyond rounding; the same on all ranks.

    Raises `AgreementError` if a rank does not come within `timeout_s`.
    """
    present = [(name, value) for name, value in values if value is not None]
    if not present:
        return None
    channel = topology.exchange(group, timeout_s)
    marks = {name: _marks(value) for name, value in present}
    told = channel.gather({"marks": json.dumps(marks)}, f"the first call of {where}", timeout_s)
    everyone = [json.loads(str(record["marks"])) for record in told]
    ranks = channel.group.ranks
    for name, first in everyone[0].items():
        for rank, other in zip(ranks[1:], everyone[1:], strict=True):
            if not _close(first, other.get(name, [])):
                channel.settle()
                return (
                    f"{where}: the {name} on rank {ranks[0]} is not the one on rank {rank}. The rewrite needs it "
                    f"replicated on all ranks of group {group!r}, as under tensor parallelism"
                )
    return None


def _marks(value: torch.Tensor) -> list[float]:
    """Norm and two projections, which differ by about the norm for two unrelated values; of a part of a large one."""
    x = value.detach().flatten()
    x = x[:: max(1, x.numel() // _SAMPLES)].double()
    position = torch.arange(x.numel(), dtype=torch.float64, device=x.device)
    projections = [torch.dot(x, torch.sin(position * factor + 1.0)).item() for factor in (1.7, 0.37)]
    return [x.norm().item(), *projections]


def _close(a: list[float], b: list[float]) -> bool:
    if len(a) != len(b):
        return False
    if not all(map(math.isfinite, (*a, *b))):
        return all(math.isfinite(x) == math.isfinite(y) for x, y in zip(a, b, strict=True))
    return all(abs(x - y) <= _TOLERANCE * max(abs(a[0]), abs(b[0])) for x, y in zip(a, b, strict=True))
