"""What a mixture takes whose tokens travel to the ranks of their experts and whose results come home.

Routing is taken as uniform: of a rank's tokens a share of `1 / world` is for each rank's experts, and as many rows come
to a rank as it sends. A row travels once for each (token, destination), a result for each choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from weaveopt.cost_model.batched import grouped_gemm_us
from weaveopt.cost_model.collectives import collective_us, measured_parts_us
from weaveopt.cost_model.gemm import Gemm
from weaveopt.cost_model.host import host_us
from weaveopt.cost_model.kernels import memory_us
from weaveopt.cost_model.machine import Machine
from weaveopt.records.candidate import Fabric

_ID_BYTES = 8
_LIBRARY_KERNELS = 20
"""Kernels around the library's exchanges: routing, sorting, gathers, the weighted sum."""


@dataclass(frozen=True)
class Mixture:
    """Sizes on one rank."""

    tokens: int
    choices: int
    experts: int
    hidden: int
    gates: int
    """Columns of the first GEMM: twice `inner` where gated."""
    inner: int
    dtype: str
    row_bytes: int
    world: int

    @property
    def rows(self) -> int:
        """That the rank's experts compute."""
        return self.tokens * self.choices

    @property
    def rows_sent(self) -> float:
        """To other ranks."""
        others = self.world - 1
        return self.tokens * others * (1.0 - (1.0 - 1.0 / self.world) ** self.choices)

    @property
    def rows_returned(self) -> float:
        return self.rows * (self.world - 1) / self.world

    @property
    def weight_bytes(self) -> int:
        element_bytes = self.row_bytes // self.hidden
        return self.experts * self.hidden * (self.gates + self.inner) * element_bytes


def experts_us(machine: Machine, mixture: Mixture) -> float:
    """Both grouped GEMMs and the pass between them, in microseconds."""
    rows, element_bytes = mixture.rows, mixture.row_bytes // mixture.hidden
    first = grouped_gemm_us(machine, mixture.experts, Gemm(rows, mixture.hidden, mixture.gates), mixture.dtype)
    second = grouped_gemm_us(machine, mixture.experts, Gemm(rows, mixture.inner, mixture.hidden), mixture.dtype)
    return first + second + memory_us(machine, rows * (mixture.gates + mixture.inner) * element_bytes)


def combine_us(machine: Machine, mixture: Mixture) -> float:
    """The weighted sum over choices."""
    return memory_us(machine, mixture.tokens * (mixture.choices + 1) * mixture.row_bytes)


def gather_us(machine: Machine, mixture: Mixture) -> float:
    """Rows into the order of the experts, and results out of it."""
    return memory_us(machine, 4 * mixture.rows * mixture.row_bytes)


def library_exchange_us(machine: Machine, mixture: Mixture, hosts: int = 1) -> float:
    """Four all-to-alls (counts, rows, ids, results), in microseconds."""
    world, sent = mixture.world, mixture.rows_sent
    sizes = (
        2 * _ID_BYTES * world,
        sent * mixture.row_bytes,
        sent * mixture.choices * _ID_BYTES,
        mixture.rows_returned * mixture.row_bytes,
    )
    return sum(collective_us(machine, "all_to_all", max(size, 1.0), world, hosts) for size in sizes)


def library_kernels_us(machine: Machine, mixture: Mixture) -> float:
    """What runs around the library's exchanges on every rank."""
    moved = combine_us(machine, mixture) + gather_us(machine, mixture)
    return moved + _LIBRARY_KERNELS * (memory_us(machine, 1) + host_us(machine))


def synchronize_us(machine: Machine, fabric: Fabric, mixture: Mixture) -> float | None:
    """Both synchronizations of a call on a fabric: before the experts and behind them.

    As measured of the fabric's own gather, without its rows. None where the profile has none.
    """
    parts = measured_parts_us(machine, fabric, "all_gather", 1, mixture.world)
    return None if parts is None else 2 * parts[0]


def pushed_us(machine: Machine, mixture: Mixture) -> float:
    """Rows into the memory of other ranks of the host, and results into theirs."""
    return memory_us(machine, 2 * (mixture.rows_sent + mixture.rows_returned) * mixture.row_bytes)
