"""`all_reduce_norm` on GPUs of one host: a site bound to its group's arena, and the launch of its kernel.

A call launches one kernel and does nothing else to the device: no synchronization, no allocation but of its results.
So it can be captured in a CUDA graph. Calls of one group follow one another on the device, as on one stream: the arena
counts them, and two at once would count as one. The kernel's waits are looked after by `weaveopt.fabrics.watchdog`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics import peer as arena_gpu
from weaveopt.fabrics import watchdog
from weaveopt.fabrics.peer import GpuArena
from weaveopt.fabrics.replicated import expect_alike
from weaveopt.ops.all_reduce_norm.call import AllReduceNormCall, Quant, SumOut, region_need
from weaveopt.ops.all_reduce_norm.native import native_form
from weaveopt.ops.all_reduce_norm.reference import QuantResults, row_scale_shape
from weaveopt.records.candidate import Algorithm, Fabric, Form, Lowering
from weaveopt.records.memory import RegionNeed

try:
    from weaveopt import _native
except ImportError:  # built without it: arena_gpu.of() says so before anything here is needed
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor
Product = tuple[Tensor, Tensor, Tensor | None]
"""`a`, `b` and what is added to `a @ b`."""

VECTOR_BYTES = 16
"""What a thread moves at once; rows, results and parameters begin at such a boundary."""
_SCALE, _QUANT_SCALE = 5, 6
"""Their bits in the mask of fp32 parameters, behind the five of a row's length."""


@dataclass(frozen=True)
class Row:
    """A row of the run-time table as it is launched."""

    max_tokens: int
    form: int
    """A `_native.GpuKernel` as a number."""
    num_ctas: int
    in_place: bool
    """The kernel reads the partial result from the arena."""
    lands: bool
    """Normed rows may be the region that peers write to."""
    unsupported: str
    """Why the device cannot run it; then the library does."""


class Piece(NamedTuple):
    """Tokens that one kernel takes."""

    row: Row
    first: int
    num_tokens: int


class PeerSite:
    """One site, ready to run. Everything that does not change from call to call is an attribute."""

    __slots__ = (
        "_alike", "_arena", "_call", "_dtype", "_index", "_landing", "_native", "_normed_dtype", "_partial",
        "_static", "_sum", "_where", "hidden", "rows",
    )  # fmt: skip

    def __init__(self, call: AllReduceNormCall, native: _native.GpuAllReduceNorm, memory: GpuArena, where: str) -> None:
        self.hidden = call.hidden
        self.rows = tuple(_row(call, lowering, memory.device) for lowering in call.lowerings)
        self._alike = False
        """Whether the ranks have been seen to hold the same residual and parameters."""
        self._arena = memory
        self._call = call
        self._native = native
        self._where = where
        self._index = memory.device
        self._dtype: torch.dtype = getattr(torch, call.dtype)
        self._normed_dtype: torch.dtype | None = None if call.norm is None else getattr(torch, call.out_dtype)
        self._sum = call.sum_out is not SumOut.NONE
        self._static = call.quant is Quant.STATIC
        in_place = [row.max_tokens for row in self.rows if row.in_place]
        self._partial: Tensor | None = None
        if in_place:
            self._partial = memory.tensor(memory.partial_offset, (in_place[-1], call.hidden), self._dtype)
        landing = [row.max_tokens for row in self.rows if row.lands]
        self._landing: Tensor | None = None
        if landing and self._normed_dtype is not None:
            self._landing = memory.tensor(memory.output_offset, (landing[-1], call.hidden), self._normed_dtype)

    @staticmethod
    def bind(call: AllReduceNormCall, text: str, op: str, forget: Callable[[], None]) -> PeerSite:
        """`call`, encoded as `text`, in the arena that its group has now; `forget` runs when that one goes.

        Raises `ArenaError` if no arena was reserved or the call does not fit it.
        """
        memory = arena_gpu.of(call.group)
        if len(memory.group.ranks) != call.world:
            raise ArenaError(f"site {call.site}: planned for {call.world} ranks, group has {len(memory.group.ranks)}")
        if call.fabric is Fabric.MULTIMEM:
            raise ArenaError(f"site {call.site}: the arena is not mapped for multicast, which fabric multimem needs")
        if call.max_tokens > watchdog.MAX_TOKENS:
            raise ArenaError(f"site {call.site}: {call.max_tokens} tokens, the kernels count to {watchdog.MAX_TOKENS}")
        for lowering in call.lowerings:
            need = region_need(lowering, call.hidden, call.dtype, call.out_dtype, call.world)
            if not arena_gpu.holds(memory.regions, need):
                raise ArenaError(f"site {call.site}: needs {need}, but group {call.group!r} has {memory.regions}")
        # Of the whole call: ranks whose plans differ in anything notice it at the first meeting.
        site = native_site(call, watchdog.tag_of(zlib.crc32(text.encode())), memory.regions)
        try:
            native = _native.GpuAllReduceNorm(memory.native, site)
        except ValueError as error:
            raise ArenaError(f"site {call.site}: {error}") from None
        watchdog.name_site(site.tag, watchdog.NamedSite(op, call.site, call.timeout_s))
        memory.at_close(forget)
        rank = memory.group.ranks[memory.group.rank]
        where = f"weave::{op} at site {call.site}, group {call.group!r}, rank {rank}"
        return PeerSite(call, native, memory, where)

    def row(self, tokens: int) -> Row | None:
        """How `tokens` tokens run; None: through the library."""
        for row in self.rows:
            if tokens <= row.max_tokens:
                return None if row.unsupported else row
        return None

    def pieces(self, tokens: int) -> tuple[Piece, ...]:
        """How `tokens` tokens run; none: through the library."""
        most = self.rows[-1].max_tokens
        if tokens > most and not self._call.in_pieces:
            return ()
        found = []
        for first in range(0, max(tokens, 1), most):
            count = min(most, tokens - first)
            row = self.row(count)
            if row is None:
                return ()
            found.append(Piece(row, first, count))
        return tuple(found)

    def run(
        self,
        pieces: tuple[Piece, ...],
        tokens: int,
        partial: Tensor | None,
        product: Product | None,
        reduced_bias: Tensor | None,
        scale: Tensor | None,
        residual: Tensor | None,
        post_weight: Tensor | None,
        post_bias: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        quant_scale: Tensor | None,
    ) -> QuantResults:
        """The op on `tokens` rows of `partial`, or of `product`, piece by piece.

        The third result is empty without scales by row.
        """
        arena = self._arena
        if arena.error is not None:
            watchdog.raise_again(arena.error)
        if partial is not None:
            partial = self._activation(partial, tokens, "partial")
        elif product is not None:
            partial = self._multiply(product, pieces, tokens)
        assert partial is not None, "neither a partial result nor a product"
        if residual is not None:
            residual = self._activation(residual, tokens, "residual")
        like = partial if residual is None else residual
        results = self._results(like, pieces, tokens)
        if tokens == 0:
            return results
        if not self._alike and not torch.cuda.is_current_stream_capturing():
            self._expect_alike(residual, reduced_bias, scale, post_weight, post_bias, weight, bias, quant_scale)
        dtype, hidden = self._dtype, self.hidden
        pointers = [0] * 5
        fp32 = 0
        kept = []  # converted parameters live until the kernel is in the stream, whose order keeps their memory
        for index, parameter in enumerate((reduced_bias, post_weight, post_bias, weight, bias)):
            if parameter is not None:
                if parameter.dtype is not dtype or not _is_plain(parameter) or parameter.numel() != hidden:
                    parameter = self._parameter(parameter, hidden)
                    kept.append(parameter)
                if parameter.dtype is torch.float32:
                    fp32 |= 1 << index
                pointers[index] = parameter.data_ptr()
        values = [0, 0]
        for index, value in ((_SCALE, scale), (_QUANT_SCALE, quant_scale if self._static else None)):
            if value is not None:
                value = self._value(value)
                kept.append(value)
                if value.dtype is torch.float32:
                    fp32 |= 1 << index
                values[index - _SCALE] = value.data_ptr()
        if self._static and not values[1]:
            raise WeaveError(f"{self._where}: a static quantization needs quant_scale: call all_reduce_norm_quant")
        normed, total, row_scale = results
        device = torch.cuda._exchange_device(self._index)
        try:
            for row, first, count in pieces:
                code = self._native.run(
                    count,
                    row.form,
                    row.num_ctas,
                    torch._C._cuda_getCurrentRawStream(self._index),
                    _from_row(partial, first, hidden),
                    self._into_arena(partial, first, count) if row.in_place else 0,
                    _from_row(residual, first, hidden),
                    pointers[0],
                    pointers[1],
                    pointers[2],
                    pointers[3],
                    pointers[4],
                    values[0],
                    values[1],
                    fp32,
                    _from_row(normed, first, hidden),
                    _from_row(total, first, hidden),
                    _from_row(row_scale, first, 1),
                )
                if code:
                    break
        finally:
            torch.cuda._maybe_exchange_device(device)
        if code:
            watchdog.fail(arena, f"{self._where}: the kernel could not be launched: {_native.cuda_error_text(code)}")
        return results

    def _results(self, like: Tensor, pieces: tuple[Piece, ...], tokens: int) -> QuantResults:
        """Of the shape of `like`; empty where a result is not wanted."""
        dtype, normed_dtype = self._dtype, self._normed_dtype
        if normed_dtype is None:
            normed = like.new_empty(0, dtype=getattr(torch, self._call.out_dtype))
        elif self._landing is not None and len(pieces) == 1 and pieces[0].row.lands:
            normed = self._landing[:tokens].view(like.shape)
        else:
            normed = torch.empty_like(like) if normed_dtype is dtype else torch.empty_like(like, dtype=normed_dtype)
        total = torch.empty_like(like) if self._sum else like.new_empty(0)
        shape = row_scale_shape(like.shape, self._call) if normed_dtype is not None else (0,)
        return normed, total, like.new_empty(shape, dtype=torch.float32)

    def _expect_alike(self, residual: Tensor | None, *parameters: Tensor | None) -> None:
        """Once: every rank reduces its own rows with its own residual and parameters, so they must be the same."""
        call = self._call
        names = (
            "bias", "scale", "weight of the first norm", "bias of the first norm", "norm weight", "norm bias",
            "scale of the quantization",
        )  # fmt: skip
        values = [*zip(names, parameters, strict=True)]
        if not call.residual_sharded:
            values.append(("residual", residual))
        expect_alike(call.group, f"weave::all_reduce_norm at site {call.site}", values, call.timeout_s)
        self._alike = True

    def _multiply(self, product: Product, pieces: tuple[Piece, ...], tokens: int) -> Tensor:
        a, b, addend = product
        if len(pieces) != 1 or not pieces[0].row.in_place or self._partial is None:
            return torch.mm(a, b) if addend is None else torch.addmm(addend, a, b)
        out = self._partial[:tokens]
        return torch.mm(a, b, out=out) if addend is None else torch.addmm(addend, a, b, out=out)

    def _into_arena(self, partial: Tensor, first: int, count: int) -> int:
        """Where the peers read this rank's partial result. Free again: the last call ended after they had read it."""
        assert self._partial is not None
        out = self._partial[:count]
        if partial.data_ptr() != out.data_ptr():
            out.copy_(partial.view(-1, self.hidden)[first : first + count])
        return self._arena.partial_offset

    def _activation(self, x: Tensor, tokens: int, name: str) -> Tensor:
        if x.dtype is not self._dtype or x.numel() != tokens * self.hidden or x.shape[-1] != self.hidden:
            raise WeaveError(
                f"site {self._call.site}: {name} is {tuple(x.shape)} {x.dtype}, expected {tokens} rows of "
                f"{self.hidden} {self._dtype}"
            )
        if x.device.index != self._index:
            raise WeaveError(f"site {self._call.site}: {name} is on {x.device}, the arena on cuda:{self._index}")
        return x if _is_plain(x) else x.clone(memory_format=torch.contiguous_format)

    def _parameter(self, x: Tensor, length: int) -> Tensor:
        """`x` in a type and place that the kernel reads."""
        if x.numel() != length:
            raise WeaveError(f"site {self._call.site}: a parameter is {tuple(x.shape)}, expected [{length}]")
        if x.dtype is not self._dtype and x.dtype is not torch.float32:
            x = x.float()
        return x if _is_plain(x) else x.clone(memory_format=torch.contiguous_format)

    def _value(self, x: Tensor) -> Tensor:
        """A tensor of one value, on the device. The host never waits for it."""
        if x.device.type == "cpu":
            x = _on_gpu(x.item(), self._index)
        if x.numel() != 1:
            raise WeaveError(f"site {self._call.site}: a scale is {tuple(x.shape)}, expected []")
        return x.float() if x.dtype is not self._dtype and x.dtype is not torch.float32 else x


def _from_row(x: Tensor | None, row: int, length: int) -> int:
    """The address of a row; 0 where there is no tensor, or an empty one."""
    return 0 if x is None or x.numel() == 0 else x.data_ptr() + row * length * x.element_size()


def _on_gpu(value: float, device: int) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=torch.device("cuda", device))


def _is_plain(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % VECTOR_BYTES == 0


def _row(call: AllReduceNormCall, lowering: Lowering, device: int) -> Row:
    form = native_form_of(lowering)
    dtype = getattr(_native.DType, call.dtype)
    why = _native.unsupported(form, dtype, call.hidden, call.world, call.quant is not Quant.NONE, device)
    return Row(
        lowering.max_tokens,
        int(form),
        lowering.num_ctas,
        in_place=form is _native.GpuKernel.direct,
        lands=call.normed_lands and form is _native.GpuKernel.bulk,
        unsupported=why,
    )


def native_site(call: AllReduceNormCall, tag: int, regions: RegionNeed) -> _native.GpuSite:
    """All of a call that native code asks for. `tag` is equal on all ranks if they run the same."""
    site = _native.GpuSite()
    site.tag = tag
    site.hidden = call.hidden
    site.dtype = getattr(_native.DType, call.dtype)
    site.out_kind = getattr(_native.OutKind, "same" if call.out_dtype == call.dtype else call.out_dtype)
    site.quant = getattr(_native.QuantKind, call.quant.value)
    site.post = native_form(call.post)
    site.norm = native_form(call.norm)
    site.sum_whole = call.sum_out is SumOut.WHOLE
    site.scale = call.scale
    site.timeout_s = call.timeout_s
    at = arena_gpu.offsets(regions)
    site.mailbox_offset, site.mailbox_bytes = at.mailboxes, regions.mailbox_bytes
    site.staging_offset, site.staging_bytes = at.staging, regions.staging_bytes
    site.output_offset, site.output_bytes = at.output, regions.output_bytes
    return site


def native_form_of(lowering: Lowering) -> _native.GpuKernel:
    """The kernel that runs a row of the table. Raises `WeaveError` where there is none."""
    forms = {
        (Form.MAIL, Algorithm.ONE_SHOT): "ll_packet_one_shot",
        (Form.MAIL, Algorithm.TWO_SHOT): "ll_packet_two_shot",
        (Form.BULK, Algorithm.TWO_SHOT): "bulk",
        (Form.DIRECT, Algorithm.TWO_SHOT): "direct",
    }
    name = forms.get((lowering.form, lowering.algorithm))
    if name is None:
        raise WeaveError(f"no GPU kernel for {lowering.algorithm.value} in the form {lowering.form.value}")
    form: _native.GpuKernel = getattr(_native.GpuKernel, name)
    return form
