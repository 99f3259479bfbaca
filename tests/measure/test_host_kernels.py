"""Measurements of the fused kernels through memory of the host: which there are, and what a profile has of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.measure.test_families import rows, written
from weaveopt import cost_model
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.errors import OptionError
from weaveopt.measure.base import renew
from weaveopt.measure.cases.reduction import host
from weaveopt.measure.cases.reduction.host import HostKernels
from weaveopt.ops.reduction.prices.kernels import kernel_variants
from weaveopt.ops.reduction.variant import OP, Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric


@pytest.mark.parametrize("quick", [True, False])
def test_kernels_are_measured_where_they_may_pay(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(host.VARIABLE, raising=False)
    every = list(host.kernels(quick))
    assert len({(fused.row, fused.hidden) for fused in every}) == len(every)
    assert {fused.row.transfer for fused in every} == set(host.TRANSFERS)
    signalled = [fused for fused in every if fused.row.transfer is not Transfer.LL_PACKET]
    assert min(fused.bytes for fused in signalled) >= host.SIGNALLED_BYTES
    assert max(fused.bytes for fused in every) <= host.LIMIT_BYTES


def test_the_variable_names_the_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host.VARIABLE, "ll_packet, posted")
    assert {fused.row.transfer for fused in host.kernels(False)} == {Transfer.LL_PACKET, Transfer.POSTED}
    monkeypatch.setenv(host.VARIABLE, "posted,direct")
    with pytest.raises(OptionError, match=r"'direct' is no transfer on host; expected ll_packet, bulk, posted"):
        host.kernels_of(1, 1 << 20)


def measured() -> cost_model.Machine:
    kernels = (
        KernelRow(0, Algorithm.ONE_SHOT, Transfer.LL_PACKET),
        KernelRow(0, Algorithm.TWO_SHOT, Transfer.LL_PACKET),
        KernelRow(0, Algorithm.TWO_SHOT, Transfer.POSTED, 64),
    )
    return written(HostKernels({(2, 4096, kernel): rows(6.0 + at) for at, kernel in enumerate(kernels)}))


def test_only_kernels_that_were_measured_are_used() -> None:
    machine = measured()
    found = kernel_variants(machine, Fabric.HOST, 4096, 2)
    assert {(each.algorithm, each.transfer, each.num_ctas) for each in found} == {
        (Algorithm.ONE_SHOT, Transfer.LL_PACKET, 0),
        (Algorithm.TWO_SHOT, Transfer.LL_PACKET, 0),
        (Algorithm.TWO_SHOT, Transfer.POSTED, 64),
    }
    assert all(each.measured for each in found)
    assert not kernel_variants(cost_model.load("h100x2"), Fabric.HOST, 4096, 2)


def test_a_base_keeps_neither_fabrics_that_were_left_out_nor_times_of_another_link() -> None:
    base = cost_model.load("h100x2")
    assert {costs.link_class for costs in base.fabric_costs} == {"nvlink"}
    today = measured()
    costs = tuple(dataclasses.replace(each, link_class="host") for each in today.fabric_costs)
    today = dataclasses.replace(today, fabric_costs=costs)
    found = renew(today, base, ("host", "library"))
    machine = found.machine
    assert Fabric.HOST in machine.fabrics and Fabric.PEER not in machine.fabrics
    assert not {name for name in found.kept if name.startswith(("peer", "library"))}
    library = fabric_costs(machine, Fabric.LIBRARY)
    assert library == next(each for each in costs if each.fabric is Fabric.LIBRARY)
    assert base.contention is not None and base.copy_engine is not None
    assert machine.contention is None and machine.copy_engine is None, "they were measured on NVLink"
    assert not {"contention", "copy_engine"} & {*found.kept}
    assert fabric_costs(machine, Fabric.HOST).curves_of(OP)
    assert Fabric.PEER in renew(today, base).machine.fabrics, "where nothing is named, all is kept"


def test_what_was_measured_is_a_profile_that_can_be_read(tmp_path: Path) -> None:
    machine = measured()
    file = tmp_path / "no-peer.json"
    file.write_text(cost_model.dumps(machine), encoding="utf-8")
    read = cost_model.load(str(file))
    assert fabric_costs(read, Fabric.HOST) == fabric_costs(machine, Fabric.HOST)
