"""`gemm_reduce_scatter` on the fabric `shm`: the GEMM writes into the arena, and each rank sums its part of all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics.shm_rows import SharedRows, buffers_for
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, Products, part_of
from weaveopt.records.memory import Buffer
from weaveopt.records.site import DTYPE_BYTES
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: no arena can be reserved, and no site is bound
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor


def _num_bytes(call: GemmReduceScatterCall) -> int:
    return call.max_tokens * call.hidden * DTYPE_BYTES[call.dtype]


class ShmGemmReduceScatter:
    """One site, ready to run."""

    __slots__ = ("_call", "_native", "_rows")

    def __init__(self, call: GemmReduceScatterCall, rows: SharedRows) -> None:
        self._call, self._rows = call, rows
        dtype = getattr(_native.DType, call.dtype)
        self._native = _native.GemmReduceScatter(rows.arena.native, rows.site, dtype, torch.get_num_threads())

    @staticmethod
    def buffers(call: GemmReduceScatterCall) -> tuple[Buffer, ...]:
        """Arena buffers of the call on every rank."""
        return buffers_for(_num_bytes(call))

    @staticmethod
    def bind(call: GemmReduceScatterCall, text: str, op: str, forget: Callable[[], None]) -> ShmGemmReduceScatter:
        """Raises `ArenaError` if no arena was reserved or the call does not fit it."""
        return ShmGemmReduceScatter(call, SharedRows(call, text, op, _num_bytes(call), forget))

    def run(self, products: Products, outer: int) -> Tensor | None:
        """This rank's part of the sum; None where there are more rows than were planned for."""
        call, native, rows, tokens = self._call, self._native, self._rows, products.num_tokens
        first = products.a[0]
        if tokens > call.max_tokens:
            return None
        if first.dtype is not rows.dtype or products.b[0].shape[1] != call.hidden or not first.is_cpu:
            found = f"{counted(products.b[0].shape[1], 'column')} of {first.dtype} on {first.device}"
            raise WeaveError(
                f"site {call.site}: the GEMM makes {found}, expected {call.hidden} of {rows.dtype} in the host's memory"
            )
        part = part_of(call, tokens, outer)
        out = first.new_empty(part.shape(call))
        try:
            code = native.enter(tokens)
            if not code:
                products.compute(rows.own(native.next_parity, tokens, call.hidden))
                code = native.run(tokens, *part, call.scale, out.data_ptr(), torch.get_num_threads())
            if code:
                raise rows.failed(code, native.status)
        except BaseException:  # also of a signal's handler, between any two steps
            native.abandon()
            raise
        return out
