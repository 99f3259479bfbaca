"""`gemm_reduce_scatter` between GPUs of one host: tile by tile in one kernel, or after the library's GEMMs.

Tiles (`call.cut`): one kernel computes the GEMM, sends every tile to the owner of its rows as it is finished, and sums
the rows that this rank owns as their tiles are complete. Its source, pushed_tiles.cuh, says what orders memory between
ranks.

Where rows stay with their owner the same kernel adds a residual and normalizes what it sums (`run_norm`).

Otherwise the GEMMs write into this rank's arena, and a kernel after them sums this rank's part of all ranks' results.
So do calls that the kernel of tiles does not take: several GEMMs, addends, rows of each of several sequences, columns,
other GPUs than it is for. All ranks see the same of a call, so all of them choose the same.

Both use one buffer, `staging`, which is also that of other operations' partial rows. Every kernel that has peers write
there, or read there, ends only when all of them have finished. Nothing here synchronizes with the host or allocates but
results, and copies of operands whose rows do not begin at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weaveopt.cost_model.tile_config import TILE_DTYPES
from weaveopt.errors import WeaveError
from weaveopt.fabrics.native_record import NativeRecord
from weaveopt.fabrics.peer_rows import PeerRows, aligned_rows, aligned_vector, buffer_for
from weaveopt.ops.gemm_comm.reduce_scatter.call import (
    REDUCE_SCATTER,
    GemmReduceScatterCall,
    GemmReduceScatterNormCall,
    Products,
    part_of,
)
from weaveopt.records.memory import Buffer
from weaveopt.records.site import DTYPE_BYTES
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: no arena can be reserved, and no site is bound
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor
STAGING = "staging"
_WEIGHT_IS_FP32 = 1 << 3
"""Bit of the norm's weight among `_native.ReductionParameters`."""


class PeerGemmReduceScatter:
    """One site, ready to run."""

    __slots__ = ("_call", "_matrix", "_native", "_norm", "_parameters", "_rows", "_tiles", "_unsupported")

    def __init__(self, call: GemmReduceScatterCall, rows: PeerRows) -> None:
        self._call, self._rows = call, rows
        config = REDUCE_SCATTER.config_of(call.cut) if call.cut else None
        if call.cut and (config is None or call.dtype not in TILE_DTYPES):
            raise WeaveError(f"site {call.site}: tiles of {call.dtype} cut as {call.cut!r}: there is no such kernel")
        self._tiles: _native.TileConfig | None = None
        if config is not None:
            self._tiles = _native.TileConfig(
                tile_columns=config.tile_columns, group_pairs=config.group_pairs, reducer_ctas=config.reducer_ctas
            )
        self._matrix = NativeRecord(_native.GemmMatrix)
        self._parameters = NativeRecord(_native.ReductionParameters)
        self._norm: tuple[GemmReduceScatterNormCall, _native.NormSpec] | None = None
        self._native = _native.GpuGemmReduceScatter(
            rows.arena.native, rows.tag, getattr(_native.DType, call.dtype), call.hidden, call.scale, call.channel,
            call.timeout_s, rows.offset, rows.num_bytes,
        )  # fmt: skip
        self._unsupported: dict[int, str] = {}
        """Reason why the device has no kernel of tiles for a GEMM, by its depth; empty if it has one."""

    @staticmethod
    def buffers(call: GemmReduceScatterCall) -> tuple[Buffer, ...]:
        """Arena buffers of the call on every rank: partial rows of all ranks for those that a rank owns, or this rank's
        for all."""
        rows = -(-call.max_tokens // call.world) * call.world
        return (buffer_for(STAGING, rows * call.hidden * DTYPE_BYTES[call.dtype]),)

    @staticmethod
    def bind(call: GemmReduceScatterCall, text: str, op: str, forget: Callable[[], None]) -> PeerGemmReduceScatter:
        """Raises `ArenaError` if no arena was reserved or the call does not fit it."""
        [need] = PeerGemmReduceScatter.buffers(call)
        return PeerGemmReduceScatter(call, PeerRows(call, text, op, need, forget))

    def run(self, products: Products, outer: int) -> Tensor | None:
        """This rank's part of the sum; None where there are more rows than were planned for."""
        call, rows, tokens = self._call, self._rows, products.num_tokens
        if tokens > call.max_tokens:
            return None
        self._check(products)
        part = part_of(call, tokens, outer)
        out = products.a[0].new_empty(part.shape(call))
        if out.numel() == 0:
            return out
        with rows.launching() as stream:
            if self._takes_tiles(products, outer):
                self._run_tiles(products, out, stream.cuda_stream)
            else:
                products.compute(rows.own(tokens, call.hidden))
                block = part.inner * part.row
                rows.check(self._native.sum_parts(tokens, part.outer, block, out.data_ptr(), stream.cuda_stream))
        return out

    def run_norm(
        self, products: Products, residual: Tensor, weight: Tensor | None, norm: GemmReduceScatterNormCall
    ) -> tuple[Tensor, Tensor] | None:
        """The operator's results; None where the kernel of tiles does not take the call. Shapes and dtypes are those
        that the operator takes."""
        call, tokens = self._call, products.num_tokens
        if tokens > call.max_tokens or not self._takes_tiles(products, 1):
            return None
        self._check(products)
        added = self._rows.checked(residual, call.hidden, "the residual")
        scale = None if weight is None else aligned_vector(weight)
        if scale is not None and scale.device != added.device:
            raise WeaveError(f"site {call.site}: the norm's weight is on {scale.device}, rows on {added.device}")
        normalized = added.new_empty(added.shape)
        returned = added.new_empty(norm.sum_rows(len(added)), call.hidden)
        if added.numel() == 0:
            return normalized, returned
        total = returned[norm.local_rows(len(added), self._rows.arena.group.rank)]
        assert self._tiles is not None, f"site {call.site}: tiles without a configuration"
        address = 0 if scale is None else scale.data_ptr()
        fp32 = _WEIGHT_IS_FP32 if scale is not None and scale.dtype is not added.dtype else 0
        a, b = aligned_rows(products.a[0]), aligned_rows(products.b[0].t())
        with self._rows.launching() as stream:
            code = self._native.run_tiles_norm(
                tokens, self._tiles, a.data_ptr(), a.stride(0),
                self._matrix.of((b.data_ptr(), b.stride(0), b.shape[1])), added.data_ptr(), self._norm_of(norm),
                self._parameters.of((0, 0, 0, address, 0, 0, 0, fp32)), normalized.data_ptr(), total.data_ptr(),
                stream.cuda_stream,
            )  # fmt: skip
            self._rows.check(code)
        return normalized, returned

    def _norm_of(self, norm: GemmReduceScatterNormCall) -> _native.NormSpec:
        """The RMS norm of `norm` as native code takes it, built once."""
        made = self._norm
        if made is None or made[0] is not norm:
            spec = _native.NormSpec()
            spec.kind, spec.eps = _native.NormKind.rms, norm.eps
            spec.weight_offset, spec.cast_before_weight = norm.weight_offset, norm.cast_before_weight
            made = self._norm = norm, spec
        return made[1]

    def _check(self, products: Products) -> None:
        """Raises `WeaveError` for a GEMM of another size, dtype or device."""
        call, rows, first = self._call, self._rows, products.a[0]
        if first.dtype is not rows.dtype or products.b[0].shape[1] != call.hidden or first.device.index != rows.device:
            found = f"{counted(products.b[0].shape[1], 'column')} of {first.dtype} on {first.device}"
            raise WeaveError(
                f"site {call.site}: the GEMM makes {found}, expected {call.hidden} of {rows.dtype} on "
                f"cuda:{rows.device}"
            )

    def _takes_tiles(self, products: Products, outer: int) -> bool:
        call, depth = self._call, products.a[0].shape[1]
        if self._tiles is None or len(products.a) != 1 or products.addends or outer != 1 or call.columns:
            return False
        if products.num_tokens > _native.product_most_tokens(call.world) or depth == 0:
            return False
        if depth not in self._unsupported:
            dtype = getattr(_native.DType, call.dtype)
            self._unsupported[depth] = _native.product_unsupported(
                dtype, call.hidden, depth, call.world, self._rows.device
            )
        return not self._unsupported[depth]

    def _run_tiles(self, products: Products, out: Tensor, stream: int) -> None:
        assert self._tiles is not None, f"site {self._call.site}: tiles without a configuration"
        a, weight = aligned_rows(products.a[0]), aligned_rows(products.b[0].t())
        code = self._native.run_tiles(
            a.shape[0], self._tiles, a.data_ptr(), a.stride(0),
            self._matrix.of((weight.data_ptr(), weight.stride(0), weight.shape[1])), out.data_ptr(), stream,
        )  # fmt: skip
        self._rows.check(code)
