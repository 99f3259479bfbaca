"""Calls of the fused all-reduce + add + norm, by one kernel at one size, as compiled graphs make them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.measure.clock import Clock, Launch
from weaveopt.measure.ranks import Ranks
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

Tensor = torch.Tensor
DTYPE = torch.bfloat16
EPS = 1e-5
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Fused:
    """A kernel of the fused all-reduce + add + norm at one size, residual and sum sharded by tokens."""

    row: KernelRow
    hidden: int
    tokens: int

    @property
    def bytes(self) -> int:
        return self.tokens * self.hidden * DTYPE.itemsize


def is_supported(fused: Fused, world: int, device: torch.device) -> bool:
    """True if the device supports this kernel for such rows; otherwise the op silently uses the library."""
    if device.type != "cuda":
        return True
    from weaveopt import _native
    from weaveopt.ops.reduction.peer import native_kernel

    kernel, dtype = native_kernel(fused.row), _native.DType.bfloat16
    return not _native.unsupported(kernel, dtype, fused.hidden, world, False, device.index or 0)


def peer_call(site: str, group: str, world: int, fused: Fused, sharded: bool) -> ReductionCall:
    """Build the op's call with one kernel. `sharded`: residual and sum by tokens, else whole on every rank.

    Its rows may stay in the arena, as if only GEMMs read them; the copy out of it is not included.
    """
    return ReductionCall(
        site=site, group=group, fabric=Fabric.PEER, world=world, hidden=fused.hidden, dtype="bfloat16",
        out_dtype="bfloat16", max_tokens=fused.tokens,
        post=None, norm=NormSpec(NormKind.RMS, EPS, cast_before_weight=True),
        timeout_s=TIMEOUT_S, residual_sharded=sharded, sum_out=SumOut.SHARDED if sharded else SumOut.WHOLE,
        table=(fused.row,), normalized_aliases_arena=True,
    )  # fmt: skip


def reserve(ranks: Ranks, calls: list[ReductionCall]) -> None:
    """The arena for all of them, before any is captured: graphs hold its addresses."""
    known = topology.discover(ranks.name, TIMEOUT_S)
    plan = memory_plan(ranks.name, calls)
    transport(plan.fabric).reserve(known, plan, 0, TIMEOUT_S)


def host_memory_call(site: str, group: str, world: int, fused: Fused, sharded: bool) -> ReductionCall:
    """The op on `host`: its rows do not stay in the arena, where GEMMs would read them over PCIe."""
    return replace(
        peer_call(site, group, world, fused, sharded), fabric=Fabric.HOST, normalized_aliases_arena=False
    )  # fmt: skip


def reserve_host_memory(ranks: Ranks, every: list[Fused]) -> None:
    reserve(ranks, [host_memory_call(_site(each), ranks.name, ranks.world, each, True) for each in every])


def fused_host_memory(ranks: Ranks, fused: Fused) -> Launch:
    """The op on `host`, which sends a partial result from where it is."""
    return _repeated(ranks, fused, host_memory_call(_site(fused), ranks.name, ranks.world, fused, True))


def reserve_peer(ranks: Ranks, every: list[Fused]) -> None:
    reserve(ranks, [peer_call(_site(each), ranks.name, ranks.world, each, True) for each in every])


def host_call(ranks: Ranks, hosts: int, fused: Fused) -> ReductionCall:
    """The op on `nvshmem`, residual and sum whole."""
    return replace(
        peer_call(_site(fused), ranks.name, ranks.world, fused, False),
        fabric=Fabric.NVSHMEM, hosts=hosts, normalized_aliases_arena=False,
    )  # fmt: skip


def reserve_hosts(ranks: Ranks, hosts: int, every: list[Fused]) -> None:
    reserve(ranks, [host_call(ranks, hosts, each) for each in every])


def fused_hosts(ranks: Ranks, hosts: int, fused: Fused) -> Launch:
    """The op on `nvshmem`, which sends a partial result from where it is."""
    return _repeated(ranks, fused, host_call(ranks, hosts, fused))


def reserve_shm(ranks: Ranks, hidden: int, max_tokens: int) -> None:
    """The shared segment of CPU ranks."""
    largest = Fused(KernelRow(0, Algorithm.TWO_SHOT, Transfer.SEGMENT), hidden, max_tokens)
    reserve(ranks, [shm_call(ranks, largest, max_tokens)])


def fused_peer(ranks: Ranks, fused: Fused) -> Launch:
    """The op on `peer`, which sends a partial result from where it is."""
    return _repeated(ranks, fused, peer_call(_site(fused), ranks.name, ranks.world, fused, True))


def copy_us(clock: Clock, ranks: Ranks, tokens: int, hidden: int) -> float:
    """Time of the op's copy into the arena on `shm`, which in a model is the GEMM's write and no part of the
    exchange."""
    source, target = torch.randn(2, tokens, hidden, device=ranks.device).to(DTYPE).unbind()
    return clock.together(lambda index: target.copy_(source), 10.0, ranks.process_group).us


def shm_call(ranks: Ranks, fused: Fused, max_tokens: int, sharded: bool = True) -> ReductionCall:
    """The op on `shm`, for up to `max_tokens` tokens."""
    return replace(
        peer_call(_site(fused), ranks.name, ranks.world, fused, sharded),
        fabric=Fabric.SHM, table=(), normalized_aliases_arena=False, max_tokens=max_tokens,
        one_shot_max_tokens=max_tokens if fused.row.algorithm is Algorithm.ONE_SHOT else 0,
    )  # fmt: skip


def fused_shm(ranks: Ranks, fused: Fused, max_tokens: int, sharded: bool = True) -> Launch:
    """The op on `shm`; its partial result is copied into the arena by the op."""
    return _repeated(ranks, fused, shm_call(ranks, fused, max_tokens, sharded))


def _site(fused: Fused) -> str:
    return f"calibrate.{fused.hidden}.{fused.tokens}.{fused.row}"


def _repeated(ranks: Ranks, fused: Fused, call: ReductionCall) -> Launch:
    # The same on all ranks, as a residual is; of one of zeros alone every call would compare it again.
    numbers = torch.Generator(ranks.device).manual_seed(fused.tokens)
    size, device = (fused.tokens, fused.hidden), ranks.device
    *partials, residual = (torch.randn(size, generator=numbers, device=device).to(DTYPE) for _ in range(3))
    weight = torch.ones(fused.hidden, device=device, dtype=DTYPE)
    op, site = torch.ops.weave.all_reduce_norm.default, call.encode()

    def run(index: int) -> object:
        return op(partials[index % 2], None, None, residual, None, None, weight, None, site)

    return run
