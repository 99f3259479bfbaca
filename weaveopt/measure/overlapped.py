"""Kernels that hold a GEMM and its exchange: at which sizes they are measured, and the curves that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import torch

from weaveopt.cost_model.machine import Curve
from weaveopt.measure.clock import Launch, Sample
from weaveopt.measure.draft import Draft
from weaveopt.measure.fit import never_falling
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession, Rows
from weaveopt.records.candidate import Fabric

DTYPE = torch.bfloat16
ROWS = (2048, 4096, 8192)
"""Elements of a row that travels."""
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
DEPTHS = (512, 2048, 4096, 8192, 14336)
"""Depths from a GEMM that the exchange hides to one that hides the exchange."""
FEW_TOKENS, SHALLOW = 2048, 2048
"""Token count and depth limits: up to so many tokens tiles of 128 columns may pay, as they leave a shorter last
wave; up to such a depth the exchange dominates, so that many CTAs only finish rows."""
TAKEN_FLOPS_PER_US = 5e8
"""Approximate rate of a GEMM, which sets how many calls a measurement makes."""

C = TypeVar("C")
"""Tile configuration of a kernel; each family has its own type."""
Times = dict[tuple[int, int, C, int], Rows]
"""(bytes, time) by number of ranks, row length, cut and depth."""


@dataclass(frozen=True)
class Case(Generic[C]):
    """One kernel at one size."""

    cut: C
    depth: int
    """The GEMM size that the rows do not imply: k if its results are exchanged, n if its input is."""
    hidden: int
    """Elements of a row that travels."""
    tokens: int

    @property
    def bytes(self) -> int:
        """Size of all communicated rows."""
        return self.tokens * self.hidden * DTYPE.itemsize

    def guess_us(self, link_bytes_per_us: float) -> float:
        flops = 2.0 * self.tokens * self.hidden * self.depth
        return 10.0 + self.bytes / link_bytes_per_us + flops / TAKEN_FLOPS_PER_US


@dataclass(frozen=True)
class MeasuredSizes:
    """Token counts and depths at which a cut is measured."""

    most_tokens: int = TOKENS[-1]
    most_depth: int = DEPTHS[-1]


def cases_of(cuts: Mapping[C, MeasuredSizes], quick: bool) -> Iterator[Case[C]]:
    """Every size of every cut; `quick`: a few sizes of the first one."""
    rows, tokens, depths = (ROWS[1:2], TOKENS[1::3], DEPTHS[::3]) if quick else (ROWS, TOKENS, DEPTHS)
    for cut, sizes in islice(cuts.items(), 1 if quick else None):
        for depth in (each for each in depths if each <= sizes.most_depth):
            for hidden in rows:
                for count in (each for each in tokens if each <= sizes.most_tokens):
                    yield Case(cut, depth, hidden, count)


def measured_times(
    session: CalibrationSession, ranks: Ranks, cases: Sequence[Case[C]], what: str,
    launch: Callable[[Case[C], Ranks], Launch], link_bytes_per_us: float,
) -> Times[C]:  # fmt: skip
    """A curve for each row length, cut and depth. `link_bytes_per_us`: about what the link does.

    The caller has reserved one arena for all of them.
    """
    times: Times[C] = {}
    curves: dict[tuple[int, C, int], list[Case[C]]] = {}
    for case in cases:
        curves.setdefault((case.hidden, case.cut, case.depth), []).append(case)
    for (row, cut, depth), sizes in curves.items():

        def take(index: int, sizes: Sequence[Case[C]] = sizes) -> Sample:
            case = sizes[index]
            guess_us = case.guess_us(link_bytes_per_us)
            return session.clock.together(launch(case, ranks), guess_us, ranks.process_group, hot=True)

        times[ranks.world, row, cut, depth] = session.curve(what, [each.bytes for each in sizes], take)
    return times


def write_curves(
    draft: Draft, times: Times[C], name: str, what: str, op: str, variant_of: Callable[[C, int], str]
) -> None:
    """Write the curves of fabric `peer` with an origin `name`; does nothing if nothing was measured."""
    if not times:
        return
    origin = draft.origin(name, (sample for rows in times.values() for _, sample in rows), what)
    for (world, row, cut, depth), rows in times.items():
        points = never_falling([(size, sample.us) for size, sample in rows])
        ends = points[0].bytes, points[-1].bytes
        draft.add_curve(Fabric.PEER, Curve(origin, op, variant_of(cut, depth), world, points, row, *ends))
