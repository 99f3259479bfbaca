"""The kernels around a sharded mixture's experts, compiled for the CPU, on emulated ranks (`tests/emulation/gpu/`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.emulation import emulated_build
from tests.emulation.emulated_build import EMULATED, Mistake, making, without

Tensor = torch.Tensor

POISON = -777.0
"""In results before a call."""


class Asked(ctypes.Structure):
    """`Asked` of the library."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("world", "num_calls", "choices", "num_experts", "hidden", "num_ctas")),
        *((name, ctypes.c_int32) for name in ("cta_threads", "parts", "other_site", "absent_rank", "max_tokens")),
        ("seed", ctypes.c_uint32),
        *((name, ctypes.POINTER(ctypes.c_int32)) for name in ("slot_tokens", "tokens")),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("x", "experts", "weights", "out")),
        ("counters", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Case:
    """Calls that follow one another on every rank."""

    tokens: tuple[tuple[int, ...], ...]
    """Token counts of each rank, by call."""
    slot_tokens: tuple[int, ...] = ()
    """Slot size of every call, in tokens; empty: the largest count of any rank."""
    choices: int = 2
    num_experts: int = 3
    hidden: int = 24
    routing: str = "uniform"
    num_ctas: int = 2
    cta_threads: int = 64
    parts: int = 1
    other_site: int = -1
    """The rank that runs another site in the last call."""
    absent_rank: int = -1
    """The rank that leaves the last call out."""
    seed: int = 0

    @property
    def world(self) -> int:
        return len(self.tokens[0])

    @property
    def slots(self) -> tuple[int, ...]:
        return self.slot_tokens or tuple(max(each) for each in self.tokens)


@dataclass(frozen=True)
class Made:
    """Results of the calls. By call and rank: outputs and the expected ones; by rank: rows pushed and returned, and the
    expected numbers."""

    out: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    counted: tuple[tuple[int, int], ...]
    moved: tuple[tuple[int, int], ...]


EXCHANGE = "experts/sharded/exchange.cuh"
MISTAKES = {
    "no barrier before the signal": without(
        EXCHANGE,
        "__syncthreads();\n",
        "    if (peer < group.world && peer != group.rank) {\n        const uint64_t word",
    ),
    "no wait for rows": without(EXCHANGE, "fabric::wait(&group.channel(group.rank)->rows"),
    "no wait for what was pushed": without(EXCHANGE, "fabric::wait(&group.channel(group.rank)->partial"),
    "rows of another slot": Mistake(
        EXCHANGE,
        "const int64_t to = exchange.rows_offset + place * exchange.row_vecs * kVecBytes;",
        "const int64_t to = exchange.rows_offset + (WRONG ? token : place) * exchange.row_vecs * kVecBytes;",
    ),
}


def library() -> ctypes.CDLL:
    """Its function `run` says what failed, or nothing."""
    return emulated_build.library((EMULATED / "sharded_rows.cpp",), (EMULATED / "hosts",), MISTAKES)


def chosen(case: Case, tokens: int, random: torch.Generator) -> Tensor:
    """Ids over all ranks."""
    whole, most = (tokens, case.choices), case.world * case.num_experts

    def between(first: int, end: int) -> Tensor:
        return torch.randint(first, end, whole, generator=random)

    return {
        "uniform": between(0, most),
        "last rank": between(most - case.num_experts, most),
        "first expert": torch.zeros(whole, dtype=torch.int64),
        "some foreign": between(-most, 2 * most),
        "all foreign": torch.full(whole, -1),
    }[case.routing]


def wanted_of(case: Case, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Whole numbers, so that no sum is rounded."""
    someones = (experts >= 0) & (experts < case.world * case.num_experts)
    factors = torch.where(someones, weights * (1 + experts % 7), 0.0)
    return (x.float() * factors.sum(1, keepdim=True)).to(x.dtype)


def moved_by(case: Case, rank: int, experts: Tensor) -> tuple[int, int]:
    """Rows pushed to others, and rows returned by them."""
    someones = (experts >= 0) & (experts < case.world * case.num_experts)
    owner = torch.where(someones, experts // case.num_experts, -1)
    others = [(owner == other) for other in range(case.world) if other != rank]
    return sum(int(each.any(1).sum()) for each in others), sum(int(each.sum()) for each in others)


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))


def run(case: Case, mistake: str = "") -> tuple[Made, str]:
    """Runs the calls; returns their results, and an error or an empty text. `mistake`: one of `MISTAKES`."""
    random = torch.Generator().manual_seed(case.seed)
    counts = [tokens for call in case.tokens for tokens in call]
    x = [torch.randint(-3, 4, (tokens, case.hidden), generator=random).bfloat16() for tokens in counts]
    experts = [chosen(case, tokens, random) for tokens in counts]
    weights = [torch.randint(-1, 3, each.shape, generator=random).float() for each in experts]
    out = [torch.full_like(each, POISON) for each in x]
    counters = torch.zeros(case.world, 2, dtype=torch.int64)
    asked = Asked(
        case.world, len(case.tokens), case.choices, case.num_experts, case.hidden, case.num_ctas, case.cta_threads,
        case.parts, case.other_site, case.absent_rank, max(case.slots), case.seed,
        (ctypes.c_int32 * len(case.tokens))(*case.slots), (ctypes.c_int32 * len(counts))(*counts),
        _pointers(x), _pointers(experts), _pointers(weights), _pointers(out), counters.data_ptr(),
    )  # fmt: skip
    with making(mistake, MISTAKES, library()):
        wrong = library().run(ctypes.byref(asked)).decode()
    wanted = tuple(wanted_of(case, *each) for each in zip(x, experts, weights, strict=True))
    moved = []
    for rank in range(case.world):
        by_call = [moved_by(case, rank, each) for each in experts[rank :: case.world]]
        moved.append((sum(pushed for pushed, _ in by_call), sum(returned for _, returned in by_call)))
    counted = tuple((int(pushed), int(returned)) for pushed, returned in counters)
    return Made(tuple(out), wanted, counted, tuple(moved)), wrong
