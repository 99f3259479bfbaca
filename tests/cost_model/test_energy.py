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
    graph_energy,
    kernel_joules,
    steady_us,
    work_of,
)
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
