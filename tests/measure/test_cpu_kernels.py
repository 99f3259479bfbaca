"""Kernels bound by memory on CPU ranks: generated code without guards, and library calls after computation."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

from tests.ranks import run_ranks
from weaveopt.measure.cases import collectives
from weaveopt.measure.cases.collectives import COMPUTED_US, library_call
from weaveopt.measure.cases.memory import NORM, add_norm, call_us, fused_kernel, generated_code, kernel_inputs
from weaveopt.measure.clock import Launch, Sample
from weaveopt.measure.host_clock import CpuClock

CPU = torch.device("cpu")


def test_generated_code_computes_the_function_also_from_a_cache() -> None:
    inputs = kernel_inputs(CPU, NORM, 3, 64)
    for _ in range(2):
        found = generated_code(add_norm, inputs)(list(inputs))
        assert isinstance(found, (list, tuple))
        for each, expected in zip(found, add_norm(*inputs), strict=True):
            torch.testing.assert_close(each, expected)


def test_a_kernel_is_timed_without_guards() -> None:
    """A row of 4096 takes a few microseconds; the guards of its function take thirty."""
    clock = CpuClock()
    num_bytes, sample = fused_kernel(clock, CPU, NORM, 1, 4096, 10.0)
    compiled = torch.compile(add_norm, dynamic=False)
    inputs = kernel_inputs(CPU, NORM, 1, 4096)
    compiled(*inputs)
    guarded = clock.alone(lambda index: compiled(*inputs), 10.0)
    assert num_bytes == 4 * 4096 * 2
    assert call_us(clock, CPU, NORM) < guarded.us / 2 and sample.us < 0.7 * guarded.us


class OneCall:
    """A clock that calls once."""

    def together(self, launch: Launch, expected_us: float, group: object) -> Sample:
        start = time.perf_counter()
        launch(0)
        return Sample((time.perf_counter() - start) * 1e6, 0.0)


@pytest.mark.parametrize(("device", "computes"), [("cpu", True), ("cuda", False)])
def test_the_library_is_called_after_computation_on_cpu_ranks(device: str, computes: bool) -> None:
    began: list[float] = []

    def call(index: int) -> None:
        began.append(time.perf_counter())
        time.sleep(0.002)

    ranks = mock.Mock(device=torch.device(device))
    with mock.patch.object(collectives, "collective", lambda *asked: call):
        start = time.perf_counter()
        sample = library_call(OneCall(), ranks, "all_reduce", 1024, 10.0, kernel_us=100.0)  # type: ignore[arg-type]
    assert ((began[0] - start) * 1e6 >= COMPUTED_US) is computes
    assert sample.us >= 1900.0  # the call alone, less the kernel


def _replication_of_a_whole_sum(rank: int) -> list[bool | None]:
    from weaveopt.measure.cases.reduction.calls import Fused, fused_shm, reserve_shm
    from weaveopt.measure.ranks import subgroup
    from weaveopt.ops.reduction import op
    from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer

    ranks, fused = subgroup(2, CPU), Fused(KernelRow(0, Algorithm.TWO_SHOT, Transfer.SEGMENT), 256, 8)
    reserve_shm(ranks, 256, 8)
    fused_shm(ranks, fused, 8, sharded=False)(0)
    return [site.replication.known for site in op._bound["cpu"].values()]  # type: ignore[attr-defined]


def test_ranks_compare_a_residual_once_where_its_exchange_is_measured() -> None:
    """One of zeros proves nothing, and was compared in every call: the link seemed a tenth as fast."""
    assert run_ranks(_replication_of_a_whole_sum, 2) == [[True], [True]]
