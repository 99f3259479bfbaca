"""Rules whose kernels hold a GEMM and its exchange: curves of those, and a machine on which they were measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tests.graphs import profiles
from weaveopt.cost_model.machine import Curve, FabricCosts, Machine, Point
from weaveopt.records.candidate import Candidate, Fabric
from weaveopt.records.report import GraphReport

H200 = profiles.without("h200x4", "reduce_scatter", "all_gather")
TOKENS, HIDDEN = 4096, 8192
MESSAGE_BYTES = TOKENS * HIDDEN * 2
SIZES = (1 << 20, 1 << 30)

Reported = Callable[..., GraphReport]
"""Reports a function, its inputs and curves, as the fixture `reported` makes it."""


def fused(us: float, op: str, variant: str) -> Curve:
    """Curve of four ranks, proportional to bytes: `us` at `MESSAGE_BYTES`."""
    points = tuple(Point(size, us * size / MESSAGE_BYTES) for size in (SIZES[0], MESSAGE_BYTES, SIZES[1]))
    return Curve("fused", op, variant, 4, points, HIDDEN, *SIZES)


def alone(us: float, op: str, variant: str) -> Curve:
    """An exchange without a GEMM."""
    return Curve("fused", op, variant, 4, (Point(1 << 12, us / 10), Point(MESSAGE_BYTES, us)))


def toy(*curves: Curve) -> Machine:
    """h200x4 on which the kernels were measured so, and no others that hold a GEMM or serve one."""

    def known(costs: FabricCosts) -> FabricCosts:
        if costs.fabric is not Fabric.PEER:
            return costs
        return replace(costs, curves=(*(each for each in costs.curves if "gemm" not in each.op), *curves))

    costs = map(known, H200.fabric_costs)
    return replace(H200, fabric_costs=tuple(costs))


def rows(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*sizes, dtype=dtype)


def on_peer(report: GraphReport) -> dict[str, Candidate]:
    """Candidates on the fabric `peer`, by variant."""
    [decision] = report.decisions
    return {each.variant: each for each in (decision.chosen, *decision.alternatives) if each.fabric is Fabric.PEER}
