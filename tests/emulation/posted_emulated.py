"""The posted kernel, compiled for the CPU, on emulated ranks that share memory of the host (`tests/emulation/gpu/`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.emulation import emulated_build
from tests.emulation.emulated_build import CSRC, EMULATED, Mistake, making, without
from weaveopt import _native

Tensor = torch.Tensor
POISON = -777.0
"""In results before a call, and in rows of a residual that nobody reads."""
EPS = 1e-5


class Asked(ctypes.Structure):
    """`Asked` of the library."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("world", "num_calls", "hidden", "bf16", "vecs", "num_ctas")),
        *((name, ctypes.c_int32) for name in ("rows_a_unit", "norm_kind", "post_kind", "sum_whole", "wide_out")),
        *((name, ctypes.c_int32) for name in ("other_site", "absent_rank")),
        ("seed", ctypes.c_uint32),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("partial", "residual", "normalized", "sum")),
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True)
class Case:
    """Calls that follow one another on every rank."""

    world: int
    tokens: tuple[int, ...]
    """Token count of each call."""
    hidden: int = 64
    bf16: bool = True
    norm: str = "rms"
    post: str = "none"
    residual: bool = True
    residual_sharded: bool = False
    sum_out: str = "sharded"
    """`none`, `sharded` or `whole`."""
    wide_out: bool = False
    num_ctas: int = 2
    rows_a_unit: int = 1
    vecs: int = 4
    other_site: int = -1
    absent_rank: int = -1
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def share(self, tokens: int, rank: int) -> slice:
        return slice(tokens * rank // self.world, tokens * (rank + 1) // self.world)


@dataclass(frozen=True)
class Made:
    """Results by call and rank, and the expected ones: normalized rows and the sum; empty where none is wanted."""

    normalized: tuple[tuple[Tensor, ...], ...]
    sums: tuple[tuple[Tensor, ...], ...]
    wanted: tuple[tuple[Tensor, Tensor], ...]


KERNEL, HEADER = "reduction/posted.cuh", "fabric/arena.h"
BARRIER = "__syncthreads();\n"
OF_ALL, OF_SOME = "        if (stands_for_peer())", "        if (stands_for_peer() && count(peer(), j) > 0)\n"
AWAITS, SIGNALS = "            fabric::wait(", "            fabric::signal("
OWN = "reinterpret_cast<char*>(own) + channel_offset"
SOURCE = "staged(call.group.rank, call.group.step_to(source), index);"
MISTAKES = {
    "no barrier before the signal of partial rows": without(KERNEL, BARRIER, OF_SOME + SIGNALS),
    "no barrier before the signal of finished rows": without(KERNEL, BARRIER, OF_ALL),
    "no wait for partial rows": without(
        KERNEL, "fabric::wait(&call.group.channel(rank)->partial[peer()][blockIdx.x], epoch | (j + 1)"
    ),
    "no wait for finished rows": without(KERNEL, "fabric::wait(&call.group.channel(call.group.rank)->rows"),
    "no barrier after the wait for partial rows": without(
        KERNEL, BARRIER, "        for (int32_t i = 0; i < rows; ++i)\n            finish_row"
    ),
    "no barrier after the wait for finished rows": without(
        KERNEL, BARRIER, "        const OutputLayout& output = layout.output;\n        const char* from"
    ),
    "rows of another slot": Mistake(KERNEL, "call.group.world - step,", "(WRONG ? 1 : call.group.world - step),"),
    "state in memory of the host": Mistake(HEADER, OWN, f"(WRONG ? base[rank] : {OWN.replace(' + ', ') + ')}"),
    "sums read from the peers": Mistake(KERNEL, SOURCE, SOURCE.replace("(call", "(WRONG ? source : call", 1)),
}


def library() -> ctypes.CDLL:
    """Its function `run` says what failed, or nothing."""
    sources = (EMULATED / "posted_rows.cpp", CSRC / "reduction" / "layout.cpp")
    return emulated_build.library(sources, (EMULATED / "hosts",), MISTAKES)


def _normalized(x: Tensor, kind: str, weight: Tensor) -> Tensor:
    x = x.float()
    if kind == "layer":
        x = x - x.mean(1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * weight.float()


def _wanted(case: Case, partials: Sequence[Tensor], residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.stack([each.float() for each in partials]).sum(0)
    if case.post != "none":
        total = _normalized(total, case.post, weight)
    if residual is not None:
        total = total + residual.float()
    total = total.to(case.dtype)
    if case.norm == "none":
        return total[:0], total
    return _normalized(total, case.norm, weight).to(torch.float32 if case.wide_out else case.dtype), total


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if each is None else each.data_ptr() for each in tensors))


def run(case: Case, mistake: str = "") -> tuple[Made, str]:
    """Runs the calls; returns their results, and an error or an empty text. `mistake`: one of `MISTAKES`."""
    random = torch.Generator().manual_seed(case.seed)

    def numbers(tokens: int) -> Tensor:
        # Whole numbers: sums over ranks are exact in any order.
        return torch.randint(-4, 5, (tokens, case.hidden), generator=random).to(case.dtype)

    out_dtype = torch.float32 if case.wide_out else case.dtype
    weight = torch.randint(1, 4, (case.hidden,), generator=random).to(case.dtype)
    partials = [[numbers(tokens) for _ in range(case.world)] for tokens in case.tokens]
    residuals = [numbers(tokens) if case.residual else None for tokens in case.tokens]
    normalized: list[list[Tensor | None]] = []
    sums: list[list[Tensor | None]] = []
    for tokens in case.tokens:
        shape, ranks = (tokens, case.hidden), range(case.world)
        normalized.append([None if case.norm == "none" else torch.full(shape, POISON, dtype=out_dtype) for _ in ranks])
        sums.append([None if case.sum_out == "none" else torch.full(shape, POISON, dtype=case.dtype) for _ in ranks])
    kinds = [int(getattr(_native.NormKind, kind)) for kind in (case.norm, case.post)]
    asked = Asked(
        case.world, len(case.tokens), case.hidden, case.bf16, case.vecs, case.num_ctas, case.rows_a_unit, *kinds,
        case.sum_out == "whole", case.wide_out, case.other_site, case.absent_rank, case.seed,
        (ctypes.c_int32 * len(case.tokens))(*case.tokens), _pointers([x for call in partials for x in call]),
        _pointers(residuals), _pointers([x for call in normalized for x in call]),
        _pointers([x for call in sums for x in call]), weight.data_ptr(), EPS,
    )  # fmt: skip
    with making(mistake, MISTAKES, library()):
        wrong = library().run(ctypes.byref(asked)).decode()
    wanted = tuple(_wanted(case, *each, weight) for each in zip(partials, residuals, strict=True))
    none = torch.empty(0)
    return Made(
        tuple(tuple(none if x is None else x for x in call) for call in normalized),
        tuple(tuple(none if x is None else x for x in call) for call in sums),
        wanted,
    ), wrong


def difference(case: Case, made: Made) -> str:
    """The first result that is not as expected; empty if there is none."""
    for at, (tokens, (rows, total)) in enumerate(zip(case.tokens, made.wanted, strict=True)):
        for rank in range(case.world):
            where = f"call {at}, rank {rank}"
            if case.norm != "none":
                got = made.normalized[at][rank]
                if not torch.equal(got.view(torch.uint8), made.normalized[at][0].view(torch.uint8)):
                    return f"{where}: normalized rows differ from those of rank 0"
                tolerance = 1e-5 if got.dtype is torch.float32 else 2**-7
                if not torch.allclose(got.float(), rows.float(), rtol=tolerance, atol=1e-5):
                    return f"{where}: normalized rows are wrong"
            if case.sum_out != "none":
                own = slice(0, tokens) if case.sum_out == "whole" else case.share(tokens, rank)
                got, want = made.sums[at][rank], total
                exact = case.post == "none"
                if not (torch.equal(got[own], want[own]) if exact else torch.allclose(got[own], want[own], rtol=2**-6)):
                    return f"{where}: the sum is wrong"
                outside = torch.ones(tokens, dtype=torch.bool)
                outside[own] = False
                if not bool((got[outside] == POISON).all()):
                    return f"{where}: rows of the sum were written that are of other ranks"
    return ""
