"""`all_reduce_norm` on the fabric `shm`: a site bound to its group's arena, and the call into native code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import torch

from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics import shm as arena
from weaveopt.fabrics.arena import Arena
from weaveopt.fabrics.native_record import NativeRecord
from weaveopt.fabrics.shm_calls import Caller, failure, tag_of
from weaveopt.ops.reduction.buffers import NUM_PARTIALS, OUTPUT, PARTIAL, ByteRange, expect_world, locate
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.in_flight import Ended, Flight
from weaveopt.ops.reduction.native import native_norm
from weaveopt.ops.reduction.operands import DeferredGemm, EpilogueOperands, Results
from weaveopt.ops.reduction.replication import Replication
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: arena.of() says so before anything here is needed
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor


def native_site(call: ReductionCall, text: str, buffers: Mapping[str, ByteRange]) -> _native.AllReduceNormSite:
    """The constants of `call`, encoded as `text`, as native code takes them; `buffers` has the ranges of
    its buffers."""
    site = _native.AllReduceNormSite()
    site.tag = tag_of(call.site, text)
    site.hidden = call.hidden
    site.dtype = getattr(_native.DType, call.dtype)
    site.out_dtype = getattr(_native.DType, call.out_dtype)
    layout = _native.Layout()
    layout.partial_offset = buffers[PARTIAL].offset
    layout.partial_bytes = buffers[PARTIAL].num_bytes // NUM_PARTIALS
    layout.output_offset = buffers[OUTPUT].offset
    site.layout = layout
    site.max_tokens = call.max_tokens
    site.one_shot_max_tokens = call.one_shot_max_tokens
    site.post = native_norm(call.post)
    site.norm = native_norm(call.norm)
    site.sum_out = getattr(_native.SumOut, call.sum_out.value)
    site.timeout_s = call.timeout_s
    return site


class ShmReduction:
    """One site, ready to run. Everything that does not change from call to call is an attribute."""

    __slots__ = (
        "_arena",
        "_call",
        "_dtype",
        "_hidden",
        "_max_tokens",
        "_native",
        "_normalized_dtype",
        "_op",
        "_parameters",
        "_partials",
        "_scale",
        "_sum",
        "replication",
    )  # fmt: skip

    def __init__(
        self, call: ReductionCall, op: str, native: _native.AllReduceNorm, memory: Arena, partials: ByteRange
    ) -> None:
        self._op = op
        self._hidden = call.hidden
        self._max_tokens = call.max_tokens
        self.replication = Replication(call)
        self._call = call
        self._native = native
        self._parameters = NativeRecord(_native.ReductionParameters)
        self._arena = memory
        self._scale = call.scale
        self._dtype: torch.dtype = getattr(torch, call.dtype)
        self._normalized_dtype: torch.dtype | None = None if call.norm is None else getattr(torch, call.out_dtype)
        self._sum = call.sum_out is not SumOut.NONE
        shape, each = (call.max_tokens, call.hidden), partials.num_bytes // NUM_PARTIALS
        self._partials = tuple(
            memory.tensor(partials.offset + parity * each, shape, self._dtype) for parity in range(NUM_PARTIALS)
        )

    @staticmethod
    def bind(call: ReductionCall, text: str, op: str, forget: Callable[[], None]) -> ShmReduction:
        """`call`, encoded as `text`, in the arena that its group has now; `forget` runs when that one goes.

        Raises `ArenaError` if no arena was reserved or the call does not fit it.
        """
        memory = arena.of(call.group)
        expect_world(call, memory.group)
        buffers = locate(call, memory.layout)
        site = native_site(call, text, buffers)
        try:
            native = _native.AllReduceNorm(memory.native, site, torch.get_num_threads())
        except ValueError as error:
            raise ArenaError(f"site {call.site}: {error}") from None
        memory.at_close(forget)
        return ShmReduction(call, op, native, memory, buffers[PARTIAL])

    def run(
        self, partial: Tensor | DeferredGemm, operands: EpilogueOperands, out: Results | None = None
    ) -> tuple[Tensor, Tensor, None] | None:
        """The op on the rows of `partial`, which as a GEMM is computed into the arena.

        Results go to `out`, if given; the caller has asked `replication` of all rows then.
        None: the library does it, as there are more tokens than were planned for, or ranks may not share rows.
        """
        dtype, hidden = self._dtype, self._hidden
        gemm = partial if isinstance(partial, DeferredGemm) else None
        tokens = partial.num_tokens if isinstance(partial, DeferredGemm) else partial.numel() // hidden
        if tokens > self._max_tokens:
            return None
        given = None if isinstance(partial, DeferredGemm) else self._activation(partial, tokens, "partial")
        residual = operands.residual
        if residual is not None:
            residual = self._activation(residual, tokens, "residual")
        if out is None and not self.replication.holds(operands):
            return None
        values = [0] * 8  # of _native.ReductionParameters
        fp32 = 0
        kept = []  # converted parameters live until the native call is over
        for index, parameter in enumerate(operands.vectors):
            if parameter is not None:
                if parameter.dtype is not dtype or not parameter.is_contiguous() or parameter.numel() != hidden:
                    parameter = self._parameter(parameter)
                    kept.append(parameter)
                if parameter.dtype is torch.float32:
                    fp32 |= 1 << index
                values[index] = parameter.data_ptr()
        values[7] = fp32
        factor = self._scale if operands.scale is None else self._scale * float(operands.scale)
        like = residual if residual is not None else given
        if like is None:
            like = self._partials[0][:tokens]
        normalized, total = self.results(like) if out is None else out
        native = self._native
        try:
            if gemm is None:
                run = native.enter_and_run
            else:
                self._multiply(gemm, tokens)
                run = native.run
            code = run(
                tokens,
                torch.get_num_threads(),
                0 if given is None else given.data_ptr(),
                0 if residual is None else residual.data_ptr(),
                self._parameters.of(values),
                normalized.data_ptr(),
                total.data_ptr(),
                factor,
            )
            if code:
                self._fail(code)
        except BaseException:  # also of a signal's handler, between any two steps
            native.abandon()
            raise
        return normalized, total, None

    def start(self, partial: Tensor, operands: EpilogueOperands) -> Flight | None:
        """Begin the op, which on the cores of one host is all of it. None: the library does it."""
        results = self.run(partial, operands)
        return None if results is None else Ended(results)

    def results(self, like: Tensor) -> Results:
        """normalized and sum, not computed yet, of the shape of `like`; empty where one is not wanted."""
        wide = self._normalized_dtype
        if wide is None:
            normalized = like.new_empty(0)
        else:
            normalized = torch.empty_like(like) if wide is self._dtype else torch.empty_like(like, dtype=wide)
        return normalized, torch.empty_like(like) if self._sum else like.new_empty(0)

    def _multiply(self, gemm: DeferredGemm, tokens: int) -> None:
        """Takes the group and computes the GEMM into this rank's buffer of the coming epoch.

        Whatever comes of it, the caller runs the call or abandons it.
        """
        code = self._native.enter(tokens)
        if code:
            self._fail(code)
        gemm.compute(self._partials[self._native.next_parity][:tokens])

    def _activation(self, x: Tensor, tokens: int, name: str) -> Tensor:
        if x.dtype is not self._dtype or x.numel() != tokens * self._hidden or x.shape[-1] != self._hidden:
            raise WeaveError(
                f"site {self._call.site}: {name} is {tuple(x.shape)} {x.dtype}, expected {counted(tokens, 'row')} of "
                f"{self._hidden} {self._dtype}"
            )
        if not x.is_cpu:
            raise WeaveError(f"site {self._call.site}: {name} is on {x.device}, the arena in memory of the host")
        return x if x.is_contiguous() else x.contiguous()

    def _parameter(self, x: Tensor) -> Tensor:
        if x.numel() != self._hidden:
            raise WeaveError(f"site {self._call.site}: a parameter is {tuple(x.shape)}, expected [{self._hidden}]")
        if x.dtype is not self._dtype and x.dtype is not torch.float32:
            x = x.float()
        return x.contiguous()

    def _fail(self, code: int) -> NoReturn:
        """Raises what `code`, or the first failure of the arena, stands for."""
        raise failure(self._caller, code, self._native.status)

    @property
    def _caller(self) -> Caller:
        return Caller(self._op, self._call.site, self._arena.group, self._call.timeout_s)
