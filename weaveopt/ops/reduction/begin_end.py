"""`weave::all_reduce_norm_begin` and `all_reduce_norm_end`: `all_reduce_norm_quant` in two operators, and work between.

    results = begin(partial, ..., call)        # normalized, sum, row_scale: allocated, and not to be read yet
    ...                                        # runs while rows are exchanged
    end(results, operands, started, call)      # results == all_reduce_norm_quant(partial, ..., call), bit for bit

Shapes, dtypes, `call` and all operands are those of `weaveopt.ops.reduction.op`; `row_scale` is empty [0] unless
call.quant is `per_token`. `call.begun` is set. `operands` of the end are the tensors that the begin was given, which
are in use until then; they are not read there. `started` are results of other calls in flight that begin before this
one ends (`weaveopt.records.order`), which are not read either. A site ends before it begins again.

| fabric | between begin and end |
|---|---|
| GPUs | the kernel runs on the group's communication stream, on a channel with buffers of its own |
| `tcp` | the call runs on the group's thread, after those that were begun before |
| `shm` | nothing: the call runs in its begin, as it would take the same cores |
| `library` | the library's all-reduce is in flight; what follows it runs in the end |

Where the library has to run in place of a kernel (see `op`), it runs as in the last row on CPU ranks, and on GPUs in
the begin, after all calls in flight: two kernels that wait for peers could keep each other from starting.

The end raises what the call raised, and `WeaveError` for results of another call. After an error of a call the group's
arena stays unusable.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics.traits import TRAITS
from weaveopt.ops.reduction.call import ReductionCall, decode
from weaveopt.ops.reduction.in_flight import Ended, Flight, Starter, empty_results, start_library
from weaveopt.ops.reduction.operands import Argument, EpilogueOperands, split
from weaveopt.ops.reduction.peer_flight import HostStarter, NvshmemStarter, PeerStarter
from weaveopt.ops.reduction.reference import through_library
from weaveopt.ops.reduction.shm import ShmReduction
from weaveopt.ops.reduction.tcp import TcpSite
from weaveopt.records.candidate import Fabric

Tensor = torch.Tensor

OP = "all_reduce_norm_begin"
STARTERS: Mapping[Fabric, type[Starter]] = MappingProxyType({
    Fabric.SHM: ShmReduction,
    Fabric.TCP: TcpSite,
    Fabric.PEER: PeerStarter,
    Fabric.MULTIMEM: PeerStarter,
    Fabric.HOST: HostStarter,
    Fabric.NVSHMEM: NvshmemStarter,
})  # fmt: skip
"""Implementation of a begun call by fabric; the library's is not bound to an arena."""

_bound: Mapping[str, dict[str, Starter]] = MappingProxyType({"cpu": {}, "cuda": {}})
"""Sites by device and encoded call, bound to the arena that they ran in last."""
_in_flight: Mapping[str, dict[str, Flight]] = MappingProxyType({"cpu": {}, "cuda": {}})
"""Calls between their begin and their end, by device and encoded call."""


def _bind(device: str, text: str, call: ReductionCall) -> Starter | None:
    """The bound site; None where the library runs, as for tensors of a device that the fabric does not join."""
    kind = STARTERS.get(call.fabric)
    if kind is None or TRAITS[call.fabric].device != device:
        return None
    site = _bound[device][text] = kind.bind(call, text, OP, functools.partial(_forget, device, text))
    return site


def _forget(device: str, text: str) -> None:
    _bound[device].pop(text, None)


def _start(device: str, partial: Tensor, operands: EpilogueOperands, text: str) -> Flight:
    call = decode(text)
    site = _bound[device].get(text) or _bind(device, text, call)
    flight = None if site is None else site.start(partial, operands)
    if flight is not None:
        return flight
    if device == "cuda" and site is not None:
        return Ended(through_library(partial.clone(memory_format=torch.contiguous_format), operands, call))
    return start_library(partial, operands, call)


def _begin(device: str, partial: Tensor, *rest: Argument) -> list[Tensor]:
    operands, text = split(rest)
    abandoned = _in_flight[device].pop(text, None)
    if abandoned is not None:  # an exception came between its begin and its end
        with suppress(WeaveError):
            abandoned.end()
    flight = _in_flight[device][text] = _start(device, partial, operands, text)
    return list(flight.results)


def _end(device: str, results: list[Tensor], operands: list[Tensor], started: list[Tensor], text: str) -> None:
    flight = _in_flight[device].pop(text, None)
    if flight is None or any(a.data_ptr() != b.data_ptr() for a, b in zip(results, flight.results, strict=True)):
        raise WeaveError(
            f"weave::all_reduce_norm_end at site {decode(text).site}: "
            f"{'no call is in flight' if flight is None else 'the call in flight has other results'}: pass it what "
            "all_reduce_norm_begin returned, once"
        )
    flight.end()


def _fake_begin(partial: Tensor, *rest: Argument) -> list[Tensor]:
    operands, text = split(rest)
    return list(empty_results(partial, partial.shape, operands, decode(text)))


def _fake_end(results: list[Tensor], operands: list[Tensor], started: list[Tensor], text: str) -> None:
    return None


_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library = torch.library.Library("weave", "FRAGMENT")
_library.define(
    "all_reduce_norm_begin(Tensor partial, Tensor? reduced_bias, Tensor? scale, Tensor? residual, Tensor? post_weight, "
    "Tensor? post_bias, Tensor? weight, Tensor? bias, Tensor? quant_scale, str call) -> Tensor[]",
    tags=_TAGS,
)
_library.define(
    "all_reduce_norm_end(Tensor(a!)[] results, Tensor[] operands, Tensor[] started, str call) -> ()", tags=_TAGS
)
for _device in _bound:
    _library.impl("all_reduce_norm_begin", functools.partial(_begin, _device), _device.upper())
    _library.impl("all_reduce_norm_end", functools.partial(_end, _device), _device.upper())
torch.library.register_fake("weave::all_reduce_norm_begin", _fake_begin, lib=_library)
torch.library.register_fake("weave::all_reduce_norm_end", _fake_end, lib=_library)
