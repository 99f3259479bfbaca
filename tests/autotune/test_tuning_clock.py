"""The clock of GPUs for kernels that are timed at compile time, on a clock whose kernels only say how long they take;
and which kernels are weighed before they are timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graphs.nonempty import some
from weaveopt.autotune import kernel_timing, tune
from weaveopt.autotune.asked_kernels import AskedKernel
from weaveopt.autotune.kernel_calls import Operands
from weaveopt.autotune.kernel_timing import KernelTimings, TuningGpuClock, take_all_s, time_kernels
from weaveopt.autotune.tune import in_turn
from weaveopt.cost_model.timed import KernelShape
from weaveopt.measure.clock import HOT_US, OTHER_US, CudaClock, Launch, Sample
from weaveopt.records.price import Price, Uncertainty

SAVED_US = 0.5
"""How much shorter a call is that follows one of the same kernel."""
SPREAD_US = 0.1


class Simulated(TuningGpuClock):
    """On no device: each call of a chain says how long it takes."""

    def __init__(self) -> None:
        self.chains: list[tuple[float, float]] = []
        self.total_us, self.last = 0.0, ""
        with mock.patch.object(CudaClock, "__init__", lambda _: None):
            super().__init__()
        self._other = None

    def call(self, kernel: str, us: float) -> None:
        self.total_us += us - SAVED_US * (kernel == self.last)
        self.last = kernel

    def _make_other(self) -> Launch:
        return kernel_of(self, OTHER_US)


def alone(clock: Simulated, launch: Launch, expected_us: float) -> Sample:
    """Stands in for `CudaClock.alone`: a chain of calls that follow one another."""
    launch(0)
    clock.total_us = 0.0
    for index in range(8):
        launch(index)
    clock.chains.append((expected_us, clock._warm_ms(expected_us)))
    us = clock.total_us / 8
    return Sample(us, SPREAD_US / us)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    monkeypatch.setattr(CudaClock, "alone", alone)
    return Simulated()


def kernel_of(clock: Simulated, us: float) -> Launch:
    def launch(index: int) -> object:
        clock.call(f"kernel of {us}", us)
        return None

    return launch


def test_a_short_kernel_takes_as_long_as_among_others(clock: Simulated) -> None:
    """Beyond what the other kernel takes back to back with itself: that one too is longer so."""
    for us in some((6.0, 29.0, 31.0, 400.0)):
        found = clock.among_others(kernel_of(clock, us), us)
        assert found.us == pytest.approx(us + SAVED_US if us <= HOT_US else us - SAVED_US), us
        assert found.spread * found.us == pytest.approx(SPREAD_US), us


def test_the_memory_of_the_other_kernel_is_given_back(clock: Simulated) -> None:
    clock.among_others(kernel_of(clock, 6.0), 6.0)
    assert clock._other is not None
    clock.release()
    assert clock._other is None
    assert clock.among_others(kernel_of(clock, 6.0), 6.0).us == pytest.approx(6.0 + SAVED_US)


def test_a_device_is_hot_before_a_long_kernel_counts(clock: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock.chains.clear()
    for wait_s in (0.0, 0.01, 1.0):
        now[0] += wait_s
        clock.alone(kernel_of(clock, 100.0), 100.0)
    clock.alone(kernel_of(clock, 5.0), 5.0)
    assert [warm_ms for _, warm_ms in clock.chains] == [100.0, 30.0, 100.0, 1.0]


def kernels_of(*times_us: float) -> list[AskedKernel]:
    return [AskedKernel(KernelShape("gemm", "float32", 1 + at, (8, 8)), us) for at, us in enumerate(times_us)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_kernels_take_as_long_as_each(device: str, clock: Simulated) -> None:
    """The sum is that of `time_kernels`, which leaves a kernel that would exceed the budget."""
    each_s = [take_all_s(kernels_of(us), device) for us in some((3.0, 20.0, 100.0, 5000.0))]
    together_s = take_all_s(kernels_of(3.0, 20.0, 100.0, 5000.0), device)
    assert 0.0 < max(each_s) < together_s <= sum(each_s) + 1e-9
    if device == "cpu":
        assert time_kernels(kernels_of(5000.0), torch.device("cpu"), each_s[-1] * 0.99, 1 << 20).left
    else:
        assert kernel_timing._takes_s(kernels_of(5000.0)[0], clock) == pytest.approx(each_s[-1])


@pytest.mark.parametrize("turns", [False, True])
def test_own_kernels_are_timed_where_a_choice_turns_on_them(turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles for longer than all else takes; of kernels that nothing is known of the time alone decides."""
    us = Price(5.0, lambda: Uncertainty({"own": 0.5}))
    unknown = Price(5.0, lambda: Uncertainty({"other": 5.0}))
    own = AskedKernel(KernelShape("attention masked", "bfloat16", 8, (1, 2, 3)), us)
    strange = AskedKernel(KernelShape("attention paged", "bfloat16", 8, (1, 2, 3)), unknown)
    gemm, timed = kernels_of(3.0)[0], list[AskedKernel]()

    def time_them(order: Sequence[AskedKernel], *_: object) -> KernelTimings:
        timed.extend(order)
        return KernelTimings(())

    monkeypatch.setattr(tune, "time_kernels", time_them)
    monkeypatch.setattr(tune, "_weight_bytes", lambda _: 1)
    tuning = mock.Mock(_device=torch.device("cuda"))
    tuning._prices.weighed.return_value = (replace(own, loss_us=0.4 * turns), strange, gemm)
    tune._Tuning._time(tuning, (own, strange, gemm), 0.5)
    assert {each.shape for each in timed} == {*([own.shape] if turns else []), strange.shape, gemm.shape}
    assert tuning._timings.left == (() if turns else (own.shape,))


def test_kernels_of_the_captured_graph_come_first_where_they_leave_half_of_the_budget() -> None:
    loses, runs, turns = (
        replace(each, loss_us=loss) for each, loss in zip(kernels_of(9.0, 8.0, 7.0), (3.0, 0.0, 9.0), strict=True)
    )
    runs = replace(runs, is_captured=True)
    takes_s = take_all_s([runs], "cpu")
    assert in_turn([loses, runs, turns], 2.1 * takes_s, "cpu") == [runs, turns, loses]
    assert in_turn([loses, runs, turns], 1.9 * takes_s, "cpu") == [turns, loses, runs]


@pytest.mark.parametrize("budget_s, is_weighed", [(100.0, False), (0.001, True)])
def test_kernels_are_weighed_where_the_budget_cannot_hold_them(
    budget_s: float, is_weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, ordered = kernels_of(3.0, 20.0, 100.0), list[Sequence[AskedKernel]]()

    def timed(order: Sequence[AskedKernel], *_: object) -> KernelTimings:
        ordered.append(order)
        return KernelTimings(())

    monkeypatch.setattr(tune, "time_kernels", timed)
    monkeypatch.setattr(tune, "_weight_bytes", lambda _: 1)
    weighed = [AskedKernel(each.shape, each.us, each.us) for each in kernels]
    tuning = mock.Mock(_device=torch.device("cpu"))
    tuning._prices.weighed.return_value = tuple(weighed)
    tune._Tuning._time(tuning, kernels, budget_s)
    [order] = ordered
    assert tuning._prices.weighed.called == is_weighed
    assert list(order) == (weighed[::-1] if is_weighed else kernels)


def gemm(rows: int, *rest: int, us: float = 100.0, is_captured: bool = True) -> AskedKernel:
    return AskedKernel(KernelShape("gemm", "float32", rows, rest), us, is_captured=is_captured)


def test_kernels_follow_the_graphs_largest_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is short and that the captured graph runs leaves the caches as its model does."""
    made: list[int] = []

    def launch_of(shape: KernelShape, operands: object) -> Launch | None:
        made.append(shape.size)
        if shape.size == 6:
            raise torch.OutOfMemoryError("no memory")
        return None if shape.size == 7 else run

    def run(index: int) -> int:
        return index

    monkeypatch.setattr(kernel_timing, "launch_of", launch_of)
    others = [gemm(4, 9000, 32, us=1e5), gemm(3, 999, 32, is_captured=False)]
    kernels = [gemm(16, 64, 32), gemm(8, 640, 32), gemm(7, 900, 32), gemm(6, 950, 32), *others]
    assert kernel_timing.gemm_between(kernels, Operands(torch.device("cpu"), 1)) is run
    assert made == [6, 7, 8], "the largest cannot be called alone"
    assert kernel_timing.gemm_between(others, Operands(torch.device("cpu"), 1)) is None


def test_weights_are_what_a_graph_reads_whole() -> None:
    """A token reads one row of an embedding's table, which is as large as all else of a small model."""

    def look_up(tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, table) @ weight

    shapes = torch.zeros(3, dtype=torch.int64), torch.zeros(1000, 8), torch.zeros(8, 4)
    graph = make_fx(look_up, tracing_mode="fake")(*shapes).graph
    assert tune._weight_bytes(mock.Mock(graph=graph)) == 8 * 4 * 4
    tied = make_fx(lambda i, t, w: look_up(i, t, w) @ t.t()[:4], tracing_mode="fake")(*shapes).graph
    assert tune._weight_bytes(mock.Mock(graph=tied)) == (8 * 4 + 1000 * 8) * 4, "a head reads the same table whole"
