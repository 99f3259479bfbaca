"""The energy counter of a GPU, and what the kernels of a profile draw by it."""

from __future__ import annotations

import time

import pytest
import torch

from weaveopt.cost_model.energy import Work
from weaveopt.measure.cases.energy import GEMMS, captured_joules, idle_watts, local_kernels
from weaveopt.measure.clock import CudaClock
from weaveopt.measure.energy_counter import EnergyCounter, counter_of


@pytest.fixture
def counter() -> EnergyCounter:
    found = counter_of(torch.device("cuda", torch.cuda.current_device()))
    assert found is not None, "GPUs from Volta on count, if they are whole"
    return found


@pytest.mark.alone
@pytest.mark.gpu
def test_an_idle_gpu_draws_less_than_it_may(counter: EnergyCounter) -> None:
    torch.cuda.synchronize()
    time.sleep(1.0)
    assert 5.0 < idle_watts(counter) < 0.5 * counter.limit_watts()


@pytest.mark.alone
@pytest.mark.gpu
def test_kernels_draw_between_idle_and_the_limit(counter: EnergyCounter) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock, idle = CudaClock(), idle_watts(counter)
    watts: dict[Work, list[float]] = {}
    for work, kernel, guess_us in local_kernels(device):
        us = clock.alone(kernel, guess_us).us
        joules = captured_joules(kernel, us, counter, idle)
        # Energy over the time of a single run: at the limit it exceeds the limit, as a run takes longer back to back.
        watts.setdefault(work, []).append(joules / us * 1e6)
        print(f"{work}: {us:.1f} us, {joules:.4f} J, {watts[work][-1]:.0f} W")
    assert all(idle < each < 1.6 * counter.limit_watts() for row in watts.values() for each in row), watts
    assert len(watts[Work.GEMM]) == len(GEMMS) and watts[Work.GEMM][-1] > 0.6 * counter.limit_watts(), watts
