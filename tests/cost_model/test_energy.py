"""Power: what a graph takes run after run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weaveopt import cost_model
from weaveopt.cost_model.energy import (
    EnergyPoint,
    GraphEnergy,
    PowerCosts,
    Work,
    WorkEnergy,
    at_other_clock,
    graph_energy,
    kernel_joules,
    steady_us,
    work_of,
)
from weaveopt.cost_model.gemm import Gemm, gemm_us, power_at_clock
from weaveopt.cost_model.timed import KernelShape, KernelTime, TimedKernels
from weaveopt.cost_model.validate import SCHEMA
from weaveopt.errors import ProfileError

GEMM = WorkEnergy(Work.GEMM, (EnergyPoint(10.0, 0.005), EnergyPoint(100.0, 0.08)))
POWER = PowerCosts("power", 700.0, 100.0, (GEMM, WorkEnergy(Work.COMMUNICATION, (EnergyPoint(100.0, 0.03),))))
H200 = cost_model.load("h200x4")


def test_energies_are_read_between_points_and_at_the_power_of_the_nearest_beyond() -> None:
    assert kernel_joules(POWER, Work.GEMM, 55.0) == pytest.approx(0.0425)
    assert kernel_joules(POWER, Work.GEMM, 100.0) == 0.08
    assert kernel_joules(POWER, Work.GEMM, 1000.0) == pytest.approx(0.8)
    assert kernel_joules(POWER, Work.GEMM, 1.0) == pytest.approx(0.0005)
    assert kernel_joules(POWER, Work.MEMORY, 10.0) == pytest.approx(0.001), "not measured: as idle"


def test_a_kernel_that_was_timed_at_another_clock_draws_what_the_profile_says_of_it() -> None:
    faster = at_other_clock(POWER, Work.GEMM, 0.8)
    assert kernel_joules(faster, Work.GEMM, 44.0) == pytest.approx(kernel_joules(POWER, Work.GEMM, 55.0))
    assert kernel_joules(faster, Work.COMMUNICATION, 50.0) == kernel_joules(POWER, Work.COMMUNICATION, 50.0)
    assert at_other_clock(POWER, Work.GEMM, 1.0) == POWER


def test_energies_follow_the_timed_gemms_alone() -> None:
    assert H200.power is not None
    assert power_at_clock(H200) == H200.power, "nothing was timed"
    gemms = [Gemm(2048, 4096, 3072), Gemm(2048, 7168, 4096)]
    shapes = [KernelShape("gemm", "bfloat16", each.m, (each.k, each.n), "rc") for each in gemms]
    times = [gemm_us(H200, each, "bfloat16") * factor for each, factor in zip(gemms, (0.9, 0.8), strict=True)]
    attention = KernelTime(KernelShape("attention flash", "bfloat16", 2048, (32, 8, 128)), 1.0)
    timed = TimedKernels([*map(KernelTime, shapes, times), attention])
    power = power_at_clock(replace(H200, timed=timed))
    assert power is not None
    ratio = sum(times) / sum(gemm_us(H200, each, "bfloat16") for each in gemms)
    assert 0.8 < ratio < 0.9
    assert power == at_other_clock(H200.power, Work.GEMM, ratio)
    wide = TimedKernels([KernelTime(shapes[0], times[0], spread=2.0)])
    assert power_at_clock(replace(H200, timed=wide)) == H200.power, "a time less sure than the profile counts"


def test_names_of_kernels_and_terms_have_their_work() -> None:
    names = {
        "gemm": Work.GEMM, "experts": Work.GEMM, "attention": Work.ATTENTION, "memory": Work.MEMORY,
        "add_norm": Work.MEMORY, "all_reduce ring": Work.COMMUNICATION, "synchronize": Work.COMMUNICATION,
        "host": Work.HOST,
    }  # fmt: skip
    assert {name: work_of(name) for name in names} == names


def test_a_graph_within_the_limit_takes_its_time_and_one_beyond_its_energy_over_it() -> None:
    light = graph_energy(POWER, [("all_reduce", 100.0)])
    assert light == GraphEnergy(0.03, 100.0) and steady_us(POWER, light, 100.0) == 100.0
    heavy = graph_energy(POWER, [("gemm", 100.0), ("gemm", 100.0), ("all_reduce", 100.0)])
    assert heavy is not None and heavy.joules == pytest.approx(0.19)
    assert steady_us(POWER, heavy, 300.0) == 300.0, "633 W on average"
    # Hidden under GEMMs the exchange still draws, but the device's idle power only once: 0.19 J - 100 W * 100 us.
    assert steady_us(POWER, heavy, 200.0) == pytest.approx(0.18 / 700.0 * 1e6)
    assert steady_us(None, heavy, 200.0) == steady_us(POWER, None, 200.0) == 200.0
    assert graph_energy(None, [("gemm", 1.0)]) is None
    assert graph_energy(POWER, [("gemm", 100.0), ("all_reduce", 100.0), ("gemm", -100.0)]) == light, "not run twice"


def test_profiles_hold_energies_and_those_that_contradict_themselves_are_refused(tmp_path: object) -> None:
    path = tmp_path / "a.json"  # type: ignore[operator]
    power = replace(POWER, origin=H200.memory.origin)
    path.write_text(cost_model.dumps(replace(H200, power=power)))
    assert cost_model.load(str(path)).power == power
    document = json.loads(path.read_text())
    assert document["schema"] == SCHEMA
    assert "power" in dict(cost_model.load(str(path)).summary().origins)
    document["power"]["energies"][0]["points"][1]["joules"] = 0.001
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=r"power\.energies\[0\]\.points\[1\]\.joules: found 0.001"):
        cost_model.load(str(path))
    document["power"]["limit_watts"] = 0
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match="limit_watts"):
        cost_model.load(str(path))
