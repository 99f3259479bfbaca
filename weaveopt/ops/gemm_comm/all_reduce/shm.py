"""`gemm_all_reduce_norm` on CPU ranks of one host: chunks of rows follow one another.

Each is a call of the fused CPU kernel whose GEMM writes into the arena; no two run at the same time, as the cores that
would exchange rows are those that multiply.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weaveopt.errors import WeaveError
from weaveopt.ops.gemm_comm.all_reduce.call import GemmReductionCall
from weaveopt.ops.gemm_comm.all_reduce.operands import rows_of
from weaveopt.ops.reduction.operands import DeferredGemm, EpilogueOperands, Results
from weaveopt.ops.reduction.shm import ShmReduction
from weaveopt.wording import counted

Tensor = torch.Tensor


class ShmGemm:
    """One site, ready to run."""

    __slots__ = ("_call", "_site")

    def __init__(self, call: GemmReductionCall, site: ShmReduction) -> None:
        self._call, self._site = call, site

    @staticmethod
    def bind(call: GemmReductionCall, text: str, op: str, forget: Callable[[], None]) -> ShmGemm:
        """`call`, encoded as `text`, in the arena that its group has now; `forget` runs when that one goes.

        Raises `ArenaError` if no arena was reserved or a chunk does not fit it.
        """
        if call.variant != "chunks":
            raise WeaveError(f"site {call.reduction.site}: CPU ranks have no variant {call.variant!r}")
        return ShmGemm(call, ShmReduction.bind(call.reduction, text, op, forget))

    def run(self, gemm: DeferredGemm, operands: EpilogueOperands) -> Results | None:
        """normalized and sum; None where the library has to run."""
        site, hidden, tokens = self._site, self._call.reduction.hidden, gemm.num_tokens
        most, residual = self._call.chunk_tokens(tokens), operands.residual
        if not site.replication.holds(operands):
            return None
        like = gemm.a.new_empty(tokens, hidden) if residual is None else residual
        normalized, total = results = site.results(like.contiguous())
        rows = None if residual is None else residual.reshape(-1, hidden)
        for first in range(0, max(tokens, 1), most):
            count = min(most, tokens - first)
            own = operands if rows is None else operands._replace(residual=rows[first : first + count])
            out = (_rows(normalized, first, count, hidden), _rows(total, first, count, hidden))
            done = site.run(rows_of(gemm, first, count), own, out)
            assert done is not None, f"a chunk of {counted(count, 'row')} does not fit one of {most}"
        return results


def _rows(x: Tensor, first: int, count: int, hidden: int) -> Tensor:
    """Rows of a result; the empty tensor if the result is not wanted."""
    return x.view(-1, hidden)[first : first + count] if x.numel() else x
