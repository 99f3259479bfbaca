"""GPU tests hold the word that an LL packet is empty with wherever data may have it: in inputs, sums and results."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.op_cases import CASES, DTYPES, Case, make_call, make_inputs, reference_of
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer

MARKER = -(1 << 31)
ROW = KernelRow(9, Algorithm.ONE_SHOT, Transfer.LL_PACKET)


def holds_marker(x: torch.Tensor) -> bool:
    return bool((x.contiguous().view(torch.int32) == MARKER).any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if case.markers], ids=str)
def test_data_and_results_hold_the_marker(case: Case, dtype: str) -> None:
    inputs = make_inputs(case, 9, 64, getattr(torch, dtype), 3, seed=1, device="cpu")
    assert all(holds_marker(partial) for partial in inputs.partials)
    assert inputs.operands.residual is None or holds_marker(inputs.operands.residual)
    normalized, _, _ = reference_of(inputs, make_call(case, 64, dtype, 3, (ROW,)))
    assert case.norm is None or holds_marker(normalized)


def test_every_form_of_output_is_among_them() -> None:
    cases = [case for case in CASES if case.markers]
    assert {case.quant for case in cases} == {"none", "static", "per_token"}
    assert {case.wide_out for case in cases} == {case.norm is None for case in cases} == {True, False}
