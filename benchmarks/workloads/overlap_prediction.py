"""Predictions of kernels that hold a GEMM and its exchange, against what benchmarks measured; needs no GPU.

Reads the rows of `gemm_all_reduce` and `all_gather_gemm` in benchmarks/results/<machine>/, which hold the time of every
cut, and predicts each of these times by the profile's curves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from benchmarks import record
from weaveopt import _native
from weaveopt.cost_model.gemm import num_units
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.overlapped import Kernels, Message, overlapped_us
from weaveopt.ops.all_gather_gemm import cut as gathers
from weaveopt.ops.all_gather_gemm.pushed import known_kernels as gather_kernels
from weaveopt.ops.gemm_all_reduce import cut as reduces
from weaveopt.records.candidate import Fabric
from weaveopt.rewrites.gemm_all_reduce.tiles import known_kernels as reduce_kernels

DTYPE, ELEMENT_BYTES = "bfloat16", 2
PREFIX = "us "
"""Prefix of the parameters that hold a cut's time."""
Cut = reduces.Cut | gathers.Cut


@dataclass(frozen=True)
class Measured:
    """The kernels of one suite: how its rows name a size and a cut, and what the profile knows of them."""

    suite: str
    depth: str
    parse: Callable[[list[int]], Cut]
    spare: Callable[[Cut], int]
    """CTAs of the grid that compute no tiles."""
    kernels: Callable[[Machine, int], Kernels[Cut]]


SUITES = (
    Measured(
        "gemm_all_reduce", "k", lambda values: reduces.Cut(*values), lambda cut: cut.finisher_ctas,  # type: ignore[union-attr]
        lambda machine, world: reduce_kernels(machine, Fabric.PEER, world, reduces.HandsOut.NORM),  # type: ignore[return-value]
    ),
    Measured(
        "all_gather_gemm", "n", lambda values: gathers.Cut(*values), lambda cut: cut.spare_ctas,  # type: ignore[union-attr]
        lambda machine, world: gather_kernels(machine, Fabric.PEER, world),  # type: ignore[return-value]
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """One size of a suite, with the time of every cut that was measured there and is in the profile."""

    suite: str
    tokens: int
    hidden: int
    depth: int
    world: int
    measured_us: dict[Cut, float]
    predicted_us: dict[Cut, float]

    @property
    def chosen(self) -> Cut:
        return min(self.predicted_us, key=lambda cut: self.predicted_us[cut])

    @property
    def errors(self) -> dict[Cut, float]:
        """Signed errors of predictions: above 0 the prediction is too long."""
        return {cut: us / self.measured_us[cut] - 1.0 for cut, us in self.predicted_us.items()}

    @property
    def reached(self) -> float:
        """The fastest cut's time over the chosen one's."""
        return min(self.measured_us.values()) / self.measured_us[self.chosen]


def times_of(parameters: dict[str, record.Scalar], known: Measured) -> dict[Cut, float]:
    """Times of every cut that a row holds."""
    found = {}
    for name, us in parameters.items():
        values = name.removeprefix(PREFIX).split(":")
        if name.startswith(PREFIX) and all(each.isdigit() for each in values):
            found[known.parse([int(each) for each in values])] = float(us)
    return found


def predictions(machine: Machine, known: Measured, message: Message, depth: int, world: int) -> dict[Cut, float]:
    """Predictions for every cut that the profile has measured at such a size."""
    units = num_units(machine, DTYPE)

    def waves(cut: Cut, tokens: int, hidden: int, depth: int) -> int:
        columns = depth if known.depth == "n" else hidden
        return _native.product_waves(tokens, columns, cut.tile_columns, known.spare(cut), world, units)

    found = {}
    for cut, by_depth in known.kernels(machine, world).by_cut.items():
        us = overlapped_us(by_depth, message, depth, partial(waves, cut))
        if us is not None:
            found[cut] = us
    return found


def sizes_of(machine: Machine, folder: str) -> Iterator[Size]:
    """Those of the result files that the profile can predict."""
    for known in SUITES:
        path = record.RESULTS / folder / f"{known.suite}.json"
        for row in json.loads(path.read_text())["rows"] if path.exists() else ():
            tokens, hidden, depth, world = (
                int(row["case"][name]) for name in ("tokens", "hidden", known.depth, "ranks")
            )
            times = times_of(row["parameters"], known)
            foretold = predictions(machine, known, Message(tokens, hidden, ELEMENT_BYTES), depth, world)
            both = times.keys() & foretold.keys()
            if both:
                kept = ({cut: us for cut, us in each.items() if cut in both} for each in (times, foretold))
                yield Size(known.suite, tokens, hidden, depth, world, *kept)


def summary(sizes: Sequence[Size]) -> str:
    lines = []
    for suite in dict.fromkeys(size.suite for size in sizes):
        of_suite = [size for size in sizes if size.suite == suite]
        chosen = [abs(size.errors[size.chosen]) for size in of_suite]
        every = [abs(error) for size in of_suite for error in size.errors.values()]
        reached = [size.reached for size in of_suite]
        shares = (fmean(chosen), max(chosen), fmean(every))
        lines.append(
            [
                suite,
                str(len(of_suite)),
                *(f"{each:.1%}" for each in shares),
                f"{fmean(reached):.3f}",
                f"{min(reached):.3f}",
            ]
        )
    columns = ["op", "sizes", "error", "largest", "of all cuts", "best / chosen", "least"]
    return record.table("predictions", columns, lines)
