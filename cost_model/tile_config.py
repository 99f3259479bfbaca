"""Tiles of the kernels that exchange rows while a GEMM runs, and the names of the curves that profiles keep of them.

A curve is the whole kernel's time by message bytes (`tokens * hidden * 2`) at one size of the GEMM that rows do not
imply: `k` where its results are exchanged, `n` where its input is. Variants are named `tiles norm columns=256 pairs=1
ctas=4 k=4096` or `pushed columns=256 pairs=1 n=4096`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.overlapped import OperationCurves, kernels_of
from weaveopt.errors import ProfileError
from weaveopt.records.candidate import Fabric

TILES, TILES_NORM, PUSHED = "tiles", "tiles norm", "pushed"
"""Variants: GEMM results sent tile by tile; those added to a residual and normalized too; GEMM input that is pushed."""
TILE_DTYPES = ("bfloat16", "float16")
_FORMERLY = re.compile(r" own_last=0| spare=2 pieces=1")
"""Parameters that older profiles name with the value that kernels have now."""
_TEXT = re.compile(r"columns=(\d+) pairs=(\d+)(?: ctas=(\d+))?")


@dataclass(frozen=True)
class TileConfig:
    """How a kernel tiles its GEMM."""

    tile_columns: int
    """Columns of an output tile. Its rows are 256, of the two CTAs of a cluster."""
    group_pairs: int
    """Pairs of 128-row panels in a wave group: tiles of a group come column by column."""
    reducer_ctas: int = 0
    """CTAs that compute no tiles and finish rows all the time: an even number."""

    def __str__(self) -> str:
        ctas = f" ctas={self.reducer_ctas}" if self.reducer_ctas else ""
        return f"columns={self.tile_columns} pairs={self.group_pairs}{ctas}"


class TileCurve(NamedTuple):
    """A kernel whose time a curve holds."""

    variant: str
    config: TileConfig
    size: int


@dataclass(frozen=True)
class TileKernelNames:
    """The kernels of one operation, as its curves name them."""

    op: str
    variants: tuple[str, ...]
    size: str
    """The size of the GEMM that rows do not imply: `k` or `n`."""
    tile_columns: tuple[int, ...]
    has_reducers: bool
    family: str
    """Measurements of these curves, as `calibrate --only` names them."""

    def takes(self, config: TileConfig) -> bool:
        """True if there is such a kernel."""
        ctas = config.reducer_ctas
        finishes = ctas >= 0 and ctas % 2 == 0 if self.has_reducers else ctas == 0
        return config.tile_columns in self.tile_columns and config.group_pairs >= 1 and finishes

    def config_of(self, text: str) -> TileConfig | None:
        """The config of which `text` is the `str`; None if there is no such kernel."""
        found = _TEXT.fullmatch(text)
        config = None if found is None else TileConfig(*(int(number or 0) for number in found.groups()))
        return config if config is not None and self.takes(config) else None

    def name_of(self, config: TileConfig, size: int, variant: str = "") -> str:
        """Variant of the curve at that size of the GEMM; by default of the operation's only kernel."""
        return f"{variant or self.variants[0]} {config} {self.size}={size}"

    def parse(self, name: str) -> TileCurve:
        """The kernel that a curve names. Raises `ProfileError` if there is none."""
        today = _FORMERLY.sub("", name)
        for variant in self.variants:
            text, _, size = today.removeprefix(f"{variant} ").rpartition(f" {self.size}=")
            config = self.config_of(text) if today.startswith(f"{variant} ") else None
            if config is not None and size.isdecimal() and int(size) > 0:
                return TileCurve(variant, config, int(size))
        ctas = " ctas=C" if self.has_reducers else ""
        columns = ", ".join(map(str, self.tile_columns))
        expected = f"'{'|'.join(self.variants)} columns=N pairs=P{ctas} {self.size}=S', N one of {columns}"
        again = f"measure it anew: weaveopt calibrate --base FILE --only {self.family}"
        raise ProfileError(f"a curve of {self.op}: found variant {name!r}, expected {expected}; {again}")

    def known(self, machine: Machine, fabric: Fabric, world: int, variant: str = "") -> OperationCurves[TileConfig]:
        """Curves that the profile keeps of a variant among so many ranks."""
        return _known(self, machine, fabric, world, variant or self.variants[0])


@cache
def _known(
    kernels: TileKernelNames, machine: Machine, fabric: Fabric, world: int, variant: str
) -> OperationCurves[TileConfig]:
    def parse(name: str) -> tuple[TileConfig, int] | None:
        found = kernels.parse(name)
        return (found.config, found.size) if found.variant == variant else None

    return kernels_of(machine, fabric, world, kernels.op, kernels.size, parse)
