"""Recursive doubling between hosts, compiled for the CPU and run among emulated ranks (`tests/emulation/gpu/`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.emulation import emulated_build
from tests.emulation.emulated_build import CSRC, EMULATED, making, without

Tensor = torch.Tensor

EPS = 1e-5
POISON = -777.0
"""In results before a call."""


class Asked(ctypes.Structure):
    """`Asked` of the library."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("hosts", "num_calls", "hidden", "bf16", "vecs", "num_ctas")),
        *((name, ctypes.c_int32) for name in ("ranks_of_host", "mixed")),
        *((name, ctypes.c_int32) for name in ("norm", "direct", "other_site", "absent_rank")),
        ("seed", ctypes.c_uint32),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        ("flagged", ctypes.POINTER(ctypes.c_int32)),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("partial", "residual", "normalized", "sum")),
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True)
class Case:
    """Calls that follow one another on every rank."""

    hosts: int
    tokens: tuple[int, ...]
    """Token count of every call."""
    flagged: tuple[bool, ...] = ()
    """Calls whose rows are sent as they are, with flags, one after the other and again from the first; else packets."""
    hidden: int = 32
    dtype: torch.dtype = torch.bfloat16
    vecs: int = 1
    """Vectors of 16 bytes that a thread holds."""
    num_ctas: int = 2
    ranks_of_host: int = 1
    mixed: bool = False
    """Ranks are numbered through the hosts in turn, else host by host."""
    norm: bool = True
    """True if the call normalizes; false if it returns the sum alone."""
    direct: int = 0
    """1: memory of other hosts is mapped everywhere; 2: between hosts of which one is even and one odd; 0: nowhere."""
    without_residual: int = -1
    """The call that has none."""
    other_site: int = -1
    """The rank that runs another site in the last call."""
    absent_rank: int = -1
    """The rank that leaves the last call out."""
    seed: int = 0

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_of_host


@dataclass(frozen=True)
class Made:
    """Inputs and results of every call: `[rank, tokens, hidden]`, the residual `[tokens, hidden]`, results by rank."""

    partial: tuple[Tensor, ...]
    residual: tuple[Tensor | None, ...]
    normalized: tuple[Tensor, ...]
    sum: tuple[Tensor, ...]
    weight: Tensor


ROWS = "reduction/hosts/doubling_rows.cuh"
FENCE = "if (threadIdx.x == 0) fabric::fence();"
MISSING = {
    "mapped: the fence before a flag": without(ROWS, FENCE, "\n    }"),
    "mapped: the barrier before it": without(ROWS, "__syncthreads();", f"\n        {FENCE}"),
    "the barrier behind the wait": without(ROWS, "__syncthreads();", "\n        const char* from"),
    "puts: the barrier before one": without(ROWS, "__syncthreads();", "\n            if (row == 0) this->put_header"),
}
"""Instructions that order a flagged row, each left out."""


def library() -> ctypes.CDLL:
    sources = [CSRC / "reduction" / "hosts" / name for name in ("doubling.cpp", "schedule.cpp")]
    return emulated_build.library((EMULATED / "between_hosts.cpp", *sources), (EMULATED / "hosts",), MISSING)


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if each is None else each.data_ptr() for each in tensors))


def run(case: Case, missing: str = "") -> tuple[Made, str]:
    """Runs the calls on random rows; returns them, and why they did not end or an empty text. `missing`: one of
    `MISSING`."""
    torch.manual_seed(case.seed)
    shapes = [(case.world, tokens, case.hidden) for tokens in case.tokens]
    partial = tuple(torch.randn(shape).to(case.dtype) for shape in shapes)
    flagged = case.flagged
    residual = tuple(
        None if at == case.without_residual else torch.randn(shape[1:]).to(case.dtype)
        for at, shape in enumerate(shapes)
    )
    normalized, total = (tuple(torch.full(shape, POISON, dtype=case.dtype) for shape in shapes) for _ in range(2))
    weight = torch.rand(case.hidden).to(case.dtype) + 0.5
    asked = Asked(
        case.hosts, len(shapes), case.hidden, case.dtype is torch.bfloat16, case.vecs, case.num_ctas,
        case.ranks_of_host, case.mixed, case.norm, case.direct, case.other_site, case.absent_rank, case.seed,
        (ctypes.c_int32 * len(shapes))(*case.tokens),
        (ctypes.c_int32 * len(shapes))(*(bool(flagged and flagged[at % len(flagged)]) for at in range(len(shapes)))),
        _pointers(partial), _pointers(residual), _pointers(normalized), _pointers(total), weight.data_ptr(), EPS,
    )  # fmt: skip
    with making(missing, MISSING, library()):
        wrong = library().run(ctypes.byref(asked)).decode()
    return Made(partial, residual, normalized, total, weight), wrong
