"""`all_gather_gemm` on the fabric `shm`: every rank reads the others' shards in their segments, then multiplies."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics.shm_rows import SharedRows, buffers_for
from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall, Weights
from weaveopt.records.memory import Buffer
from weaveopt.records.site import DTYPE_BYTES
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: no arena can be reserved, and no site is bound
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor


def _num_bytes(call: AllGatherGemmCall) -> int:
    """Bytes of one rank's shard at the planned number of rows."""
    return -(-call.max_tokens // call.world) * call.hidden * DTYPE_BYTES[call.dtype]


class ShmAllGatherGemm:
    """One site, ready to run."""

    __slots__ = ("_call", "_native", "_rows")

    def __init__(self, call: AllGatherGemmCall, rows: SharedRows) -> None:
        self._call, self._rows = call, rows
        self._native = _native.AllGatherGemm(rows.arena.native, rows.site, torch.get_num_threads())

    @staticmethod
    def buffers(call: AllGatherGemmCall) -> tuple[Buffer, ...]:
        """Arena buffers of the call on every rank."""
        return buffers_for(_num_bytes(call))

    @staticmethod
    def bind(call: AllGatherGemmCall, text: str, op: str, forget: Callable[[], None]) -> ShmAllGatherGemm:
        """Raises `ArenaError` if no arena was reserved or the call does not fit it."""
        return ShmAllGatherGemm(call, SharedRows(call, text, op, _num_bytes(call), forget))

    def run(self, shard: Tensor, weights: Weights, outer: int) -> tuple[Tensor, list[Tensor]] | None:
        """The gathered rows and the GEMMs' results; None where there are more rows than were planned for."""
        call, rows = self._call, self._rows
        shard = rows.checked(shard, call.hidden, "the shard")
        own = shard.numel() // call.hidden
        tokens = own * call.world
        if tokens > call.max_tokens:
            return None
        if outer < 1 or own % outer:
            raise WeaveError(f"site {call.site}: {counted(own, 'row')} of a rank are not {counted(outer, 'block')}")
        whole = shard.new_empty(tokens, call.hidden)
        block_bytes = own // outer * call.hidden * shard.itemsize
        code = self._native.run(tokens, outer, block_bytes, shard.data_ptr(), whole.data_ptr(), torch.get_num_threads())
        if code:
            raise rows.failed(code, self._native.status)
        return whole, weights.multiply(whole)
