"""Families of measurements: what each writes, from made-up samples, and that a new one needs nothing but itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from weaveopt import cost_model
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.machine import ContentionRow, CopyContention, Curve, KernelCurve, Point, SizePoint
from weaveopt.measure.cases import FAMILIES, name_of
from weaveopt.measure.cases.collectives import Collectives
from weaveopt.measure.cases.copies import Copies, MeasuredCopies
from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.gemm import Gemms, shared_out
from weaveopt.measure.cases.gemm_comm.all_gather import AllGathers, PushedGathers
from weaveopt.measure.cases.gemm_comm.all_gather import cases as pushed_cases
from weaveopt.measure.cases.gemm_comm.reduce_scatter import ReduceScatters, ScatteredTiles, rows_of
from weaveopt.measure.cases.gemm_comm.reduce_scatter import cases as tile_cases
from weaveopt.measure.cases.gemm_comm.reduce_scatter_norm import NormedTiles
from weaveopt.measure.cases.gemm_comm.reduce_scatter_norm import cases as norm_cases
from weaveopt.measure.cases.gemm_fit import Grid
from weaveopt.measure.cases.launch import Launches
from weaveopt.measure.cases.library_contention import LibraryContention
from weaveopt.measure.cases.memory import MemoryKernels
from weaveopt.measure.cases.reduction.contention import StreamContention
from weaveopt.measure.cases.reduction.peer import BULK_BYTES, PeerKernels, kernels
from weaveopt.measure.cases.reduction.shm import ShmKernels
from weaveopt.measure.clock import Sample
from weaveopt.measure.draft import Draft, curve_order
from weaveopt.measure.session import Rows
from weaveopt.measure.suite import is_wanted
from weaveopt.ops.gemm_comm.all_gather.call import ALL_GATHER
from weaveopt.ops.gemm_comm.reduce_scatter.call import REDUCE_SCATTER, REDUCE_SCATTER_NORM
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.task import Stream, Task

GRID = Grid((1, 64, 1024), (512, 2048), (512, 2048))


def rows(us: float) -> Rows:
    return [(size, Sample(us + size / 2e5, 0.01)) for size in (1 << 12, 1 << 18, 1 << 22, 1 << 24)]


def own_kernels() -> list[Family]:
    """Families of measurements that every profile needs."""
    times = {corner: Sample(3 + corner[0] * corner[1] * corner[2] / 3e8, 0.02) for corner in GRID.corners}
    by_dtype = {"bfloat16": times, "float32": times}
    return [
        Launches(1.5, 7.25),
        Gemms(dict.fromkeys(by_dtype, GRID), by_dtype),
        MemoryKernels({4096: rows(3.0)}, [], (1 << 28, Sample(5000.0, 0.0))),
        Collectives({(op, world): rows(8.0 * world) for op in ("all_reduce", "all_gather") for world in (2, 4)}),
    ]


def written(*more: Family) -> cost_model.Machine:
    draft = Draft(torch.device("cpu"), 4, None)
    for family in (*own_kernels(), *more):
        family.write(draft)
    return draft.machine("made_up")


def test_every_family_is_measured_somewhere_and_once() -> None:
    assert len(set(FAMILIES)) == len(FAMILIES)
    for family in FAMILIES:
        assert family.devices and family.devices <= {"cpu", "cuda"}
    assert FAMILIES[0] is Launches, "others leave out what is a launch's"


def test_families_that_a_run_names_are_measured_and_launches_with_them() -> None:
    assert all(is_wanted(family, ()) for family in FAMILIES)
    named = {name_of(family) for family in FAMILIES if is_wanted(family, ("tile_kernels", "gemms"))}
    assert named == {"launches", "gemms", "tile_kernels"}, "what a launch takes is taken off others"


def test_the_halves_of_cpu_ranks_are_curves() -> None:
    """Reduce-scatters and all-gathers in shared memory are curves, apart from the fused kernels' link; rows divide by
    the ranks."""
    times = {
        (world, 4096, KernelRow(0, algorithm, Transfer.SEGMENT)): rows(3.0 * world)
        for world in (2, 4)
        for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
    }
    halves = (ReduceScatters({2: rows(20.0), 4: rows(50.0)}), AllGathers({2: rows(30.0), 4: rows(60.0)}))
    machine = written(ShmKernels(times, {2: 500.0, 4: 900.0}), *halves)
    found = {
        (op, world): cost_model.measured_parts_us(machine, Fabric.SHM, op, 1 << 18, world)
        for op in ("reduce_scatter", "all_gather")
        for world in (2, 4)
    }
    assert all(parts is not None for parts in found.values())
    total = {key: sum(parts) for key, parts in found.items() if parts is not None}
    assert total["reduce_scatter", 2] == pytest.approx(20.0 + (1 << 18) / 2e5, abs=1e-3)  # whole nanoseconds
    assert total["reduce_scatter", 4] > total["reduce_scatter", 2] < total["all_gather", 2]
    assert cost_model.measured_parts_us(machine, Fabric.SHM, "all_to_all", 1 << 18, 2) is None
    assert cost_model.measured_parts_us(machine, Fabric.PEER, "all_gather", 1 << 18, 2) is None
    assert {"scattered", "gathered"} < {name for name, _ in machine.origins}
    assert [rows_of(1 << 11, 3), rows_of(1 << 20, 3) % 3, rows_of(1 << 20, 4)] == [3, 0, 512]


def test_what_the_families_of_cpu_ranks_write_is_a_profile(tmp_path: Path) -> None:
    times = {
        (world, 4096, KernelRow(0, algorithm, Transfer.SEGMENT)): rows(us * world)
        for world in (2, 4)
        for algorithm, us in ((Algorithm.ONE_SHOT, 3.0), (Algorithm.TWO_SHOT, 5.0))
    }
    machine = written(ShmKernels(times, {2: 500.0, 4: 900.0}))
    path = tmp_path / "made_up.json"
    path.write_text(cost_model.dumps(machine))
    assert cost_model.load(str(path)) == machine
    shm = fabric_costs(machine, Fabric.SHM)
    assert [(curve.variant, curve.world, curve.row) for curve in shm.curves] == [
        ("one_shot segment", 2, 0), ("two_shot segment", 2, 0), ("one_shot segment", 4, 0), ("two_shot segment", 4, 0),
    ]  # fmt: skip
    assert shm.link.latency_us == pytest.approx(4.0), "two-shot beyond one-shot, of two ranks"
    rest_us = 500.0 - (10.0 + (1 << 22) / 2e5)
    assert shm.link.bytes_per_s == pytest.approx((1 << 21) / rest_us * 1e6, rel=1e-3), "of the 4 MB that were whole too"
    assert {name for name, _ in machine.origins} == {
        *("between", "compiled", "fused", "gemms.bfloat16", "gemms.float32", "gloo", "host", "launch", "memory"),
    }
    assert cost_model.gemm_us(machine, cost_model.Gemm(64, 512, 512), "bfloat16") == pytest.approx(3.056, abs=1e-3)


def test_what_is_measured_between_gpus_tells_its_range() -> None:
    every = {
        (4, row, KernelRow(0, *kernel)): rows(4.0)
        for row in (2048, 8192)
        for kernel in (
            (Algorithm.TWO_SHOT, Transfer.LL_PACKET, 0),
            (Algorithm.TWO_SHOT, Transfer.LL_PACKET, 132),
            (Algorithm.TWO_SHOT, Transfer.BULK, 16),
            (Algorithm.TWO_SHOT, Transfer.BULK, 8),
        )
    }
    copies = Copies(MeasuredCopies(5.5, 4e11, 5e11, 1.0623))
    machine = written(PeerKernels(every), StreamContention([ContentionRow(8, 1.1, 1.2)]), copies)
    curves = fabric_costs(machine, Fabric.PEER).curves
    assert list(curves) == sorted(curves, key=curve_order)
    assert [(c.variant, c.first_bytes, c.last_bytes) for c in curves if c.row == 2048] == [
        ("two_shot bulk ctas=8", 0, None),
        ("two_shot bulk ctas=16", 0, None),
        ("two_shot ll_packet", 0, 1 << 24),
        ("two_shot ll_packet ctas=132", 1 << 12, 1 << 24),
    ]
    assert machine.contention is not None
    assert (machine.contention.rows, machine.contention.library_ctas) == ((ContentionRow(8, 1.1, 1.2),), 24)
    assert machine.copy_engine is not None
    assert machine.copy_engine.contended_bytes_per_s == machine.copy_engine.bytes_per_s == 4e11
    assert machine.contention.copies == CopyContention(1.062, 1.0)


def test_slowdown_by_copies_joins_the_contention_of_the_profile_that_is_renewed() -> None:
    before = cost_model.load("h100x2")
    draft = Draft(torch.device("cpu"), 2, before)
    Copies(MeasuredCopies(5.5, 4e11, 2e11, 1.1)).write(draft)
    assert before.contention is not None and draft.contention == replace(
        before.contention, copies=CopyContention(1.1, 2.0)
    )


def test_contention_with_the_library_is_the_row_of_its_ctas() -> None:
    """It joins the rows of the fused exchange, and stands alone where GPUs have no peer access."""
    library, fused = ContentionRow(24, 1.2, 1.05), ContentionRow(32, 1.8, 1.3)
    both, alone = written(StreamContention([fused]), LibraryContention(library)), written(LibraryContention(library))
    assert both.contention is not None and both.contention.rows == (library, fused)
    assert alone.contention is not None and alone.contention.rows == (library,)
    for machine in (both, alone):
        exchange = Task(1.0, Stream.COMMUNICATION, ctas=cost_model.library_ctas(machine, hosts=2))
        assert cost_model.measured_contention(machine)(Task(1.0), exchange) == (1.2, 1.05)
    assert written(LibraryContention()).contention is None, "a quick run measures none"


def test_gemms_that_overlap_an_exchange_are_curves_by_depth(tmp_path: Path) -> None:
    """One curve for each tile configuration and each GEMM size that rows do not imply; exchanges alone are
    curves too."""
    tiles, pushed, normed = (
        tuple(dict.fromkeys(each.cut for each in found(True))) for found in (tile_cases, pushed_cases, norm_cases)
    )
    kernels = (
        PeerKernels({(4, 2048, KernelRow(0, Algorithm.TWO_SHOT, Transfer.BULK, 16)): rows(4.0)}),
        ScatteredTiles({(4, 4096, cut, depth): rows(9.0) for cut in tiles for depth in (512, 8192)}),
        NormedTiles({(4, 4096, cut, 512): rows(9.0) for cut in normed}),
        PushedGathers({(4, 4096, cut, width): rows(7.0) for cut in pushed for width in (512, 8192)}),
    )
    draft = Draft(torch.device("cpu"), 4, None)
    for family in (*own_kernels(), *kernels):
        family.write(draft)
    draft.is_gpu = True
    for alone in (ReduceScatters({4: rows(20.0)}), AllGathers({4: rows(30.0)})):
        alone.write(draft)
    machine = draft.machine("made_up")
    path = tmp_path / "made_up.json"
    path.write_text(cost_model.dumps(machine))
    assert cost_model.load(str(path)) == machine
    curves = fabric_costs(machine, Fabric.PEER).curves
    found = {
        (c.op, c.variant, c.row, c.first_bytes, c.last_bytes) for c in curves if c.op.startswith(("gemm", "all_g"))
    }
    assert found == {
        ("gemm_reduce_scatter", "tiles columns=256 pairs=1 ctas=4 k=512", 4096, 1 << 12, 1 << 24),
        ("gemm_reduce_scatter", "tiles columns=256 pairs=1 ctas=4 k=8192", 4096, 1 << 12, 1 << 24),
        ("gemm_reduce_scatter_norm", "tiles columns=256 pairs=1 ctas=4 k=512", 4096, 1 << 12, 1 << 24),
        ("all_gather_gemm", "pushed columns=256 pairs=1 n=512", 4096, 1 << 12, 1 << 24),
        ("all_gather_gemm", "pushed columns=256 pairs=1 n=8192", 4096, 1 << 12, 1 << 24),
        ("all_gather", "copies", 0, 0, None),
    }
    for op, us in (("reduce_scatter", 20.0), ("all_gather", 30.0)):
        parts = cost_model.measured_parts_us(machine, Fabric.PEER, op, 1 << 12, 4)
        assert parts is not None and sum(parts) == pytest.approx(us, rel=0.01)


def test_cuts_are_measured_that_there_are_kernels_of() -> None:
    for found, known in (
        (tile_cases, REDUCE_SCATTER),
        (pushed_cases, ALL_GATHER),
        (norm_cases, REDUCE_SCATTER_NORM),
    ):
        every, few = list(found(False)), list(found(True))
        assert all(known.takes(each.cut) for each in every) and len(set(every)) == len(every)
        assert set(few) < set(every)


@pytest.mark.parametrize("quick", [True, False])
def test_kernels_are_measured_where_they_may_pay(quick: bool) -> None:
    every = list(kernels(quick))
    assert len({(fused.row, fused.hidden) for fused in every}) == len(every)
    assert all(fused.bytes >= BULK_BYTES for fused in every if fused.row.transfer is Transfer.BULK)
    assert {fused.row.transfer for fused in every} == {Transfer.LL_PACKET, Transfer.BULK}


def test_ranks_share_corners_out() -> None:
    for world, copies in ((1, 1), (2, 2), (4, 2), (3, 3), (8, 2)):
        taken = [index for rank in range(world) for index in shared_out(range(50), rank, world, copies)]
        assert set(taken) == set(range(50)) and len(taken) >= 50 * min(copies, world)


@dataclass
class Whispers(Family):
    """A family that no other file names."""

    devices: ClassVar = frozenset({"cpu"})
    times: Rows = field(default_factory=lambda: rows(1.0))

    def write(self, draft: Draft) -> None:
        origin = draft.origin("whispers", (sample for _, sample in self.times), "made up")
        points = tuple(Point(size, sample.us) for size, sample in self.times)
        draft.add_curve(Fabric.LIBRARY, Curve(origin, "whisper", "aloud ears=2", 2, points, row=64))
        draft.kernels.append(KernelCurve(origin, "whisper", "alone", "words", (SizePoint(1, 2.0), SizePoint(8, 9.0))))


def test_a_new_family_is_one_class(tmp_path: Path) -> None:
    machine = written(Whispers())
    path = tmp_path / "made_up.json"
    path.write_text(cost_model.dumps(machine))
    assert cost_model.load(str(path)) == machine
    (curve,) = fabric_costs(machine, Fabric.LIBRARY).curves_of("whisper")
    assert (curve.variant, curve.row) == ("aloud ears=2", 64)
    assert [kernel.op for kernel in machine.kernels] == ["whisper"]
    lines = dict(machine.summary().origins)
    assert "fabrics.library.whisper.aloud.world2" in lines and "kernels.whisper.alone" in lines
