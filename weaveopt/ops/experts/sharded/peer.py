"""`expert_exchange` on GPUs of one host: rows into the memory of their experts' ranks, and results into ours.

A call is five kernels or six, one after another on the stream: dispatch, which ends when every rank's rows are here;
routing of all of them by expert; two GEMMs, of which the second one stores its rows at the ranks that they came from;
and a sum, which begins when every rank's results are here. Nothing waits for the device and nothing is allocated but
the call's tensors, so it can be captured in a CUDA graph. Rows between the GEMMs have room for all ranks' choices, as
their number is not known on the host.

Ranks that hold batches of their own ask each other's hosts first who has most (`counts.py`): each source has room for
so many tokens in the call. No graph can hold the hosts' exchange, so such a call cannot be captured.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import torch

from weaveopt.errors import ArenaError
from weaveopt.fabrics import peer as arena
from weaveopt.fabrics import watchdog
from weaveopt.fabrics.lasting import lasting_tensors
from weaveopt.fabrics.peer import PeerArena
from weaveopt.fabrics.peer_rows import VECTOR_BYTES
from weaveopt.fabrics.traits import TRAITS
from weaveopt.ops.experts import gpu, hopper
from weaveopt.ops.experts.by_expert import ExpertWeights
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall, RowTraffic, check
from weaveopt.ops.experts.gpu import MAX_CHOICES, MAX_EXPERTS
from weaveopt.ops.experts.shapes import ExpertOperands, ExpertsShape
from weaveopt.ops.experts.sharded.buffers import needed, placed
from weaveopt.ops.experts.sharded.counts import ExchangedCounts
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: arena.of() says so before anything here is needed
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the routing weights that the sum can read."""

MOST_ROWS = 1 << 28
"""Choices of a rank's tokens: a row's slot in the combine buffer is a number of 28 bits."""
MOST_CHUNKS = 1 << 31
"""Most chunks of 8 elements in the rows of all ranks' tokens."""


def refusal(world: int, max_tokens: int, choices: int, experts: int, hidden: int) -> str:
    """Why the kernels do not take calls of up to `max_tokens` tokens a rank; empty where they do."""
    if experts > MAX_EXPERTS:
        return f"the kernels sort rows by up to {MAX_EXPERTS} experts of a rank"
    if choices > MAX_CHOICES:
        return f"the kernels support up to {MAX_CHOICES} choices of a token"
    if max_tokens * choices >= MOST_ROWS or world * max_tokens * (-(-hidden // 8)) >= MOST_CHUNKS:
        return (
            "the kernels count rows of the tokens' choices, and pieces of 16 bytes in the rows of all ranks, in 32 bits"
        )
    return ""


class PeerExpertExchange:
    """One site, ready to run."""

    __slots__ = (
        "_arena",
        "_buffers",
        "_call",
        "_counted",
        "_counts",
        "_experts_call",
        "_ids",
        "_native",
        "_rows",
        "_where"
    )  # fmt: skip

    def __init__(
        self, call: ExpertExchangeCall, tag: int, memory: PeerArena, where: str, counts: ExchangedCounts | None = None
    ) -> None:
        """`counts`: where ranks hold batches of their own."""
        site = _native.GpuShardedMixtureSite()
        header = TRAITS[call.fabric].header_bytes
        dispatch, combine = placed(call, self.buffers(call), memory)
        site.dispatch_offset, site.combine_offset = memory.native_offset(dispatch), memory.native_offset(combine)
        site.tag, site.channel, site.timeout_s = tag, call.channel, call.timeout_s
        site.max_tokens, site.choices, site.num_experts = call.max_tokens, call.choices, call.num_experts
        site.hidden, site.dtype = call.hidden, getattr(_native.DType, call.dtype)
        try:
            self._native = _native.GpuShardedMixture(memory.native, site)
        except ValueError as error:
            raise ArenaError(f"site {call.site}: {error}") from None
        self._call, self._arena, self._where, self._counts = call, memory, where, counts
        act = call.act
        self._experts_call = ExpertsCall(act.name, act.gated, act.interleaved, act.alpha, act.limit)
        slots, dtype = call.world * call.max_tokens, getattr(torch, call.dtype)
        self._rows = memory.tensor(self._native.rows_offset - header, (slots, call.hidden), dtype)
        self._ids = memory.tensor(self._native.ids_offset - header, (slots, call.choices), torch.int64)
        with lasting_tensors():
            self._buffers = torch.tensor(self._native.result_buffers, dtype=torch.int64, device=self._rows.device)
            self._counted = torch.zeros(2, dtype=torch.int64, device=self._rows.device)

    @staticmethod
    def buffers(call: ExpertExchangeCall) -> tuple[Buffer, ...]:
        """Arena buffers of the call on every rank: rows that all ranks push here, and results returned to this one.

        Raises `WeaveError` without the native module.
        """
        return needed(call, Fabric.PEER)

    @staticmethod
    def bind(call: ExpertExchangeCall, text: str, op: str, forget: Callable[[], None]) -> PeerExpertExchange:
        """Raises `ArenaError` if no arena was reserved or the call does not fit it."""
        memory = arena.of(call.group)
        if len(memory.group.ranks) != call.world:
            raise ArenaError(
                f"site {call.site}: planned for {counted(call.world, 'rank')}, group has {len(memory.group.ranks)}"
            )
        if call.max_tokens > watchdog.MAX_TOKENS:
            raise ArenaError(
                f"site {call.site}: {counted(call.max_tokens, 'token')}, the kernels count to {watchdog.MAX_TOKENS}"
            )
        # Of the whole call: ranks whose plans differ in anything notice it at the first synchronization.
        tag = watchdog.tag_of(zlib.crc32(text.encode()))
        rank = memory.group.ranks[memory.group.rank]
        where = f"weave::{op} at site {call.site}, group {call.group!r}, rank {rank}"
        counts = None if call.same_tokens else ExchangedCounts(call, text, op, forget)
        site = PeerExpertExchange(call, tag, memory, where, counts)
        watchdog.name_site(tag, watchdog.NamedSite(op, call.site, call.timeout_s))
        memory.at_close(forget)
        return site

    @property
    def traffic(self) -> RowTraffic:
        """Waits for the device."""
        pushed, returned = self._counted.tolist()
        return RowTraffic(pushed, returned)

    def run(self, x: Tensor, experts: Tensor, weights: Tensor, operands: ExpertWeights) -> Tensor | None:
        """[tokens, hidden]; None, on all ranks, where one has more tokens than were planned for, or the kernels do not
        take the weights."""
        call = self._call
        check(x, experts, weights, operands, call)
        slot_tokens = self._most_tokens(x.shape[0])
        if slot_tokens == 0:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        shape = self._shape(slot_tokens, operands)
        if slot_tokens > call.max_tokens or not gpu.has_kernels(self._received(slot_tokens, operands), shape):
            return None
        return self._exchange(x, experts.contiguous(), weights, operands, shape, slot_tokens)

    def _most_tokens(self, tokens: int) -> int:
        """Largest token count of any rank, of which this one has `tokens`; the same on all."""
        if self._counts is None:
            return tokens
        self._arena.begin_call()  # before this rank waits for others: they may have given up on it
        return self._counts.largest(tokens)

    def _exchange(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        operands: ExpertWeights,
        shape: ExpertsShape,
        slot_tokens: int,
    ) -> Tensor:
        with torch.cuda.device(self._arena.device):
            stream = torch.cuda.current_stream().cuda_stream
            self.dispatch(x, experts, slot_tokens, stream)
            received = self._received(slot_tokens, operands)
            by_hopper = self._call.kernels_at(slot_tokens) == ExpertsKernel.HOPPER and not hopper.unsupported(
                received, shape
            )
            (self._through_hopper if by_hopper else self._through_triton)(received, shape, slot_tokens, stream)
            return self.combine(x, experts, weights, slot_tokens, stream)

    def dispatch(self, x: Tensor, experts: Tensor, slot_tokens: int, stream: int) -> None:
        """Ends on the device when the rows of all ranks have come. `experts` is contiguous.

        Raises why nothing can run here any more.
        """
        self._arena.begin_call()
        if x.stride(1) != 1 or (x.data_ptr() | x.stride(0) * x.element_size()) % VECTOR_BYTES:
            x = x.clone(memory_format=torch.contiguous_format)
        self._check(
            self._native.dispatch(
                x.shape[0], slot_tokens, x.data_ptr(), x.stride(0), experts.data_ptr(), self._counted.data_ptr(), stream
            )
        )

    def combine(self, x: Tensor, experts: Tensor, weights: Tensor, slot_tokens: int, stream: int) -> Tensor:
        """The sum over the choices of tokens like `x`, once the rows of all ranks have come.

        Raises why nothing can run here any more.
        """
        self._arena.begin_call()
        factors = weights if weights.dtype in _WEIGHTS else weights.float()
        factors = factors.contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        kind = getattr(_native.DType, str(factors.dtype).removeprefix("torch."))
        self._check(
            self._native.combine(
                x.shape[0], slot_tokens, experts.data_ptr(), factors.data_ptr(), kind, out.data_ptr(), stream
            )
        )
        return out

    def _through_triton(self, received: ExpertOperands, shape: ExpertsShape, slot_tokens: int, stream: int) -> None:
        how = replace(gpu.planned(shape, received.x.device, self._call.gated), splits=1)
        early = how.early and gpu.may_launch_early(received.x.device)
        order, table = gpu.route(received.experts, shape, how, early)
        weights = received.of_experts
        inner = gpu.first_gemm(received.x, order, table, weights, self._experts_call, shape, how)
        gpu.second_gemm(inner, order, table, weights, self._buffers, shape, how, slot_tokens * shape.choices)

    def _through_hopper(self, received: ExpertOperands, shape: ExpertsShape, slot_tokens: int, stream: int) -> None:
        how = hopper.plan(shape)
        order, table = gpu.route(received.experts, shape, how, how.early)
        weights, routing = received.of_experts, hopper.routing_of(order, table, shape, how)
        inner = hopper.first_gemm(received.x, routing, weights, self._experts_call, shape, how)
        bias = hopper.dense(weights.down_bias)
        code = self._native.down(
            slot_tokens, inner.data_ptr(), shape.inner, hopper.weight_of(weights.down, bias), routing, stream
        )
        hopper.expect_taken(code, "second GEMM", shape)

    def _received(self, slot_tokens: int, operands: ExpertWeights) -> ExpertOperands:
        """Received rows as one rank's tokens; there are no routing weights here."""
        slots = self._call.world * slot_tokens
        ids = self._ids[:slots]
        return ExpertOperands(self._rows[:slots], ids, ids, *operands)

    def _shape(self, slot_tokens: int, operands: ExpertWeights) -> ExpertsShape:
        """Shape of the experts' kernels: all ranks' tokens, since the host does not know which of them were
        received."""
        call, gate_up = self._call, operands.gate_up
        transposed = gate_up.stride(1) == 1 != gate_up.stride(2)
        return ExpertsShape(
            call.world * slot_tokens, call.choices, call.num_experts, call.hidden, operands.down.shape[2], transposed
        )

    def _check(self, code: int) -> None:
        if code:
            watchdog.fail(
                self._arena, f"{self._where}: the kernel could not be launched: {_native.cuda_error_text(code)}"
            )
