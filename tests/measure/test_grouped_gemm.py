"""Measured kernels compute what they are measured for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weaveopt.measure.cases.grouped_gemm import GroupedCase, grouped, has_grouped
from weaveopt.measure.clock import Sample


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
    assert by_expert.numel() == at_once.numel()
    torch.testing.assert_close(by_expert[:8], at_once[:, :16], rtol=2e-2, atol=2e-2)


def test_a_torch_without_grouped_gemms_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*operands: object) -> torch.Tensor:
        raise RuntimeError("torch._grouped_mm is only supported on CUDA devices with compute capability = 9.0")

    assert has_grouped(torch.device("cpu"))
    monkeypatch.setattr(torch, "_grouped_mm", refuse)
    assert not has_grouped(torch.device("cpu"))
    monkeypatch.delattr(torch, "_grouped_mm")
    assert not has_grouped(torch.device("cpu"))
