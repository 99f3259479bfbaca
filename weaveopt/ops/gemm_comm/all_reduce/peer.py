"""`gemm_all_reduce_norm` on GPUs of one host: in chunks of rows, or tile by tile in one kernel.

Tiles: one kernel, on the current stream. Its source, pushed_tiles.cuh, says what orders memory between ranks.

Chunks: the GEMM of one overlaps with the exchange of the one before. The GEMM of every chunk runs on the current
stream, as one call of the library, followed by an event; the fused kernel of that chunk waits for the event on a second
stream, of which every device has one, of high priority: its few CTAs get their SMs as soon as CTAs of the next chunk's
GEMM, which may be waiting already, leave them. The current stream waits for the last kernel of the second one before
the call returns.

What orders memory between chunks:

    rows of the GEMM
      stored  the chunk's GEMM, on the current stream
      flag    the event after it
      wait    the second stream, before the chunk's kernel, which reads them, or has peers read them
    residual, parameters
      stored  whatever ran before, on the current stream
      flag    the first chunk's event
      wait    the second stream, before the first kernel
    normalized rows, sum
      stored  the chunks' kernels
      flag    the event after the last one
      wait    the current stream, before whatever follows the call
    memory of the GEMM's result and the call's, when others get it
      flag    that event too: the allocator reuses memory in the order of the current stream

So for the group the kernels of a call are calls that follow one another, and follow what the group ran before: whatever
was launched on the current stream before has finished when the first event has, and nothing after the call begins
before the last kernel has ended. They share one channel and its buffers with the group's other calls for that reason: a
buffer belongs to the calls of one channel, and a second channel would need mailboxes and staging of its own.

Nothing here synchronizes with the host or allocates but the GEMM's result and the call's: a call can be captured in a
CUDA graph, into which the second stream is drawn by the first event and from which it returns with the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from weaveopt.cost_model.tile_config import TILES
from weaveopt.errors import WeaveError
from weaveopt.fabrics.peer_rows import aligned_rows as aligned_rows
from weaveopt.fabrics.peer_rows import second_stream
from weaveopt.ops.gemm_comm.all_reduce.call import CHUNKS, GemmReductionCall
from weaveopt.ops.gemm_comm.all_reduce.operands import rows_of
from weaveopt.ops.reduction.launches import Tiled
from weaveopt.ops.reduction.operands import DeferredGemm, EpilogueOperands, Results
from weaveopt.ops.reduction.peer import PeerReduction

try:
    from weaveopt import _native
except ImportError:  # built without it: no arena can be reserved, and no site is bound
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor


class PeerChunks:
    """One site, ready to run."""

    __slots__ = ("_call", "_hidden", "_site")

    def __init__(self, call: GemmReductionCall, site: PeerReduction) -> None:
        self._call, self._site, self._hidden = call, site, call.reduction.hidden

    def run(self, gemm: DeferredGemm, operands: EpilogueOperands) -> Results | None:
        """normalized and sum; None where the library has to run."""
        site, tokens = self._site, gemm.num_tokens
        chunks = site.begin(tokens, self._call.chunk_tokens(tokens))
        if not chunks:
            return None
        product = gemm.a.new_empty(tokens, self._hidden)
        prepared = site.prepare(product, operands, chunks, tokens)
        if prepared is None or tokens == 0:
            return None if prepared is None else prepared.results[:2]
        device = gemm.a.get_device()
        previous = torch.cuda._exchange_device(device)
        try:
            current = torch.cuda.current_stream(device)
            if len(chunks) == 1:
                gemm.compute(product)
                site.launch_piece(prepared, chunks[0], current.cuda_stream)
                return prepared.results[:2]
            side = second_stream(device)
            try:
                for chunk in chunks:
                    rows_of(gemm, chunk.first, chunk.num_tokens).compute(
                        product[chunk.first : chunk.first + chunk.num_tokens]
                    )
                    side.wait_stream(current)
                    site.launch_piece(prepared, chunk, side.cuda_stream)
            finally:
                # Also where a launch failed: a capture has to find every stream that it drew in.
                current.wait_stream(side)
        finally:
            torch.cuda._maybe_exchange_device(previous)
        return prepared.results[:2]


class PeerTiles:
    """One site, ready to run: one kernel computes the GEMM and sends its tiles as they are finished.

    Nothing is allocated but results, and copies of operands whose rows do not begin at multiples of 16 bytes.
    """

    __slots__ = ("_hidden", "_site", "_tiles", "_unsupported")

    def __init__(self, call: GemmReductionCall, site: PeerReduction) -> None:
        assert call.cut is not None, f"site {call.reduction.site}: tiles without a configuration"
        self._site, self._hidden = site, call.reduction.hidden
        self._tiles = _native.TileConfig(
            tile_columns=call.cut.tile_columns, group_pairs=call.cut.group_pairs, reducer_ctas=call.cut.reducer_ctas
        )
        self._unsupported: dict[int, str] = {}
        """Reason why the device has no kernel for a GEMM, by its depth; empty if it has one."""

    def run(self, gemm: DeferredGemm, operands: EpilogueOperands) -> Results | None:
        """normalized and sum; None where the library has to run, which is so on all ranks or on none."""
        site, tokens, k = self._site, gemm.num_tokens, gemm.a.shape[1]
        pieces = site.begin(tokens)
        if k not in self._unsupported:
            self._unsupported[k] = site.product_unsupported(k)
        if not pieces or self._unsupported[k]:
            return None
        rows = operands.residual if operands.residual is not None else gemm.a.new_empty(tokens, self._hidden)
        prepared = site.prepare(rows, operands, pieces, tokens)
        if prepared is None or tokens == 0:
            return None if prepared is None else prepared.results[:2]
        product = Tiled(aligned_rows(gemm.a), aligned_rows(gemm.b.t()), self._tiles)
        device = gemm.a.get_device()
        previous = torch.cuda._exchange_device(device)
        try:
            site.launch_tiles(prepared, product, torch.cuda.current_stream(device).cuda_stream)
        finally:
            torch.cuda._maybe_exchange_device(previous)
        return prepared.results[:2]


VARIANTS: Mapping[str, type[PeerChunks] | type[PeerTiles]] = MappingProxyType({CHUNKS: PeerChunks, TILES: PeerTiles})
"""Implementation of a call by the word of its variant."""


def bind(call: GemmReductionCall, text: str, op: str, forget: Callable[[], None]) -> PeerChunks | PeerTiles:
    """`call`, encoded as `text`, in the arena that its group has now; `forget` runs when that one goes.

    Raises `ArenaError` if there is no arena or a chunk does not fit it, `WeaveError` if no variant is so called.
    """
    variant = VARIANTS.get(call.variant)
    if variant is None:
        raise WeaveError(f"site {call.reduction.site}: GPUs have no variant {call.variant!r}, but {sorted(VARIANTS)}")
    site = PeerReduction.bind(call.reduction, text, op, forget)
    if call.variant == CHUNKS:
        second_stream(torch.cuda.current_device())
    return variant(call, site)
