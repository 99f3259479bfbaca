"""Times between GPUs of several hosts become curves of the profile: what was put in comes out, all else stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.emulation.gpu_hosts import CPU, flagged_us, kernel_us, library_us, machine, measured
from tests.ranks import run_ranks
from tests.ranks.tcp_ranks import become_host
from weaveopt import cost_model
from weaveopt.cost_model.collectives import fabric_costs, inter_link
from weaveopt.cost_model.hosts_curves import curves_between
from weaveopt.cost_model.machine import MEASURED
from weaveopt.fabrics.topology import Group, Topology, fake
from weaveopt.measure.base import renew
from weaveopt.measure.cases.reduction import gpu_hosts
from weaveopt.measure.cases.reduction.calls import Fused
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession
from weaveopt.ops.reduction.variant import OP
from weaveopt.records.candidate import Fabric

BEFORE = cost_model.load("h100x2")


def test_every_row_length_is_measured_up_to_the_largest_message() -> None:
    every, few = list(gpu_hosts.kernels(False)), list(gpu_hosts.kernels(True))
    assert len(set(every)) == len(every) and set(few) < set(every)
    variants = ("doubling packet", "doubling flagged_row")
    for row in gpu_hosts.ROWS:
        for variant in variants:
            sizes = [fused.bytes for fused in every if (fused.hidden, fused.row.variant) == (row, variant)]
            assert sizes == sorted(sizes) and sizes[0] == 2 * row and sizes[-1] == gpu_hosts.MOST_BYTES
    assert {fused.row.variant for fused in every} == {fused.row.variant for fused in few} == set(variants)
    assert gpu_hosts.REDUCED_BYTES[0] <= 2 * min(gpu_hosts.ROWS) and gpu_hosts.REDUCED_BYTES[-1] == 64 << 20


def test_both_are_curves_among_so_many_hosts(tmp_path: Path) -> None:
    made = machine(hosts=4)
    origins = dict(made.origins)
    kernels = curves_between(fabric_costs(made, Fabric.NVSHMEM), OP)
    assert [curve.row for curve in kernels] == list(gpu_hosts.ROWS)
    for curve in kernels:
        assert (curve.variant, curve.world, curve.hosts) == ("doubling packet", 4, 4)
        assert curve.last_bytes == gpu_hosts.MOST_BYTES and origins[curve.origin].kind == MEASURED
        assert [p.us for p in curve.points] == pytest.approx([kernel_us(p.bytes) for p in curve.points], abs=1e-3)
    (library,) = curves_between(fabric_costs(made, Fabric.LIBRARY), "all_reduce")
    assert (library.variant, library.hosts, library.last_bytes) == ("library", 4, None)
    assert [p.us for p in library.points] == pytest.approx([library_us(p.bytes) for p in library.points], abs=1e-3)
    path = tmp_path / "here.json"
    path.write_text(cost_model.dumps(made))
    assert cost_model.load(str(path)) == made
    lines = dict(made.summary(hosts=4).origins)
    assert "fabrics.nvshmem.all_reduce_norm.doubling.packet.world4.hosts4" in lines
    assert not any("hosts4" in name for name, _ in made.summary(hosts=1).origins)


def test_each_transfer_has_its_own_curves(tmp_path: Path) -> None:
    made = machine(flagged=flagged_us)
    kernels = curves_between(fabric_costs(made, Fabric.NVSHMEM), OP)
    for variant, us in (("doubling packet", kernel_us), ("doubling flagged_row", flagged_us)):
        found = [curve for curve in kernels if curve.variant == variant]
        assert [curve.row for curve in found] == list(gpu_hosts.ROWS)
        for curve in found:
            assert [p.us for p in curve.points] == pytest.approx([us(p.bytes) for p in curve.points], abs=1e-3)
    assert len(kernels) == 2 * len(gpu_hosts.ROWS)
    path = tmp_path / "here.json"
    path.write_text(cost_model.dumps(made))
    assert cost_model.load(str(path)) == made
    assert inter_link(made, Fabric.NVSHMEM) == inter_link(machine(), Fabric.NVSHMEM), "α and β are the packets'"


def test_only_what_was_measured_is_renewed() -> None:
    made = machine()
    assert Fabric.NVSHMEM not in BEFORE.fabrics
    within = fabric_costs(BEFORE, Fabric.PEER)
    assert fabric_costs(made, Fabric.NVSHMEM).link == within.link and fabric_costs(made, Fabric.PEER) == within
    library = fabric_costs(made, Fabric.LIBRARY)
    assert replace(library, curves=tuple(curve for curve in library.curves if curve.hosts == 1)) == fabric_costs(
        BEFORE, Fabric.LIBRARY
    )
    kept = replace(
        made, name=BEFORE.name, origins=BEFORE.origins, fabric_costs=BEFORE.fabric_costs,
        relative_error=BEFORE.relative_error,
    )  # fmt: skip
    assert kept == BEFORE and made.relative_error >= BEFORE.relative_error


def test_other_numbers_of_hosts_are_kept_and_the_same_one_is_renewed() -> None:
    both = measured(hosts=4).renewed(machine(), "here", CPU)
    again = measured(lambda size: 2 * kernel_us(size)).renewed(both, "here", CPU)
    for made in (both, again):
        assert [c.hosts for c in curves_between(fabric_costs(made, Fabric.LIBRARY), "all_reduce")] == [2, 4]
    ours = {(c.hosts, c.row): c.points for c in curves_between(fabric_costs(again, Fabric.NVSHMEM), OP)}
    theirs = {(c.hosts, c.row): c.points for c in curves_between(fabric_costs(both, Fabric.NVSHMEM), OP)}
    assert len(ours) == 8 and all((ours[each] == theirs[each]) is (each[0] == 4) for each in ours)
    named = dict(again.origins)
    assert {"between.nvshmem.2", "between.nvshmem.4", "between.nccl.2", "between.nccl.4"} <= named.keys()


def test_a_run_on_one_host_keeps_what_was_measured_between_hosts() -> None:
    found = renew(BEFORE, machine())
    assert "nvshmem" in found.kept and "library.all_reduce of 2 on 2 hosts" in found.kept
    assert found.machine.fabric_costs == machine().fabric_costs


def test_the_link_is_what_the_kernel_makes_of_it() -> None:
    """Packets are twice the rows; launch and rounds are apart."""
    launch_us = BEFORE.memory.floor_us
    made = machine(lambda size: launch_us + 3.0 + size / 1e5)
    link = inter_link(made, Fabric.NVSHMEM)
    assert link.latency_us == pytest.approx(3.0, rel=0.01) and link.bytes_per_s == pytest.approx(2e11, rel=0.01)
    assert inter_link(made, Fabric.LIBRARY) == BEFORE.inter_host


def test_hosts_of_one_machine_are_told() -> None:
    for machines, said in ((2, "2 hosts of "), (1, "on 1 machine: over links within it")):
        made = measured(machines=machines).renewed(BEFORE, "here", CPU)
        where = dict(made.origins)["between.nvshmem.2"].host
        assert said in where and ("on 1 machine" in where) is (machines == 1)
    names = ("box/one/boot/1", "box/two/boot/1", "other//boot2/1")
    assert Topology(Group("0", (0, 1, 2), 0), names, "cuda").num_machines == 2
    assert fake(4, hosts=2).num_machines == 2


def _measure(rank: int, world: int) -> tuple[list[tuple[int, int]], list[int], list[int], set[int], bool]:
    """Calibrate's steps, with kernels of no time: what was reserved (hosts, tokens), and sizes that were timed."""
    become_host(rank, world, 2)
    reserved: list[tuple[int, int]] = []
    session = CalibrationSession(CPU, lambda what, done, total: None, quick=True)
    found = gpu_hosts.GpuHosts(2, 2, 1)

    def reserve(ranks: Ranks, hosts: int, every: list[Fused]) -> None:
        reserved.extend((hosts, each.tokens) for each in every)

    with (
        mock.patch.object(gpu_hosts, "reserve_hosts", reserve),
        mock.patch.object(gpu_hosts, "fused_hosts", lambda ranks, hosts, fused: lambda index: ranks.world),
    ):
        found.measure(session)
    kernel = [row for rows in found.times.values() for row in rows]
    equal: list[object] = [None] * world
    dist.all_gather_object(equal, (found.times, found.reduced))
    worlds = {world for world, _, _ in found.times}
    same = all(each == equal[0] for each in equal)
    return reserved, [size for size, _ in kernel], [size for size, _ in found.reduced], worlds, same


def test_all_ranks_of_the_hosts_measure_together() -> None:
    few = list(gpu_hosts.kernels(True))
    for reserved, kernel, reduced, worlds, same in run_ranks(_measure, 4, 4):
        assert reserved == [(2, fused.tokens) for fused in few] and same
        assert kernel == [fused.bytes for fused in few] and worlds == {4}
        assert reduced == list(gpu_hosts.REDUCED_BYTES[::3])


def test_hosts_of_several_gpus_have_curves_of_their_own() -> None:
    one, several = machine(), measured(hosts=2, ranks_of_host=4).renewed(machine(), "here", CPU)
    for of_host, worlds in ((1, {2}), (4, {8}), (2, set())):
        kernels = curves_between(fabric_costs(several, Fabric.NVSHMEM), OP, ranks_of_host=of_host)
        library = curves_between(fabric_costs(several, Fabric.LIBRARY), "all_reduce", ranks_of_host=of_host)
        assert {curve.world for curve in kernels} == {curve.world for curve in library} == worlds
    before = curves_between(fabric_costs(one, Fabric.NVSHMEM), OP)
    assert curves_between(fabric_costs(several, Fabric.NVSHMEM), OP) == before, "those of one GPU each stay"
    origins = dict(several.origins)
    assert origins["between.nvshmem.2x4"].note.startswith(
        "fused all-reduce + add + RMSNorm between hosts of 4 GPUs each"
    )
    assert "hosts of 4 GPUs each" in origins["between.nccl.2x4"].note


def test_a_host_that_does_not_divide_its_ranks_is_refused() -> None:
    made = machine()
    wrong = tuple(
        replace(costs, curves=tuple(replace(curve, hosts=3) if curve.hosts > 1 else curve for curve in costs.curves))
        for costs in made.fabric_costs
    )
    with pytest.raises(cost_model.profile.ProfileError, match=r"hosts: found 3, expected a divisor of its world \(2\)"):
        cost_model.profile.check("here", replace(made, fabric_costs=wrong))
