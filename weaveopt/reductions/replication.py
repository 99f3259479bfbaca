"""Whether ranks may share the rows of a site: what each of them adds and multiplies must be the same on all."""

from __future__ import annotations

import warnings

from weaveopt.errors import AgreementError
from weaveopt.fabrics.replicated import first_difference
from weaveopt.reductions.call import ReductionCall, SumOut
from weaveopt.reductions.operands import Operands


def may_share_rows(call: ReductionCall, operands: Operands) -> bool:
    """Compares residual and parameters once, on all ranks of the group; all get the same answer.

    Where they differ the model means it so: the library's all-reduce runs, each rank adds its own, and a warning says
    so. Raises `AgreementError` where a neighbour reads or makes only its own rows, which no library does.
    """
    where = f"weave::all_reduce_norm at site {call.site}"
    difference = first_difference(call.group, where, operands.replicated(call), call.timeout_s)
    if difference is None:
        return True
    if call.residual_sharded or call.sum_out is SumOut.SHARDED:
        raise AgreementError(
            f"{difference}; if it is meant to differ, switch the rule of this site off with "
            'options={"disable": [...]} (the report names it)'
        )
    warnings.warn(f"{difference}: the site runs through the library's all-reduce", RuntimeWarning, stacklevel=2)
    return False
