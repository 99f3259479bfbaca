"""All ranks of a group in one process: each of them has this process's weights and inputs.

A rank that computes is a rank that Dynamo traces, which is most of what tests of models cost. Where a test compares a
model with itself, compiled and not, ranks that are equal show the same as ranks that differ, for one trace: the sum
over `world` ranks is `world` times what this one has. What ranks do with their own shards is for real ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from weaveopt.ops.gemm_comm.all_reduce import op as gemm_all_reduce
from weaveopt.ops.reduction import op as all_reduce_norm
from weaveopt.ops.reduction import reference
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.operands import EpilogueOperands, QuantResults

TEST_ALL = os.environ.get("WEAVE_TEST_ALL") == "1"
"""True under `make test-all`: what equal ranks show otherwise is shown on real ranks too, and of forms, sizes and
random draws all are tested, not a part."""
BACKEND = "equal_ranks"
SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
"""Reductions of equal values that are the value."""


class _Done(dist._Work):
    def __init__(self, result: object) -> None:
        super().__init__()
        self._future: Future[object] = Future()
        self._future.set_result(result)

    def wait(self, timeout: object = None) -> bool:
        return True

    def get_future(self) -> Future[object]:
        return self._future


class EqualRanks(dist.ProcessGroup):
    """Collectives among ranks that are all like rank 0. What is not here torch refuses."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self._rank, self._world = rank, world
        self._name = ""

    def size(self) -> int:
        return self._world

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def pg_name(self) -> str:
        # torch's own groups keep their names when they are destroyed, and torch keeps meshes of such groups.
        self._name = str(dist.distributed_c10d._world.pg_names.get(self, self._name))
        return self._name

    @property
    def group_name(self) -> str:
        return self.pg_name

    def _reduce(self, tensor: Tensor, opts: dist.AllreduceOptions | dist.ReduceScatterOptions) -> None:
        if opts.reduceOp == dist.ReduceOp.SUM:
            tensor.mul_(self._world)
        else:
            assert opts.reduceOp in SAME, opts.reduceOp

    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions = dist.AllreduceOptions()) -> _Done:  # noqa: B008
        for tensor in tensors:
            self._reduce(tensor.detach(), opts)
        return _Done(tensors)

    allreduce_coalesced = allreduce

    @torch.no_grad()
    def all_gather_single(self, out: Tensor, own: Tensor, opts: object = None) -> _Done:
        for part in out.detach().chunk(self._world):
            part.copy_(own)
        return _Done(out)

    @torch.no_grad()
    def allgather(self, outs: list[list[Tensor]], owns: list[Tensor], opts: object = None) -> _Done:
        for parts, own in zip(outs, owns, strict=True):
            for part in parts:
                part.detach().copy_(own)
        return _Done(outs)

    @torch.no_grad()
    def reduce_scatter_single(
        self,
        out: Tensor,
        whole: Tensor,
        opts: dist.ReduceScatterOptions = dist.ReduceScatterOptions(),  # noqa: B008
    ) -> _Done:
        out.detach().copy_(whole.chunk(self._world)[self._rank])
        self._reduce(out.detach(), opts)
        return _Done(out)

    def broadcast(self, tensors: list[Tensor], opts: object = None) -> _Done:
        return _Done(tensors)

    def barrier(self, opts: object = None) -> _Done:
        return _Done([])

    def all_gather_single_coalesced(self, outs: list[Tensor], owns: list[Tensor], opts: object = None) -> _Done:
        for out, own in zip(outs, owns, strict=True):
            self.all_gather_single(out, own)
        return _Done(outs)

    def reduce_scatter_single_coalesced(
        self, outs: list[Tensor], wholes: list[Tensor],
        opts: dist.ReduceScatterOptions = dist.ReduceScatterOptions(),  # noqa: B008
    ) -> _Done:  # fmt: skip
        for out, whole in zip(outs, wholes, strict=True):
            self.reduce_scatter_single(out, whole, opts)
        return _Done(outs)

    # What torch before 2.13 called them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _make(store: dist.Store, rank: int, world: int, timeout: object) -> EqualRanks:
    return EqualRanks(rank, world)


dist.Backend.register_backend(BACKEND, _make, devices=["cpu"])


def _through_library(partial: Tensor, operands: EpilogueOperands, call: ReductionCall) -> QuantResults:
    """Equal ranks have no rows of their own: here every rank has every row of a residual that is sharded by tokens."""
    return reference.through_library(partial, operands, replace(call, residual_sharded=False))


@contextlib.contextmanager
def equal_ranks(world: int) -> Iterator[None]:
    """A process group of `world` equal ranks, in which weaveopt's reductions run through its own all-reduce."""
    variables = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.dict("os.environ", variables))
        for op in (all_reduce_norm, gemm_all_reduce):
            patches.enter_context(mock.patch.object(op, "_bind", lambda *_: None))
            patches.enter_context(mock.patch.object(op, "through_library", _through_library))
        dist.init_process_group(BACKEND, rank=0, world_size=world, store=dist.HashStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
            torch._dynamo.reset()  # what was compiled here counts against the recompile limit of later tests
