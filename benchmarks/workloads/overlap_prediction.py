"""Predictions of kernels that hold a GEMM and its exchange, against what benchmarks measured; needs no GPU.

Reads the rows of `gemm_all_reduce` and `all_gather_gemm` in benchmarks/results/<machine>/, which hold the time of every
cut, and predicts each of these times by the profile's curves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from benchmarks import record
from weaveopt import _native
from weaveopt.cost_model.gemm import num_units
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.overlapped import Message, overlapped_us
from weaveopt.cost_model.tile_config import TileConfig, TileKernelNames
from weaveopt.ops.gemm_comm.all_gather.call import ALL_GATHER
from weaveopt.ops.gemm_comm.all_reduce.call import ALL_REDUCE, TileOutput
from weaveopt.records.candidate import Fabric

DTYPE, ELEMENT_BYTES = "bfloat16", 2
PREFIX = "us "
"""Prefix of the parameters that hold a cut's time."""


@dataclass(frozen=True)
class Measured:
    """The kernels of one suite: how its rows name a size and a cut, and what the profile knows of them."""

    kernels: TileKernelNames
    variant: str = ""
    spare_ctas: int = 0
    """CTAs that compute no tiles, beside those of a config."""

    @property
    def suite(self) -> str:
        return self.kernels.op

    @property
    def depth(self) -> str:
        return self.kernels.size

    def parse(self, values: list[int]) -> TileConfig:
        """The config of a row; what follows columns and pairs of a gather was never another than today's."""
        return TileConfig(*values[: 3 if self.kernels.has_reducers else 2])


SUITES = (
    Measured(ALL_REDUCE, TileOutput.NORM.variant),
    Measured(ALL_GATHER, spare_ctas=_native.GATHER_SPARE_CTAS),
)


@dataclass(frozen=True)
class Size:
    """One size of a suite, with the time of every cut that was measured there and is in the profile."""

    suite: str
    tokens: int
    hidden: int
    depth: int
    world: int
    measured_us: dict[TileConfig, float]
    predicted_us: dict[TileConfig, float]

    @property
    def chosen(self) -> TileConfig:
        return min(self.predicted_us, key=lambda cut: self.predicted_us[cut])

    @property
    def errors(self) -> dict[TileConfig, float]:
        """Signed errors of predictions: above 0 the prediction is too long."""
        return {cut: us / self.measured_us[cut] - 1.0 for cut, us in self.predicted_us.items()}

    @property
    def reached(self) -> float:
        """The fastest cut's time over the chosen one's."""
        return min(self.measured_us.values()) / self.measured_us[self.chosen]


def times_of(parameters: dict[str, record.Scalar], known: Measured) -> dict[TileConfig, float]:
    """Times of every cut that a row holds."""
    found = {}
    for name, us in parameters.items():
        values = name.removeprefix(PREFIX).split(":")
        if name.startswith(PREFIX) and all(each.isdigit() for each in values):
            found[known.parse([int(each) for each in values])] = float(us)
    return found


def predictions(machine: Machine, known: Measured, message: Message, depth: int, world: int) -> dict[TileConfig, float]:
    """Predictions for every cut that the profile has measured at such a size."""
    units = num_units(machine, DTYPE)

    def waves(cut: TileConfig, tokens: int, hidden: int, depth: int) -> int:
        columns = depth if known.depth == "n" else hidden
        return _native.product_waves(
            tokens, columns, cut.tile_columns, cut.reducer_ctas + known.spare_ctas, world, units
        )

    found = {}
    for cut, by_depth in known.kernels.known(machine, Fabric.PEER, world, known.variant).by_cut.items():
        us = overlapped_us(machine, by_depth, message, depth, partial(waves, cut))
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
