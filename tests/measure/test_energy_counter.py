"""Energy of kernels, by a counter that is made up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.graphs.nonempty import some
from weaveopt.cost_model.energy import Work
from weaveopt.measure.cases import energy
from weaveopt.measure.cases.energy import Drawn, Energies, growing, idle_watts, joules_of, local_kernels
from weaveopt.measure.draft import Draft
from weaveopt.measure.energy_counter import counter_of


@dataclass
class Device:
    """A device whose bursts draw `burst_joules` each, and that draws `idle_watts` while the host sleeps. Its counter is
    renewed only then."""

    burst_joules: float
    idle_watts: float = 80.0
    drawn: float = 0.0
    shown: float = 1e6
    slept_s: float = 0.0
    num_calls: int = 0

    def burst(self) -> None:
        self.num_calls += 1
        self.drawn += self.burst_joules

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.drawn += self.idle_watts * seconds
        self.shown = 1e6 + self.drawn

    def joules(self) -> float:
        return self.shown

    def limit_watts(self) -> float:
        return 700.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(0.05)
    monkeypatch.setattr(energy.time, "sleep", made.sleep)
    monkeypatch.setattr(energy.time, "monotonic", lambda: made.slept_s)
    return made


def test_a_kernel_runs_long_enough_and_neither_warm_up_nor_pauses_are_counted(device: Device) -> None:
    order: list[str] = []
    joules = joules_of(device.burst, 1000.0, device, device.idle_watts, lambda: order.append("synchronized"))
    assert joules == pytest.approx(0.05)
    counted = int(energy.STEADY_S * 1e6 / 1000.0)
    assert device.num_calls == counted + counted // 10 and len(order) == 2


def test_the_idle_device_draws_something(device: Device) -> None:
    assert idle_watts(device, 2.0) == pytest.approx(80.0)


def test_points_grow_whatever_was_measured() -> None:
    rows = [Drawn(10.0, 0.005), Drawn(30.0, 0.02), Drawn(20.0, 0.03), Drawn(40.0, 0.04), Drawn(50.0, 0.0)]
    points = growing(rows)
    assert [(point.us, point.joules) for point in points] == [(10.0, 0.005), (30.0, 0.02), (40.0, 0.04)]


def test_the_profile_gets_them_and_without_a_counter_none() -> None:
    draft = Draft(torch.device("cpu"), 2, None)
    Energies().write(draft)
    assert draft.power is None and counter_of(torch.device("cpu")) is None
    family = Energies({Work.GEMM: [Drawn(10.0, 0.005)], Work.COMMUNICATION: [Drawn(90.0, 0.02)]}, 700.0, 95.0)
    family.write(draft)
    assert draft.power is not None and (draft.power.limit_watts, draft.power.idle_watts) == (700.0, 95.0)
    assert [each.work for each in draft.power.energies] == [Work.COMMUNICATION, Work.GEMM]


def test_local_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, at sizes that it computes at once."""
    monkeypatch.setattr(energy, "GEMMS", ((4, 8, 8),))
    monkeypatch.setattr(energy, "ATTENTIONS", (8,))
    monkeypatch.setattr(energy, "COPIES", (64,))
    kernels = some(list(local_kernels(torch.device("cpu"))))
    for _, kernel, guess_us in kernels:
        kernel(0)
        assert guess_us > 0
    assert [work for work, _, _ in kernels] == [Work.GEMM, Work.ATTENTION, Work.MEMORY]
