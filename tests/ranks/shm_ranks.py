"""Calls of the fused op on CPU ranks: made up, run, and compared with the reference."""

from __future__ import annotations

from dataclasses import replace

import torch

import weaveopt.ops  # noqa: F401
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.fabrics import shm, topology
from weaveopt.fabrics.shm import ShmArena
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.reference import reference
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

HIDDEN = 64
MAX_TOKENS = 16


def make_call(site: str, group: str, world: int, one_shot: bool = True, timeout_s: float = 30.0) -> ReductionCall:
    return ReductionCall(
        site=site, group=group, fabric=Fabric.SHM, world=world, hidden=HIDDEN, dtype="float32", out_dtype="float32",
        max_tokens=MAX_TOKENS, one_shot_max_tokens=MAX_TOKENS if one_shot else 0, post=None,
        norm=NormSpec(NormKind.RMS, 1e-5), timeout_s=timeout_s,
    )  # fmt: skip


def partial_of(rank: int, step: int = 0, tokens: int = 5) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1000 * step + rank))


def run_op(call: ReductionCall, partial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    normalized, total = torch.ops.weave.all_reduce_norm(
        partial, None, None, None, None, None, None, None, call.encode()
    )  # fmt: skip
    return normalized, total


def check(call: ReductionCall, ranks: tuple[int, ...], rank: int, step: int = 0) -> None:
    want = reference([partial_of(r, step) for r in ranks], EpilogueOperands(), call)
    for got, expected in zip(run_op(call, partial_of(rank, step)), want, strict=True):
        assert_close(got, expected, KERNEL, f"{call.site}, group {ranks}, step {step}")


def reserve(group: str = "0", floor_bytes: int = 0, timeout_s: float = 30.0, tokens: int = MAX_TOKENS) -> ShmArena:
    """With room for calls of up to `tokens` tokens; what a group of one needs is enough for any."""
    call = replace(make_call("reserved", group, 1), max_tokens=tokens)
    return shm.reserve(topology.discover(group, timeout_s), memory_plan(group, [call]), floor_bytes, timeout_s)
