"""`all_gather_gemm` between GPUs of one host: copy engines push shards, and GEMMs begin with the rows that are here.

A call opens with a barrier of all ranks, after which peers' buffers may be written to. Then every rank pushes its shard
to all others on a second stream, with a signal after each copy, and this stream goes on:

with `call.cut`   the widest GEMM, with its bias, whose loading threads wait for the rows of a tile; own rows come
                  first, out of the shard itself. The others are the library's, started after all rows
else              one kernel that waits for all rows, then the library's GEMMs

The latter happens to calls that the kernel does not take, too: rows of each of several sequences, other GPUs; and a
GEMM that rows are added to, or whose weight it does not read, runs after all rows have arrived. All ranks see the same
of a call, so all of them choose the same. csrc/gemm_comm/all_gather/gpu.cu says what orders memory between ranks.

Gathered rows are stored in one buffer, `gathered`. If the op returns them they are copied: the next call's are pushed
into the buffer as soon as all that this rank launched before that call has finished. Nothing here synchronizes with the
host or allocates but results, and copies of operands whose rows do not begin at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weaveopt.cost_model.tile_config import TILE_DTYPES, TileConfig
from weaveopt.errors import WeaveError
from weaveopt.fabrics.peer_rows import PeerRows, aligned_rows, aligned_vector, buffer_for, second_stream
from weaveopt.ops.gemm_comm.all_gather.call import ALL_GATHER, AllGatherGemmCall, Weights, widest_of
from weaveopt.records.memory import Buffer
from weaveopt.records.site import DTYPE_BYTES
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: no arena can be reserved, and no site is bound
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor
GATHERED = "gathered"


class PeerAllGatherGemm:
    """One site, ready to run."""

    __slots__ = ("_call", "_cut", "_native", "_rows", "_side", "_unsupported")

    def __init__(self, call: AllGatherGemmCall, rows: PeerRows) -> None:
        self._call, self._rows = call, rows
        self._cut = ALL_GATHER.config_of(call.cut) if call.cut else None
        if call.cut and (self._cut is None or call.dtype not in TILE_DTYPES):
            raise WeaveError(f"site {call.site}: GEMMs of {call.dtype} cut as {call.cut!r}: there is no such kernel")
        self._native = _native.GpuAllGatherGemm(
            rows.arena.native, rows.tag, getattr(_native.DType, call.dtype), call.hidden, call.channel, call.timeout_s,
            rows.offset, rows.num_bytes,
        )  # fmt: skip
        self._side = second_stream(rows.device)
        self._unsupported: dict[int, str] = {}
        """Reason why the device has no kernel for a GEMM, by its columns; empty if it has one."""

    @staticmethod
    def buffers(call: AllGatherGemmCall) -> tuple[Buffer, ...]:
        """Arena buffers of the call on every rank."""
        rows = -(-call.max_tokens // call.world) * call.world
        return (buffer_for(GATHERED, rows * call.hidden * DTYPE_BYTES[call.dtype]),)

    @staticmethod
    def bind(call: AllGatherGemmCall, text: str, op: str, forget: Callable[[], None]) -> PeerAllGatherGemm:
        """Raises `ArenaError` if no arena was reserved or the call does not fit it."""
        [need] = PeerAllGatherGemm.buffers(call)
        return PeerAllGatherGemm(call, PeerRows(call, text, op, need, forget))

    def run(self, shard: Tensor, weights: Weights, outer: int) -> tuple[Tensor, list[Tensor]] | None:
        """The gathered rows, empty if they are not returned, and the GEMMs' results; None where there are more rows
        than were planned for."""
        call, rows = self._call, self._rows
        shard = rows.checked(shard, call.hidden, "the shard")
        own = shard.numel() // call.hidden
        tokens = own * call.world
        if tokens > call.max_tokens:
            return None
        if outer < 1 or own % outer:
            raise WeaveError(f"site {call.site}: {counted(own, 'row')} of a rank are not {counted(outer, 'block')}")
        whole = shard.new_empty((tokens, call.hidden) if call.returns_rows else (0,))
        if own == 0:
            return whole, weights.multiply(shard.view(0, call.hidden))
        early = self._early(weights, outer)
        with rows.launching() as main:
            products = self._run(shard, weights, outer, early, whole, main)
        return whole, products

    def _run(
        self, shard: Tensor, weights: Weights, outer: int, early: list[bool], whole: Tensor, main: torch.cuda.Stream
    ) -> list[Tensor]:
        """`early`: of each GEMM, whether it begins before all rows are here."""
        call, native, rows, cut = self._call, self._native, self._rows, self._cut
        own = shard.numel() // call.hidden
        tokens, stream, side = own * call.world, main.cuda_stream, self._side.cuda_stream
        all_early = all(early) and outer == 1 and cut is not None
        products: dict[int, Tensor] = {}
        try:
            # What is not early reads all rows where they are gathered.
            keeps_own = not all_early
            rows.check(native.begin(outer, own // outer, shard.data_ptr(), keeps_own, stream, side))
            for index, is_early in enumerate(early):
                if is_early:
                    assert cut is not None, f"site {call.site}: no cut"
                    b, bias = weights.b[index], weights.addends[index]
                    products[index] = self._multiply(shard, b, bias, tokens, cut, stream)
            if all_early:
                if call.returns_rows:
                    rows.check(native.hand_out(whole.data_ptr(), side))
            else:
                rows.check(native.await_shards(stream))
                gathered = rows.own(tokens, call.hidden)
                late = [index for index, is_early in enumerate(early) if not is_early]
                rest = Weights([weights.b[each] for each in late], [weights.addends[each] for each in late])
                products.update(zip(late, rest.multiply(gathered), strict=True))
                if call.returns_rows:
                    whole.copy_(gathered)
        finally:
            # Also where a launch failed: a capture has to find every stream that it drew in.
            joined = native.end(stream, side)
        rows.check(joined)
        return [products[index] for index in range(len(weights.b))]

    def _early(self, weights: Weights, outer: int) -> list[bool]:
        """Starts only the widest supported GEMM early; the others are faster in cuBLAS afterwards."""
        if self._cut is None or outer != 1:
            return [False] * len(weights.b)
        widths = [
            b.shape[1] if _is_bias(addend, b) and not self._why_not(b.shape[1]) else 0
            for b, addend in zip(weights.b, weights.addends, strict=True)
        ]
        widest = widest_of(widths)
        return [index == widest and width > 0 for index, width in enumerate(widths)]

    def _why_not(self, width: int) -> str:
        if width == 0:
            return "the GEMM has no columns"
        if width not in self._unsupported:
            dtype = getattr(_native.DType, self._call.dtype)
            self._unsupported[width] = _native.gemm_unsupported(dtype, width, self._call.hidden, self._rows.device)
        return self._unsupported[width]

    def _multiply(
        self, shard: Tensor, b: Tensor, bias: Tensor | None, tokens: int, cut: TileConfig, stream: int
    ) -> Tensor:
        weight, out = aligned_rows(b.t()), shard.new_empty(tokens, b.shape[1])
        added = None if bias is None else aligned_vector(bias)
        code = self._native.multiply(
            cut.tile_columns, cut.group_pairs, weight.data_ptr(), weight.stride(0),
            0 if added is None else added.data_ptr(), b.shape[1], out.data_ptr(), stream,
        )  # fmt: skip
        self._rows.check(code)
        return out


def _is_bias(addend: Tensor | None, b: Tensor) -> bool:
    """True if the kernel can add it: one value for each column, of the weight's dtype, or nothing."""
    return addend is None or (addend.shape == b.shape[1:] and addend.dtype is b.dtype and addend.device == b.device)
