"""Condition for ranks to share the rows of a site: operands of the addition and the norm are equal on all ranks."""

from __future__ import annotations

import warnings

from weaveopt.errors import AgreementError
from weaveopt.fabrics.replicated import Comparison, compare
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands


class Replication:
    """True or false for a site: its ranks hold the same residual and parameters."""

    __slots__ = ("_call", "known")

    def __init__(self, call: ReductionCall) -> None:
        self._call = call
        self.known: bool | None = None
        """None: no call has proven it yet."""

    def holds(self, operands: EpilogueOperands) -> bool:
        """True if ranks may share the rows of a call; compared on all ranks until a call proves it.

        Where values differ the model means it so: the library's all-reduce runs, each rank adds its own, and a warning
        says so. Raises `AgreementError` where a neighbour reads or makes only its own rows, which no library does.
        """
        if self.known is None:
            found = _compared(self._call, operands)
            if not found.proven:
                return found.difference is None
            self.known = found.difference is None
        return self.known


def _compared(call: ReductionCall, operands: EpilogueOperands) -> Comparison:
    where = f"weave::all_reduce_norm at site {call.site}"
    found = compare(call.group, where, operands.replicated(call), call.timeout_s)
    if found.difference is None:
        return found
    if call.residual_sharded or call.sum_out is SumOut.SHARDED:
        raise AgreementError(
            f"{found.difference}; if it is meant to differ, switch the rule of this site off with "
            'options={"disable": [...]} (the report names it)'
        )
    warnings.warn(f"{found.difference}: the site runs through the library's all-reduce", RuntimeWarning, stacklevel=2)
    return found
