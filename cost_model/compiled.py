"""Costs of kernels in compiled graphs, in a profile, beyond what is known of their arithmetic and traffic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slowdown:
    """Time of a grouped GEMM, of one GEMM's of the same work, where an expert has `rows` rows."""

    rows: int
    times: float


@dataclass(frozen=True)
class SizedSlowdowns:
    """The slowdowns of experts whose weight has `elements`, by the rows of an expert, fewest first."""

    elements: int
    rows: tuple[Slowdown, ...]


@dataclass(frozen=True)
class CompiledCosts:
    """Costs of kernels in compiled graphs beyond what is known of their arithmetic and traffic."""

    origin: str
    host_us: float = 0.0
    """Host time of every kernel in Inductor's wrapper, which allocates, checks and calls. 0 if the host runs ahead of
    the device, or a CUDA graph replays without it."""
    grouped: tuple[SizedSlowdowns, ...] = ()
    """Time of a grouped GEMM, one for each expert that tokens chose, of one GEMM's of the same work: by the size of an
    expert's weight, smallest first, as many small ones lose more. One size holds for any; empty: no slowdown."""
