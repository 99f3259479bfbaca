"""The clock of CPU ranks: as many passes as a time needs, on a simulated host; how long `calibrate` takes by it."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from weaveopt import cost_model
from weaveopt.cli.progress import progress
from weaveopt.measure import host_clock
from weaveopt.measure.cases.gemm import CPU_GRID, CPU_RATES
from weaveopt.measure.clock import Sample
from weaveopt.measure.host_clock import APART, CpuClock, summand_of
from weaveopt.records.candidate import Fabric


class Host:
    """A host whose time goes on only in calls. `slowdown(seconds)`: by how much others slow a call down that begins
    then."""

    def __init__(self, slowdown: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now, self.calls, self._slowdown = 0.0, 0, slowdown
        self.others: list[int] = []
        """Weights that GEMMs in between read."""

    def step(self, us: float) -> Callable[[int], None]:
        def run(index: int) -> None:
            self.calls += 1
            self.now += us * 1e-6 * self._slowdown(self.now)

        return run


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    def made(*arguments: Callable[[float], float]) -> Host:
        host = Host(*arguments)
        monkeypatch.setattr(host_clock.time, "perf_counter", lambda: host.now)
        monkeypatch.setattr(host_clock, "_host_gemm", lambda index: host.others.append(index))
        return host

    return made


@pytest.mark.parametrize(("us", "calls"), [(5e5, 8), (1e5, 8), (1e3, 56), (1.0, 402)])
def test_two_passes_are_enough_on_a_quiet_host(host: Callable[..., Host], us: float, calls: int) -> None:
    quiet = host()
    sample = CpuClock().alone(quiet.step(us), 0.0)
    assert sample.us == pytest.approx(us) and quiet.calls == len(quiet.others) == calls
    assert quiet.now <= max(0.07, 9 * us * 1e-6)


def test_passes_that_differ_are_taken_again_and_the_fastest_counts(host: Callable[..., Host]) -> None:
    busy = host(lambda now: 1.7 if now < 0.03 else 1.0)
    assert CpuClock().alone(busy.step(1000.0), 0.0).us == pytest.approx(1000.0)
    rising = host(lambda now: 1.0 + now)
    CpuClock().alone(rising.step(1e5), 0.0)
    assert rising.calls == 2 + CpuClock.MOST_PASSES * CpuClock.FEWEST_CALLS, "never settles, and ends"


def test_times_are_as_good_as_those_of_longer_measurements(host: Callable[..., Host]) -> None:
    """A third of all tenths of a second are 60 % slower, every call up to 3 %."""
    drawn = random.Random(0)
    slow = [drawn.random() < 1 / 3 for _ in range(100_000)]
    errors = []
    for _ in range(200):
        us = 10 ** drawn.uniform(0.5, 5)
        busy = host(lambda now: (1.6 if slow[int(now * 10) % len(slow)] else 1.0) * drawn.uniform(1.0, 1.03))
        busy.now = drawn.uniform(0, 1000)
        errors.append(CpuClock().alone(busy.step(us), 0.0).us / us - 1)
    errors.sort()
    assert errors[len(errors) // 2] < 0.02 and errors[int(0.75 * len(errors))] < 0.05


def test_outliers_do_not_count_and_all_else_does(host: Callable[..., Host]) -> None:
    """A call that is longer now and then adds to a model's time; one in thirty that the system interrupts does not."""
    times = [100.0] * 24 + [140.0] * 5 + [9000.0]
    found = summand_of(times)
    assert found.us == pytest.approx((24 * 100.0 + 4 * 140.0) / 28) and found.us > 100.0
    assert summand_of([100.0, 5000.0, 102.0]).us == pytest.approx(101.0), "also of a few calls"
    quiet, other = host(), list[int]()
    assert CpuClock(other.append).alone(quiet.step(10.0), 0.0).us == pytest.approx(10.0)
    assert len(other) == quiet.calls and not quiet.others
    assert other[0] == APART, "a GEMM in between does not bring in the weight of the call that follows"


def test_a_process_measures_in_inference_mode_and_outside() -> None:
    """In either order: the GEMM's operands are kept."""
    host_clock._host_operands.cache_clear()
    weight = torch.ones(4, 4, requires_grad=True)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert CpuClock().alone(lambda index: weight @ weight, 10.0).us > 0.0


class TwoRanks:
    """A meeting with one other rank, which is `factor` times as slow."""

    def __init__(self, factor: float) -> None:
        self.factor, self.meetings = factor, 0

    def barrier(self) -> None:
        self.meetings += 1

    def slowest(self, samples: Sequence[Sample]) -> list[Sample]:
        return [Sample(sample.us * self.factor, sample.spread) for sample in samples]

    def align(self, signal: torch.Tensor) -> None:
        raise AssertionError("there is no device")


def test_ranks_call_as_often_as_the_slowest_one_needs(host: Callable[..., Host]) -> None:
    quiet, ranks = host(), TwoRanks(10.0)
    first, second = CpuClock().in_turns([quiet.step(1e3), quiet.step(1e5)], [0.0, 0.0], ranks)
    assert (first.us, second.us) == (pytest.approx(1e4), pytest.approx(1e6))
    assert quiet.calls == 2 * 2 + 2 * (3 + 3) and ranks.meetings == 4


def test_calibrate_measures_for_half_a_minute_on_a_host_like_the_shipped_profiles() -> None:
    """Two ranks; kernels that Inductor compiles, and starting, are another twenty seconds."""
    machine, taken = cost_model.load("cpu"), CpuClock()
    corners = [corner for corner in CPU_GRID.corners if corner[0] <= 256 or max(corner[1:]) <= CPU_RATES]
    times = [
        cost_model.gemm_us(machine, cost_model.Gemm(m, k, n), dtype)
        for dtype in ("bfloat16", "float32")
        for m, n, k in corners
    ]
    for costs in machine.fabric_costs:
        if costs.fabric in (Fabric.LIBRARY, Fabric.SHM):
            # Some have what they stand on measured too: the GEMM, the copy.
            times += 2 * [point.us for curve in costs.curves if curve.world == 2 for point in curve.points]
    assert 5 < sum(map(taken.takes_s, times)) < 35


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress(True) as show_progress:
        for done in range(3):
            show_progress("GEMMs float32", done, 3)
        show_progress("collectives", 0, 2)
    shown = screen.getvalue()
    assert "GEMMs float32" in shown and "3/3" in shown and "collectives" in shown and "2/2" in shown and "━" in shown


def test_a_file_gets_a_line_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    with progress(True) as show_progress:
        for done in range(3):
            show_progress("GEMMs float32", done, 3)
    assert screen.getvalue() == "weaveopt: measuring GEMMs float32\n"
