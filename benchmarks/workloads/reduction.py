"""One shape of `weave::all_reduce_norm` on GPUs: every variant of ours and every baseline, checked and timed alike.

A variant is a chain of calls in one CUDA graph: each call takes its partial result from a small rotation of buffers and
the sum of the call before as its residual. The chain is long enough that one replay takes about a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
import torch.distributed as dist

from benchmarks.ranks import Place, barrier
from benchmarks.timing import Effort, Step, replayed_us
from tests.graphs.tolerances import LIBRARY, assert_close
from weaveopt.measure.cases.memory import add_norm
from weaveopt.measure.cases.reduction import calls, peer
from weaveopt.measure.cases.reduction.calls import EPS, Fused
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric

Tensor = torch.Tensor
Call = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(index in the rotation, residual) -> (normalized, sum)."""

DTYPE = torch.bfloat16
PUSH_BYTES_PER_S = 346e9
"""Rate of stores to all peers at once on NVLink 4, each way (measured, 64 MiB to each peer, all SMs)."""
ROTATION = ((1 << 20, 8), (8 << 20, 4))
"""Buffers in the rotation for partial results of up to so many bytes; 2 above. They should stay in the L2 cache."""
REPLAY_US = 1200.0
LARGEST_ONE_SHOT_BYTES = 2048 * 8192 * 2
"""Largest partial result of torch's one-shot all-reduce, far beyond where it is the best."""
NCCL, SYMM_ONE_SHOT, SYMM_TWO_SHOT = "nccl_then_inductor", "symm_one_shot_then_inductor", "symm_two_shot_then_inductor"


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden: int

    @property
    def bytes(self) -> int:
        return self.tokens * self.hidden * DTYPE.itemsize

    @property
    def rotation(self) -> int:
        return next((number for limit, number in ROTATION if self.bytes <= limit), 2)

    def floor_us(self, world: int) -> float:
        """The link's share alone: a two-shot that only pushes, at the highest rate measured."""
        return 2 * (world - 1) / world * self.bytes / PUSH_BYTES_PER_S * 1e6

    def num_calls(self, world: int) -> int:
        return min(100, max(10, math.ceil(REPLAY_US / (8 + 1.3 * self.floor_us(world)))))


class Form(StrEnum):
    """Results of a call on a partial result and a residual."""

    SHARDED = "sharded"
    """Normalized rows; residual and sum are sharded by tokens."""
    WHOLE = "whole"
    """Normalized rows, and the whole sum on every rank."""
    UNFUSED_NORM = "norm apart"
    """The whole sum, which a kernel of Inductor's normalizes on every rank."""
    SUM = "sum"
    """The whole sum; there is no norm."""

    @property
    def returns_sum_alone(self) -> bool:
        return self in (Form.UNFUSED_NORM, Form.SUM)


@dataclass(frozen=True)
class Variant:
    """A way to run the op."""

    row: KernelRow
    form: Form = Form.SHARDED
    fabric: Fabric = Fabric.PEER

    @property
    def name(self) -> str:
        words = [self.row.algorithm.value, self.row.transfer.value]
        if self.row.num_ctas:
            words.append(str(self.row.num_ctas))
        if self.form is not Form.SHARDED:
            words.append(self.form.value)
        return " ".join(words)

    def call(self, case: Case, place: Place) -> ReductionCall:
        site = f"benchmark.{case.hidden}.{case.tokens}.{self.name}"
        sharded = self.form is Form.SHARDED
        make = calls.host_memory_call if self.fabric is Fabric.HOST else calls.peer_call
        call = make(site, place.group, place.world, self._fused(case), sharded)
        if not self.form.returns_sum_alone:
            return call
        return replace(call, norm=None, sum_out=SumOut.WHOLE, normalized_aliases_arena=False)

    def is_supported(self, case: Case, place: Place) -> bool:
        return calls.is_supported(self._fused(case), place.world, place.device)

    def _fused(self, case: Case) -> Fused:
        return Fused(self.row, case.hidden, case.tokens)


class SymmetricBuffers:
    """Inputs of torch's symmetric-memory all-reduces; each is exchanged once, at offset 0 of its own allocation."""

    def __init__(self, place: Place, largest_bytes: int) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory as symm_mem

        most = ROTATION[0][1]
        sizes = [min(largest_bytes, next((limit for limit, n in reversed(ROTATION) if i < n), 0)) for i in range(most)]
        sizes[:2] = [largest_bytes] * 2
        # Not symm_mem.empty(), which may take pieces of a pool: their offsets need not be 0, nor alike on all ranks.
        self._buffers = [
            _SymmetricMemory.empty_strided_p2p((size // DTYPE.itemsize,), (1,), DTYPE, place.device) for size in sizes
        ]
        for buffer in self._buffers:
            symm_mem.rendezvous(buffer, place.group)
            buffer.zero_()

    def of(self, case: Case) -> list[Tensor]:
        count = case.tokens * case.hidden
        return [buffer[:count].view(case.tokens, case.hidden) for buffer in self._buffers[: case.rotation]]


class Shape:
    """The tensors of one case and what runs on them."""

    def __init__(self, place: Place, case: Case, symmetric: SymmetricBuffers | None) -> None:
        torch._dynamo.reset()
        self.place, self.case = place, case
        own, same = (torch.Generator(place.device).manual_seed(seed) for seed in (1000 + place.rank, case.tokens))
        size = (case.tokens, case.hidden)

        def random(generator: torch.Generator) -> Tensor:
            return torch.randn(size, generator=generator, device=place.device, dtype=DTYPE)

        self.given = [random(own) for _ in range(case.rotation)]
        self.partials = [given.clone() for given in self.given]
        self.symmetric = [] if symmetric is None else symmetric.of(case)
        self.residual = random(same)
        self.weight = torch.rand(case.hidden, generator=same, device=place.device).to(DTYPE)
        self.add_norm = torch.compile(add_norm, dynamic=False, fullgraph=True)
        self.norm = torch.compile(_norm, dynamic=False, fullgraph=True)
        self.add = torch.compile(torch.add, dynamic=False, fullgraph=True)
        self.restore()

    def restore(self) -> None:
        """In-place baselines leave sums in their inputs, which would grow from call to call."""
        torch._foreach_copy_(self.partials + self.symmetric, self.given + self.given[: len(self.symmetric)])

    def baselines(self, adds_only: bool = False) -> dict[str, Call]:
        """With `adds_only` no norm follows."""
        finished = self.added if adds_only else self.finished
        group = self.place.group
        one_shot, two_shot = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_

        def nccl(index: int, residual: Tensor) -> tuple[Tensor, Tensor]:
            dist.all_reduce(self.partials[index])
            return finished(self.partials[index], residual)

        def symm_one_shot(index: int, residual: Tensor) -> tuple[Tensor, Tensor]:
            return finished(one_shot(self.symmetric[index], "sum", group), residual)

        def symm_two_shot(index: int, residual: Tensor) -> tuple[Tensor, Tensor]:
            return finished(two_shot(self.symmetric[index], "sum", group), residual)

        if not self.symmetric:
            return {NCCL: nccl}
        found: dict[str, Call] = {NCCL: nccl, SYMM_TWO_SHOT: symm_two_shot}
        if self.case.bytes <= LARGEST_ONE_SHOT_BYTES:
            found[SYMM_ONE_SHOT] = symm_one_shot
        return found

    def finished(self, reduced: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Addition and norm as Inductor's kernel: (normalized, sum)."""
        total, normalized = self.add_norm(reduced, residual, self.weight)
        return normalized, total

    def added(self, reduced: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(nothing, sum)."""
        total = self.add(reduced, residual)
        return total[:0], total

    def alone(self, index: int, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.finished(self.partials[index], residual)

    def ours(self, variant: Variant) -> Call:
        fused = torch.ops.weave.all_reduce_norm.default
        call = variant.call(self.case, self.place).encode()
        weight = None if variant.form.returns_sum_alone else self.weight
        normalizes = variant.form is Form.UNFUSED_NORM

        def run(index: int, residual: Tensor) -> tuple[Tensor, Tensor]:
            normalized, total, *_ = fused(self.partials[index], None, None, residual, None, None, weight, None, call)
            return self.norm(total, self.weight) if normalizes else normalized, total

        return run

    def check(self, calls: dict[str, Call], sharded: frozenset[str]) -> None:
        """All of them against an fp32 sum, on two inputs. Of `sharded` ones only this rank's rows of the sum count."""
        rank, world, tokens = self.place.rank, self.place.world, self.case.tokens
        own = slice(tokens * rank // world, tokens * (rank + 1) // world)
        for index in range(2):
            wide = self.given[index].float()
            dist.all_reduce(wide)
            want_sum = wide.add_(self.residual).to(DTYPE)
            wide.copy_(want_sum)
            scale = torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / wide.shape[-1] + EPS)
            want_normalized = self.weight * wide.mul_(scale).to(DTYPE)
            for name, call in calls.items():
                self.restore()
                normalized, total = call(index, self.residual)
                rows = own if name in sharded else slice(None)
                what = f"rank {rank}, {name}, {tokens} x {self.case.hidden}, input {index}"
                if normalized.numel():
                    assert_close(normalized, want_normalized, LIBRARY, f"{what}, normalized")
                assert_close(total[rows], want_sum[rows], LIBRARY, f"{what}, sum")
                # Or the next one could pass by leaving this memory as it finds it.
                for result in (normalized, total):
                    result.fill_(float("nan"))
                barrier()
        self.restore()


def _norm(total: Tensor, weight: Tensor) -> Tensor:
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * scale).to(total.dtype) * weight


def usable(shape: Shape, calls: dict[str, Call]) -> dict[str, Call]:
    """Without the baselines that refuse this shape (torch's ask for whole multiples of some alignment)."""
    found = {}
    for name, call in calls.items():
        try:
            call(0, shape.residual)
        except (RuntimeError, ValueError) as refused:  # by a check of the arguments: all ranks alike
            line = str(refused).splitlines()[0]
            shape.place.say(f"{shape.case.tokens} x {shape.case.hidden}: {name} does not run: {line[:100]}")
            continue
        found[name] = call
    shape.restore()
    return found


def measure(
    place: Place,
    case: Case,
    variants: Sequence[Variant],
    symmetric: SymmetricBuffers | None,
    effort: Effort,
    num_calls: int = 0,
) -> dict[str, float]:
    """Microseconds a call by name, of the ranks the slowest, after all results were checked.

    Variants of form `sum` are measured by themselves, against baselines without a norm. `num_calls` 0: as many calls in
    a chain as make about a millisecond.
    """
    shape = Shape(place, case, symmetric)
    adds_only = any(variant.form is Form.SUM for variant in variants)
    calls: dict[str, Call] = usable(shape, shape.baselines(adds_only))
    calls |= {variant.name: shape.ours(variant) for variant in variants}
    two_shot = Algorithm.TWO_SHOT
    sharded = {each.name for each in variants if each.form is Form.SHARDED and each.row.algorithm is two_shot}
    shape.check(calls, frozenset(sharded))
    num_calls = num_calls or case.num_calls(place.world)

    def chained(call: Call) -> Step:
        def run() -> None:
            residual = shape.residual
            for index in range(num_calls):
                _, residual = call(index % case.rotation, residual)

        return run

    shape.alone(0, shape.residual)  # compiles, if nothing else did
    steps = {name: chained(call) for name, call in calls.items()}
    us = replayed_us(place, steps, effort, num_calls, shape.restore)
    if case.bytes > ROTATION[-1][0]:
        torch.cuda.empty_cache()
    return us


def ll_packet_variants(case: Case) -> list[Variant]:
    """LL packets where they may pay: their mailboxes grow with the tokens."""
    found = []
    if case.bytes <= peer.LL_ONE_SHOT_BYTES:
        found.append(Variant(KernelRow(case.tokens, Algorithm.ONE_SHOT, Transfer.LL_PACKET)))
    if case.bytes <= peer.LL_TWO_SHOT_BYTES:
        found.append(Variant(KernelRow(case.tokens, Algorithm.TWO_SHOT, Transfer.LL_PACKET)))
    return found


def bulk_variants(case: Case, ctas: Sequence[int]) -> list[Variant]:
    return [Variant(KernelRow(case.tokens, Algorithm.TWO_SHOT, Transfer.BULK, count)) for count in ctas]
