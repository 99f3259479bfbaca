"""Calls of this family between their begin and their end, on any fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from weaveopt.errors import WeaveError
from weaveopt.fabrics import topology
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands, QuantResults
from weaveopt.ops.reduction.reference import finish, row_scale_shape, through_library

Tensor = torch.Tensor


class Flight(Protocol):
    """A call that was begun. It keeps every tensor that the call uses."""

    @property
    def results(self) -> QuantResults:
        """normalized, sum and row_scale: allocated, and not to be read before `end`."""
        ...

    def end(self) -> None:
        """Have what follows run after the call; raises what the call raised."""
        ...


class Starter(Protocol):
    """A call bound to the arena of its group, to be begun."""

    @staticmethod
    def bind(call: ReductionCall, text: str, op: str, forget: Callable[[], None]) -> Starter:
        """As `BoundSite.bind`."""
        ...

    def start(self, partial: Tensor, operands: EpilogueOperands) -> Flight | None:
        """Begin the call on the rows of `partial`. None: the library has to run, and no other call is in flight in a
        way that it could be blocked by."""
        ...


class Ended:
    """A call that ran when it was begun."""

    def __init__(self, results: tuple[Tensor, Tensor, Tensor | None]) -> None:
        normalized, total, row_scale = results
        self.results: QuantResults = (normalized, total, no_scale(total) if row_scale is None else row_scale)

    def end(self) -> None:
        """Nothing is left to do."""


class LibraryFlight:
    """A call through the library: its all-reduce is in flight, and the rest runs at the end, on the current stream."""

    def __init__(self, partial: Tensor, operands: EpilogueOperands, call: ReductionCall) -> None:
        assert not call.residual_sharded, f"site {call.site}: a second all-reduce follows the first one"
        self._sum = partial.clone(memory_format=torch.contiguous_format)
        self._operands, self._call = operands, call
        self._work = dist.all_reduce(self._sum, group=topology.process_group(call.group), async_op=True)
        self.results = empty_results(partial, partial.shape, operands, call)

    def end(self) -> None:
        if self._work is not None:
            self._work.wait()
        for result, value in zip(self.results, finish(self._sum.float(), self._operands, self._call), strict=True):
            result.copy_(value)


def start_library(partial: Tensor, operands: EpilogueOperands, call: ReductionCall) -> Flight:
    """Begin a call through the library. One whose residual is sharded needs two collectives, and runs at once."""
    if call.residual_sharded:
        return Ended(through_library(partial.clone(memory_format=torch.contiguous_format), operands, call))
    return LibraryFlight(partial, operands, call)


def result_shape(shape: torch.Size | tuple[int, ...], operands: EpilogueOperands) -> torch.Size | tuple[int, ...]:
    """Shape of the results: the residual's, if there is one."""
    return shape if operands.residual is None else operands.residual.shape


def empty_results(
    like: Tensor, shape: torch.Size | tuple[int, ...], operands: EpilogueOperands, call: ReductionCall
) -> QuantResults:
    """normalized, sum and row_scale of a partial result [`shape`], not computed; `like` has its dtype and device."""
    if like.dtype is not getattr(torch, call.dtype):
        raise WeaveError(f"site {call.site}: planned for {call.dtype}, called with {like.dtype}")
    shape = result_shape(shape, operands)
    normalized = like.new_empty(0 if call.norm is None else shape, dtype=getattr(torch, call.out_dtype))
    total = like.new_empty(0 if call.sum_out is SumOut.NONE else shape, dtype=getattr(torch, call.dtype))
    return normalized, total, like.new_empty(row_scale_shape(shape, call), dtype=torch.float32)


def no_scale(like: Tensor) -> Tensor:
    """The row_scale of rows that have none."""
    return like.new_empty(0, dtype=torch.float32)
