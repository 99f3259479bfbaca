"""Measured kernels compute what they are measured for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weaveopt.cost_model.batched import num_active_experts, same_work
from weaveopt.cost_model.gemm import Gemm
from weaveopt.measure.cases.experts.grouped_gemm import CASES, GroupedCase, GroupedGemms, grouped, has_grouped
from weaveopt.measure.clock import Sample
from weaveopt.measure.draft import Draft


class Once:
    """A clock that runs each kernel once and keeps what it made."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def alone(self, launch: Callable[[int], object], expected_us: float) -> Sample:
        made = launch(0)
        assert isinstance(made, torch.Tensor)
        self.made.append(made)
        return Sample(1.0, 0.0)

    def together(self, launch: Callable[[int], object], expected_us: float, group: object = None) -> Sample:
        raise NotImplementedError


def test_a_grouped_gemm_stands_beside_one_of_the_same_work() -> None:
    """The first expert's rows meet its weights in both."""
    clock, case = Once(), GroupedCase(experts=4, rows=32, k=64, n=16)
    grouped(clock, torch.device("cpu"), case, 1.0)
    by_expert, at_once = clock.made
    assert by_expert.shape == (32, 16) and at_once.shape == (8, 64)
    both = min(int(case.counts[0]), 8)
    torch.testing.assert_close(by_expert[:both], at_once[:both, :16], rtol=2e-2, atol=2e-2)


def test_rows_are_spread_as_routers_spread_them_and_priced_so() -> None:
    for case in CASES:
        assert int(case.counts.sum()) == case.rows and len(case.counts) == case.experts
        assert case.rows < 64 or len(set(case.counts.tolist())) > 1
        assert case.one == same_work(num_active_experts(case.experts, case.rows), Gemm(case.rows, case.k, case.n))
    few = GroupedCase(8, 16, 64, 64)
    assert few.one == Gemm(3, 64, 7 * 64), "7 of 8 experts get any of 16 rows"


def test_slowdowns_are_written_by_size_and_rows() -> None:
    family = GroupedGemms()
    family.times = {
        case: (Sample(float(case.k) * (1 + case.rows), 0.0), Sample(float(1 + case.rows), 0.0)) for case in CASES
    }
    draft = Draft(torch.device("cpu"), 1, None)
    family.write(draft)
    costs = draft.compiled
    assert costs is not None
    assert [size.elements for size in costs.grouped] == sorted({case.elements for case in CASES})
    for size in costs.grouped:
        of_size = [case for case in CASES if case.elements == size.elements]
        assert [point.rows for point in size.rows] == sorted({case.rows_of_active for case in of_size})
        assert {point.times for point in size.rows} == {float(of_size[0].k)}


def test_a_torch_without_grouped_gemms_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*operands: object) -> torch.Tensor:
        raise RuntimeError("torch._grouped_mm is only supported on CUDA devices with compute capability = 9.0")

    assert has_grouped(torch.device("cpu"))
    monkeypatch.setattr(torch, "_grouped_mm", refuse)
    assert not has_grouped(torch.device("cpu"))
    monkeypatch.delattr(torch, "_grouped_mm")
    assert not has_grouped(torch.device("cpu"))
