"""`all_reduce_norm` on GPUs of one host: a site bound to its group's arena, and the launch of its kernel.

A call launches one kernel and does nothing else to the device: no synchronization, no allocation but of its results.
So it can be captured in a CUDA graph. Calls of one group follow one another on the device, as on one stream: the arena
counts them, and two at once would count as one. The kernel's waits are looked after by `weaveopt.fabrics.watchdog`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics import peer as arena
from weaveopt.fabrics import watchdog
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.native_record import NativeRecord
from weaveopt.fabrics.peer import PeerArena
from weaveopt.fabrics.traits import TRAITS, header_bytes
from weaveopt.ops.reduction.buffers import MAILBOXES, OUTPUT, PARTIAL, STAGING, ByteRange, expect_world, locate
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.launches import NO_KERNEL, VECTOR_BYTES, Piece, Prepared, ReductionLaunch, Returned, Tiled
from weaveopt.ops.reduction.native import kernel_name, native_norm, out_kind
from weaveopt.ops.reduction.operands import DeferredGemm, EpilogueOperands
from weaveopt.ops.reduction.reference import row_scale_shape
from weaveopt.ops.reduction.replication import Replication
from weaveopt.ops.reduction.variant import KernelRow, Transfer
from weaveopt.records.norm import Quant
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: arena.of() says so before anything here is needed
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor
_SCALE, _QUANT_SCALE = 5, 6
"""Their bits in the mask of fp32 parameters, after the five of a row's length."""


class PeerReduction:
    """One site, ready to run. Everything that does not change from call to call is an attribute."""

    __slots__ = (
        "_aliased",
        "_arena",
        "_call",
        "_dtype",
        "_hidden",
        "_index",
        "_launches",
        "_matrix",
        "_native",
        "_normalized_dtype",
        "_parameters",
        "_partial",
        "_partial_offset",
        "_replication",
        "_static",
        "_sum",
        "_where",
    )  # fmt: skip

    def __init__(self, call: ReductionCall, native: _native.GpuAllReduceNorm, memory: PeerArena, where: str) -> None:
        buffers = locate(call, memory.layout)
        self._hidden = call.hidden
        self._launches = tuple(self.launch_of(call, row, memory) for row in call.table)
        self._replication = Replication(call)
        self._arena = memory
        self._call = call
        self._native = native
        self._parameters = NativeRecord(_native.ReductionParameters)
        self._matrix = NativeRecord(_native.GemmMatrix)
        self._where = where
        self._index = memory.device
        self._dtype: torch.dtype = getattr(torch, call.dtype)
        self._normalized_dtype: torch.dtype | None = None if call.norm is None else getattr(torch, call.out_dtype)
        self._sum = call.sum_out is not SumOut.NONE
        self._static = call.quant is Quant.STATIC
        in_place = [launch.max_tokens for launch in self._launches if launch.in_place]
        self._partial: Tensor | None = None
        self._partial_offset = 0
        if in_place:
            offset = buffers[PARTIAL].offset
            self._partial_offset = header_bytes(call.fabric) + offset
            self._partial = memory.tensor(offset, (in_place[-1], call.hidden), self._dtype)
        aliased = [launch.max_tokens for launch in self._launches if launch.aliases_arena]
        self._aliased: Tensor | None = None
        if aliased and self._normalized_dtype is not None:
            shape = (aliased[-1], call.hidden)
            self._aliased = memory.tensor(buffers[OUTPUT].offset, shape, self._normalized_dtype)

    @staticmethod
    def bind(call: ReductionCall, text: str, op: str, forget: Callable[[], None]) -> PeerReduction:
        """`call`, encoded as `text`, in the arena that its group has now; `forget` runs when that one goes.

        Raises `ArenaError` if the fabric has no arena, none was reserved or the call does not fit it.
        """
        return PeerReduction.bound_to(arena.of(call.group), call, text, op, forget)

    @staticmethod
    def bound_to(
        memory: PeerArena, call: ReductionCall, text: str, op: str, forget: Callable[[], None]
    ) -> PeerReduction:
        """`call` in an arena that is no group's yet, or in the one that is. Raises as `bind` does."""
        expect_world(call, memory.group)
        if call.max_tokens > watchdog.MAX_TOKENS:
            raise ArenaError(
                f"site {call.site}: {counted(call.max_tokens, 'token')}, the kernels count to {watchdog.MAX_TOKENS}"
            )
        # Of the whole call: ranks whose plans differ in anything notice it at the first synchronization.
        site = native_site(call, watchdog.tag_of(zlib.crc32(text.encode())), memory.layout)
        try:
            native = _native.GpuAllReduceNorm(memory.native, site)
        except ValueError as error:
            raise ArenaError(f"site {call.site}: {error}") from None
        watchdog.name_site(site.tag, watchdog.NamedSite(op, call.site, call.timeout_s))
        memory.at_close(forget)
        rank = memory.group.ranks[memory.group.rank]
        return PeerReduction(
            call, native, memory, f"weave::{op} at site {call.site}, group {call.group!r}, rank {rank}"
        )

    @staticmethod
    def launch_of(call: ReductionCall, row: KernelRow, memory: PeerArena) -> ReductionLaunch:
        """How calls of up to as many tokens as `row` says run. Raises `WeaveError` where no kernel does that."""
        return _launch(call, row, memory.device)

    @property
    def device(self) -> int:
        """Index of the GPU."""
        return self._index

    @property
    def hidden(self) -> int:
        return self._hidden

    def launch(self, tokens: int) -> ReductionLaunch | None:
        """How `tokens` tokens run; None: through the library."""
        for launch in self._launches:
            if tokens <= launch.max_tokens:
                return None if launch.unsupported else launch
        return None

    def pieces(self, tokens: int, piece_tokens: int = 0) -> tuple[Piece, ...]:
        """How `tokens` tokens run, at most `piece_tokens` at a time (0: as fit); none: through the library."""
        most = self._launches[-1].max_tokens
        most = min(piece_tokens or most, most)
        if tokens > most and not self._call.in_pieces:
            return ()
        found = []
        for first in range(0, max(tokens, 1), most):
            count = min(most, tokens - first)
            launch = self.launch(count)
            if launch is None:
                return ()
            found.append(Piece(launch, first, count))
        return tuple(found)

    def begin(self, tokens: int, piece_tokens: int = 0) -> tuple[Piece, ...]:
        """Before every call: its `pieces`. Raises why nothing can run here any more."""
        self._arena.begin_call()
        return self.pieces(tokens, piece_tokens)

    def run(self, partial: Tensor | DeferredGemm, operands: EpilogueOperands) -> Returned | None:
        """The op on the rows of `partial`, piece by piece. None: the library does it."""
        tokens = partial.num_tokens if isinstance(partial, DeferredGemm) else partial.numel() // self._hidden
        pieces = self.begin(tokens)
        if not pieces:
            return None
        if isinstance(partial, DeferredGemm):
            rows = self._multiply(partial, pieces, tokens)
        else:
            rows = self.activation(partial, tokens, "partial")
        prepared = self.prepare(rows, operands, pieces, tokens)
        if prepared is None or tokens == 0:
            return None if prepared is None else prepared.results
        device = torch.cuda._exchange_device(self._index)
        try:
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            for piece in pieces:
                self.launch_piece(prepared, piece, stream)
        finally:
            torch.cuda._maybe_exchange_device(device)
        return prepared.results

    def prepare(
        self, rows: Tensor, operands: EpilogueOperands, pieces: tuple[Piece, ...], tokens: int
    ) -> Prepared | None:
        """Everything of a call on `rows` [tokens, hidden] but its launches. None: the library does it.

        The rows need not be there yet: nothing here reads them.
        """
        residual = operands.residual
        if residual is not None:
            residual = self.activation(residual, tokens, "residual")
        results = self._results(rows if residual is None else residual, pieces, tokens)
        if tokens == 0:
            return Prepared(rows, residual, results, self._parameters.of([0] * 8), ())
        # Nothing can be compared during a capture: what no call has proven by then is taken for granted.
        granted = self._replication.known is None and torch.cuda.is_current_stream_capturing()
        if not granted and not self._replication.holds(operands):
            return None
        dtype, hidden = self._dtype, self._hidden
        pointers = [0] * 7
        fp32 = 0
        kept = []  # converted parameters live until the kernel is in the stream, whose order keeps their memory
        for index, parameter in enumerate(operands.vectors):
            if parameter is not None:
                if parameter.dtype is not dtype or not _is_plain(parameter) or parameter.numel() != hidden:
                    parameter = self._parameter(parameter, hidden)
                    kept.append(parameter)
                if parameter.dtype is torch.float32:
                    fp32 |= 1 << index
                pointers[index] = parameter.data_ptr()
        scales = ((_SCALE, operands.scale), (_QUANT_SCALE, operands.quant_scale if self._static else None))
        for index, value in scales:
            if value is not None:
                value = self._value(value)
                kept.append(value)
                if value.dtype is torch.float32:
                    fp32 |= 1 << index
                pointers[index] = value.data_ptr()
        if self._static and not pointers[_QUANT_SCALE]:
            raise WeaveError(f"{self._where}: a static quantization needs quant_scale: call all_reduce_norm_quant")
        pointers.append(fp32)
        return Prepared(rows, residual, results, self._parameters.of(pointers), tuple(kept))

    def launch_piece(self, prepared: Prepared, piece: Piece, stream: int) -> None:
        """The kernel of one piece, on the raw `stream` of the current device."""
        launch, first, count = piece
        hidden, rows = self._hidden, prepared.rows
        normalized, total, row_scale = prepared.results
        code = self._native.run(
            count,
            launch.kernel,
            launch.num_ctas,
            stream,
            _from_row(rows, first, hidden),
            self._into_arena(rows, first, count) if launch.in_place else 0,
            _from_row(prepared.residual, first, hidden),
            prepared.parameters,
            _from_row(normalized, first, hidden),
            _from_row(total, first, hidden),
            _from_row(row_scale, first, 1),
        )
        self.check_launch(code)

    def launch_tiles(self, prepared: Prepared, product: Tiled, stream: int) -> None:
        """Launches the kernel that computes the GEMM and all the rest, on the raw `stream` of the current device.

        Rows of both operands begin at multiples of 16 bytes.
        """
        a, weight = product.a, product.weight
        normalized, total, _ = prepared.results
        code = self._native.run_product(
            a.shape[0],
            product.tiles,
            stream,
            a.data_ptr(),
            a.stride(0),
            self._matrix.of((weight.data_ptr(), weight.stride(0), weight.shape[1])),
            _from_row(prepared.residual, 0, self._hidden),
            prepared.parameters,
            _from_row(normalized, 0, self._hidden),
            _from_row(total, 0, self._hidden),
        )
        self.check_launch(code)

    def product_unsupported(self, k: int) -> str:
        """Why the device cannot run a GEMM of depth `k` in the reducing kernel; empty where it can."""
        dtype = getattr(_native.DType, self._call.dtype)
        return _native.product_unsupported(dtype, self._hidden, k, self._call.world, self._index)

    def check_launch(self, code: int) -> None:
        if code:
            watchdog.fail(
                self._arena, f"{self._where}: the kernel could not be launched: {_native.cuda_error_text(code)}"
            )

    def _results(self, like: Tensor, pieces: tuple[Piece, ...], tokens: int) -> Returned:
        """Allocates the results in the shape of `like`; empty if a result is not wanted."""
        dtype, wide = self._dtype, self._normalized_dtype
        if wide is None:
            normalized = like.new_empty(0, dtype=getattr(torch, self._call.out_dtype))
        elif self._aliased is not None and len(pieces) == 1 and pieces[0].launch.aliases_arena:
            normalized = self._aliased[:tokens].view(like.shape)
        else:
            normalized = torch.empty_like(like) if wide is dtype else torch.empty_like(like, dtype=wide)
        total = torch.empty_like(like) if self._sum else like.new_empty(0)
        if self._call.quant is not Quant.PER_TOKEN:
            return normalized, total, None
        return normalized, total, like.new_empty(row_scale_shape(like.shape, self._call), dtype=torch.float32)

    def _multiply(self, gemm: DeferredGemm, pieces: tuple[Piece, ...], tokens: int) -> Tensor:
        if len(pieces) != 1 or not pieces[0].launch.in_place or self._partial is None:
            return gemm.compute()
        return gemm.compute(self._partial[:tokens])

    def _into_arena(self, partial: Tensor, first: int, count: int) -> int:
        """Copies this rank's partial result to the range that peers read, and returns its offset. The range is free:
        the last call ended after the peers had read it."""
        assert self._partial is not None
        out = self._partial[:count]
        if partial.data_ptr() != out.data_ptr():
            out.copy_(partial.view(-1, self._hidden)[first : first + count])
        return self._partial_offset

    def activation(self, x: Tensor, tokens: int, name: str) -> Tensor:
        if x.dtype is not self._dtype or x.numel() != tokens * self._hidden or x.shape[-1] != self._hidden:
            raise WeaveError(
                f"site {self._call.site}: {name} is {tuple(x.shape)} {x.dtype}, expected {counted(tokens, 'row')} of "
                f"{self._hidden} {self._dtype}"
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


def _launch(call: ReductionCall, row: KernelRow, device: int) -> ReductionLaunch:
    if row.transfer is Transfer.TILES:
        # What the device can run depends on the product, of which this call knows nothing.
        return ReductionLaunch(row.max_tokens, NO_KERNEL, 0, False, call.normalized_aliases_arena, unsupported="")
    kernel = native_kernel(row)
    dtype = getattr(_native.DType, call.dtype)
    why = _native.unsupported(kernel, dtype, call.hidden, call.world, call.quant is not Quant.NONE, device)
    return ReductionLaunch(
        row.max_tokens,
        int(kernel),
        row.num_ctas,
        in_place=kernel is _native.GpuKernel.direct,
        aliases_arena=call.normalized_aliases_arena and kernel is _native.GpuKernel.bulk,
        unsupported=why,
    )


def native_kernel(row: KernelRow) -> _native.GpuKernel:
    """The kernel that runs a row of the table. Raises `WeaveError` where there is none."""
    kernel: _native.GpuKernel = getattr(_native.GpuKernel, kernel_name(row))
    return kernel


def native_site(call: ReductionCall, tag: int, layout: Layout) -> _native.GpuSite:
    """All of a call that native code asks for, in an arena of `layout`. Raises `ArenaError` if it does not fit.

    `tag` is equal on all ranks if they run the same. What the call's kernels do not use has no bytes.
    """
    site = _native.GpuSite()
    site.tag = tag
    site.channel = call.channel
    site.multicast = TRAITS[call.fabric].needs_multicast
    site.hidden = call.hidden
    site.dtype = getattr(_native.DType, call.dtype)
    site.out_kind = out_kind(call.dtype, call.out_dtype)
    site.quant = getattr(_native.QuantKind, call.quant.value)
    site.post = native_norm(call.post)
    site.norm = native_norm(call.norm)
    site.sum_whole = call.sum_out is SumOut.WHOLE
    site.scale = call.scale
    site.timeout_s = call.timeout_s
    unused, header, found = ByteRange(0, 0), header_bytes(call.fabric), locate(call, layout)
    mailboxes, staging, output = (found.get(name, unused) for name in (MAILBOXES, STAGING, OUTPUT))
    site.mailbox_offset, site.mailbox_bytes = header + mailboxes.offset, mailboxes.num_bytes // _native.NUM_MAILBOXES
    site.staging_offset, site.staging_bytes = header + staging.offset, staging.num_bytes
    site.output_offset, site.output_bytes = header + output.offset, output.num_bytes
    return site
