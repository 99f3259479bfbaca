"""`weave::expert_exchange`: a mixture whose experts and tokens are both sharded over the ranks of a group.

    owner, local_id = experts // num_experts, experts % num_experts             # of rank `owner`
    row[t, j] = act(x[t] @ gate_up[local_id].T + bias) @ down[local_id].T + bias    # there, in x's dtype
    y[t] = sum over j of weights[t, j] * row[t, j]                              # here, in fp32, rounded once

`x` is [tokens, hidden] in bf16, fp16 or fp32: this rank's own tokens, of which every rank has its own number, or none.
`experts` is [tokens, choices] int64: ids over all ranks; what is no rank's expert adds nothing. `weights` is [tokens,
choices], of any dtype. `gate_up` [num_experts, N, hidden], `down` [num_experts, hidden, N or N / 2] and their biases
are this rank's experts in x's dtype, of any strides; see `ExpertWeights`. `call` is an encoded `ExpertExchangeCall`.
The result is [tokens, hidden] in x's dtype.

Rows are sent and rounded as in transformers' all-to-all; the sum over choices is in fp32, where transformers' is in the
dtype of the weights. On `shm` one row is pushed for each (token, destination) into a place that no other rank writes,
the experts begin with this rank's own rows, and their results go into this rank's [token][choice] (the layout and the
order of FlashDMoE, section 3.2, without its kernel): bitwise the same from run to run. Ranks that hold batches of their
own (`same_tokens` is false) reserve the memory together in their first call. On `peer` the same is done by kernels
(`peer.py`). Where a rank has more tokens than `call.max_tokens`, or with fabric `library`, all ranks use the group's
all-to-all. All take the derivative through the library. Independent ranks (`independent`) pull the experts that they
lack instead (`weaveopt/ops/experts/exchange/pulled.py`): nobody waits, and there is no derivative.

The library's exchange waits for the device, and ranks with batches of their own ask each other's hosts for their
counts: no CUDA graph can hold either, and Inductor leaves `expert_exchange` out of its graphs. The overload
`expert_exchange.capturable` is the same operation where ranks have equally many tokens, on `peer`: it may be part of
them.

Raises `PeerTimeoutError` where a peer's signal does not come, `AgreementError` where a peer runs another site,
`ArenaError` where no arena was reserved, `WeaveError` for operands that do not fit together and for a call that is
captured in a CUDA graph and cannot be. After one of the first two the group's arena stays unusable.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from weaveopt.errors import AgreementError, ArenaError, WeaveError
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.fabrics.rows_call import BoundCalls, decode, memory_plan
from weaveopt.ops.experts.by_expert import ExpertWeights
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall, RowTraffic, check
from weaveopt.ops.experts.exchange.library import derivative, through_library
from weaveopt.ops.experts.exchange.pulled import no_derivative, pulled
from weaveopt.ops.experts.shapes import ARGUMENTS, TAGS, traced_result
from weaveopt.ops.experts.sharded import counts
from weaveopt.ops.experts.sharded.peer import PeerExpertExchange
from weaveopt.ops.experts.sharded.shm import ShmExpertExchange
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer

Tensor = torch.Tensor
NAME = "expert_exchange"
CAPTURABLE = "expert_exchange.capturable"


class BoundExpertExchange(Protocol):
    """A call that runs as it was bound."""

    @property
    def traffic(self) -> RowTraffic: ...

    def run(self, x: Tensor, experts: Tensor, weights: Tensor, operands: ExpertWeights) -> Tensor | None:
        """[tokens, hidden]; None where the library has to run, on all ranks."""
        ...


class FabricSite(BoundExpertExchange, Protocol):
    """A call bound to the arena of its group."""

    @staticmethod
    def buffers(call: ExpertExchangeCall) -> tuple[Buffer, ...]:
        """Arena buffers of the call on every rank."""
        ...

    @staticmethod
    def bind(call: ExpertExchangeCall, text: str, op: str, forget: Callable[[], None]) -> BoundExpertExchange:
        """`call`, encoded as `text`, of the operator `op`; `forget` runs when the arena goes.

        Raises `ArenaError` if no arena was reserved or the call does not fit it.
        """
        ...


class LibrarySite:
    """A call whose arena could not be had, on any rank."""

    traffic = RowTraffic(0, 0)

    def run(self, x: Tensor, experts: Tensor, weights: Tensor, operands: ExpertWeights) -> Tensor | None:
        return None


SITES: Mapping[Fabric, type[FabricSite]] = MappingProxyType(
    {Fabric.SHM: ShmExpertExchange, Fabric.PEER: PeerExpertExchange}
)
"""Implementation of a call by fabric; the library's is not bound to an arena."""


def _bind(call: ExpertExchangeCall, text: str, forget: Callable[[], None]) -> BoundExpertExchange | None:
    kind = SITES.get(call.fabric)
    if kind is None:
        return None
    if not call.same_tokens and not reserve(call, text, kind.buffers(call)):
        return LibrarySite()
    return kind.bind(call, text, NAME, forget)


_bound: BoundCalls[ExpertExchangeCall, BoundExpertExchange] = BoundCalls(ExpertExchangeCall, _bind)


def traffic(call: str, device: str = "cpu") -> RowTraffic | None:
    """Traffic of the encoded `call` so far; None if no fabric of ranks of that device runs it."""
    site = _bound.of(device, call)
    return None if site is None else site.traffic


def _run(device: str, x: Tensor, experts: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    operands, call = ExpertWeights(*rest[:-1]), rest[-1]
    decoded = decode(ExpertExchangeCall, call)
    if decoded.independent:
        _expect_no_capture(device, decoded, "its ranks are independent, and pull what they lack through the host")
        with torch._C._AutoDispatchBelowAutograd():
            return pulled(x, experts, weights, operands, decoded)
    if not decoded.same_tokens:
        # Before ranks synchronize for it: one that captures a graph cannot take part.
        _expect_no_capture(device, decoded, "its ranks hold batches of their own, and exchange their sizes")
    with torch._C._AutoDispatchBelowAutograd():
        site = _bound.of(device, call)
        result = None if site is None else site.run(x, experts, weights, operands)
        if result is not None:
            return result
        check(x, experts, weights, operands, decoded)
        _expect_no_capture(
            device, decoded, "it goes through the process group's all-to-all, which waits for the device"
        )
        return through_library(x, experts, weights, operands, decoded)


def _run_backward(device: str, grad: Tensor, x: Tensor, experts: Tensor, weights: Tensor, *rest: Any) -> list[Tensor]:
    operands, call = ExpertWeights(*rest[:-1]), decode(ExpertExchangeCall, rest[-1])
    if call.independent:
        raise no_derivative(call)
    _expect_no_capture(device, call, "its derivative goes through the process group's all-to-all")
    return list(derivative(grad, x, experts, weights, operands, call))


def _expect_no_capture(device: str, call: ExpertExchangeCall, why: str) -> None:
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        raise WeaveError(
            f"weave::{NAME} at site {call.site}, group {call.group!r}: a CUDA graph cannot hold the call: {why}. "
            'Capture what runs between such calls, as torch.compile(mode="reduce-overhead") does'
        )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.call = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    found = iter(torch.ops.weave.expert_exchange_backward(grad, *saved, ctx.call))
    # Ids have none, and operands that are not there.
    grads = [None if at == 1 or each is None else next(found) for at, each in enumerate(saved)]
    return (*grads, None)


def reserve(call: ExpertExchangeCall, text: str, buffers: Sequence[Buffer]) -> bool:
    """Reserves an arena for `call` and returns true on all ranks, or warns of the reason and returns false: the library
    runs then.

    Ranks that hold batches of their own compile graphs of other sizes, at other times, so nothing can be compared or
    reserved while they compile. But they make the same calls in the same order, and every rank comes to its first one.
    `text` is the encoded call. Raises `AgreementError` where a rank calls something else, or does not come within the
    call's timeout.
    """
    group, timeout_s = call.group, call.timeout_s
    known = topology.discover(group, timeout_s)
    channel = topology.exchange(group, timeout_s)
    answers = channel.gather({"call": text}, "an exchange of experts", timeout_s)
    calls, ranks = [str(record["call"]) for record in answers], known.group.ranks
    for rank, other in zip(ranks, calls, strict=True):
        if other != calls[0]:
            channel.settle()
            raise AgreementError(
                f"group {group!r}: rank {ranks[0]} exchanges experts by {calls[0]}, rank {rank} by {other}. Start all "
                "ranks with the same options, versions and model."
            )
    plan = memory_plan(group, [(call, buffers)])
    try:
        transport(call.fabric).reserve(known, plan, call.arena_bytes, timeout_s)
        if call.fabric is Fabric.PEER:
            counts.reserve(known, call)
    except ArenaError as error:
        warnings.warn(f"weaveopt: experts are exchanged through the library: {error}", stacklevel=2)
        return False
    return True


def _fake_backward(grad: Tensor, x: Tensor, experts: Tensor, weights: Tensor, *rest: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (x, weights, *rest[:-1]) if each is not None]


_library = torch.library.Library("weave", "FRAGMENT")
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
"""Keeps an operation out of CUDA graphs; not every version of torch has it."""
_NO_CAPTURE = TAGS if _UNSAFE is None else (*TAGS, _UNSAFE)
_BACKWARD = f"{NAME}_backward"
_library.define(f"{NAME}({ARGUMENTS}) -> Tensor", tags=_NO_CAPTURE)
_library.define(f"{CAPTURABLE}({ARGUMENTS}) -> Tensor", tags=TAGS)
_library.define(f"{_BACKWARD}(Tensor grad, {ARGUMENTS}) -> Tensor[]", tags=_NO_CAPTURE)
for _name, _function in ((NAME, _run), (CAPTURABLE, _run), (_BACKWARD, _run_backward)):
    for _device in ("cpu", "cuda"):
        _library.impl(_name, functools.partial(_function, _device), _device.upper())
torch.library.register_fake(f"weave::{_BACKWARD}", _fake_backward, lib=_library)
for _name in (NAME, CAPTURABLE):
    torch.library.register_fake(f"weave::{_name}", traced_result, lib=_library)
    torch.library.register_autograd(f"weave::{_name}", _backward, setup_context=_save, lib=_library)
