"""A profile renewed by a run of fewer ranks: what it measured is today's, all else is the base's with its origin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weaveopt import cost_model
from weaveopt.cost_model.machine import (
    ContentionRow,
    CopyContention,
    Curve,
    FabricCosts,
    KernelCurve,
    Machine,
    Origin,
    Point,
    SizePoint,
    Wiring,
)
from weaveopt.cost_model.records import walk
from weaveopt.errors import OptionError
from weaveopt.measure.base import accept, renew
from weaveopt.measure.draft import relative_error
from weaveopt.records.candidate import Fabric

TODAY = "2037-02-03"


def of_one_run(machine: Machine) -> Machine:
    """As if four ranks had measured all of it at once, but for what compiled graphs take beyond: an estimate.

    Without operations that two ranks alone measured.
    """
    assert machine.compiled is not None and machine.wiring is not None
    assert machine.contention is not None and machine.copy_engine is not None
    # What later runs kept of earlier ones has their date behind its name.
    named = {name.partition("@")[0]: origin for name, origin in reversed(machine.origins)}
    of_all = {(costs.fabric, curve.op) for costs in machine.fabric_costs for curve in costs.curves if curve.world == 4}

    def once(costs: FabricCosts) -> FabricCosts:
        kept = (curve for curve in costs.curves if (costs.fabric, curve.op) in of_all)
        curves = tuple(replace(curve, origin=curve.origin.partition("@")[0]) for curve in kept)
        return replace(costs, link=replace(costs.link, origin=costs.link.origin.partition("@")[0]), curves=curves)

    found = replace(
        machine,
        compiled=replace(machine.compiled, origin="compiled"),
        wiring=replace(machine.wiring, origin=machine.wiring.origin.partition("@")[0]),
        contention=replace(machine.contention, origin=machine.contention.origin.partition("@")[0]),
        copy_engine=replace(machine.copy_engine, origin=machine.copy_engine.origin.partition("@")[0]),
        fabric_costs=tuple(map(once, machine.fabric_costs)),
    )
    used = {record.origin for _, record in walk(found) if hasattr(record, "origin")}
    origins = {
        name: replace(origin, host="4 x NVIDIA H200") if origin.kind == "measured" else origin
        for name, origin in named.items()
        if name in used
    } | {"compiled": Origin("estimate", "", "", "")}
    return replace(found, origins=tuple(sorted(origins.items())))


BASE = of_one_run(cost_model.load("h200x4"))
BEFORE = dict(BASE.origins)["fused"].date


def slower(curve: Curve) -> Curve:
    return replace(curve, points=tuple(replace(point, us=2 * point.us) for point in curve.points))


def of_two(costs: FabricCosts) -> FabricCosts:
    curves = tuple(slower(curve) for curve in costs.curves if curve.world == 2)
    return FabricCosts(costs.fabric, replace(costs.link, latency_us=99.0), curves)


def measured_today(base: Machine = BASE) -> Machine:
    """Profile as two ranks of the same host would have measured it: every time is twice as long."""
    origins = tuple(
        (name, replace(origin, date=TODAY, host="2 x NVIDIA H200") if origin.kind == "measured" else origin)
        for name, origin in base.origins
    )
    assert base.launch and base.wiring and base.contention and base.copy_engine
    return replace(
        base,
        name="today",
        ranks_per_host=2,
        relative_error=0.25,
        origins=origins,
        memory=replace(base.memory, floor_us=99.0),
        fabric_costs=tuple(map(of_two, base.fabric_costs)),
        launch=replace(base.launch, graph_us=99.0),
        contention=replace(base.contention, rows=(ContentionRow(8, 1.0, 1.0),)),
        copy_engine=replace(base.copy_engine, latency_us=99.0),
        wiring=replace(base.wiring, links=(("gpus", "1 peers reached"),)),
    )


def origin_of(machine: Machine, name: str) -> Origin:
    return dict(machine.origins)[name]


def test_what_was_measured_is_todays_and_the_rest_is_the_bases(tmp_path: Path) -> None:
    today = measured_today()
    found = renew(today, BASE)
    machine = found.machine
    assert machine.name == "today" and machine.ranks_per_host == 4
    assert machine.memory == today.memory and machine.launch == today.launch
    assert machine.gemms == today.gemms and machine.attention == today.attention
    for ours, theirs, merged in zip(today.fabric_costs, BASE.fabric_costs, machine.fabric_costs, strict=True):
        for op in {curve.op for curve in theirs.curves}:
            small = tuple(curve for curve in merged.curves_of(op) if curve.world == 2)
            large = [curve for curve in merged.curves_of(op) if curve.world == 4]
            assert small == ours.curves_of(op), op
            kept = [curve for curve in theirs.curves_of(op) if curve.world == 4]
            assert [curve.points for curve in large] == [curve.points for curve in kept], op
            assert all(origin_of(machine, curve.origin).date == TODAY for curve in small)
            assert all(
                origin_of(machine, curve.origin) == origin_of(BASE, before.origin)
                for curve, before in zip(large, kept, strict=True)
            )
        assert replace(merged.link, origin="") == replace(theirs.link, origin=""), "of the largest group"
        assert origin_of(machine, merged.link.origin).host == "4 x NVIDIA H200"
    assert origin_of(machine, machine.memory.origin).host == "2 x NVIDIA H200"
    # Four ranks contend more than two.
    assert machine.contention is not None and BASE.contention is not None
    assert machine.contention.rows == BASE.contention.rows
    assert origin_of(machine, machine.contention.origin).host == "4 x NVIDIA H200"
    assert machine.copy_engine is not None and machine.copy_engine.latency_us != 99.0
    assert machine.wiring is not None and BASE.wiring is not None and machine.wiring.links == BASE.wiring.links
    assert machine.relative_error == relative_error(machine) != 0.25
    assert {"contention", "copy_engine", "wiring", "library.all_reduce of 4", "peer.link"} <= set(found.kept)
    assert "launch" not in found.kept and "library.all_reduce of 2" not in found.kept
    path = tmp_path / "merged.json"
    path.write_text(cost_model.dumps(machine))
    assert cost_model.load(str(path)) == machine, "keeps to the schema, and in a fixed order"


def test_a_kind_that_was_measured_by_itself_replaces_its_own_kernels_alone() -> None:
    """Families share an operation: renewing the kernel over pages leaves those of other attention."""
    today = measured_today()
    paged = tuple(kernel for kernel in today.kernels if kernel.variant.startswith("paged"))
    others = tuple(kernel for kernel in BASE.kernels if kernel not in paged)
    assert paged and any(kernel.op == "attention" for kernel in others)
    found = renew(replace(today, kernels=paged), BASE).machine
    assert {(each.op, each.variant): each.points for each in found.kernels} == {
        (each.op, each.variant): each.points for each in BASE.kernels
    }
    dates = {each.variant.split()[0]: origin_of(found, each.origin).date for each in found.kernels}
    assert dates["paged"] == TODAY and dates["flash"] != TODAY


def test_contention_that_an_older_run_did_not_measure_comes_from_todays() -> None:
    today, copies = measured_today(), CopyContention(1.05, 1.1)
    assert today.contention is not None and BASE.contention is not None
    without = replace(BASE, contention=replace(BASE.contention, copies=None))
    found = renew(replace(today, contention=replace(today.contention, copies=copies)), without).machine
    assert found.contention is not None and found.contention.copies == copies
    assert found.contention.rows == BASE.contention.rows, "of four ranks"
    assert origin_of(found, found.contention.origin).note.endswith(f"; copies: {TODAY}, 2 x NVIDIA H200")


def test_no_origin_is_left_that_nothing_names() -> None:
    machine = renew(measured_today(), BASE).machine
    text = cost_model.dumps(machine)
    for name, origin in machine.origins:
        assert f'"origin": "{name}"' in text, name
        assert origin.date in (TODAY, BEFORE) or origin.kind != "measured"
    dated = [name for name, _ in machine.origins if "@" in name]
    assert dated == [f"{name}@{BEFORE}" for name in ("contention", "copy_engine", "fused", "host", "nccl")]


def test_a_renewed_profile_is_renewed_again() -> None:
    once = renew(measured_today(), BASE).machine
    later = measured_today()
    origins = tuple((name, replace(origin, spread=0.5)) for name, origin in later.origins)
    twice = renew(replace(later, origins=origins), once).machine
    kept = {name for name, _ in twice.origins if "@" in name}
    assert kept == {name for name, _ in once.origins if "@" in name}, "the first run's origins go on, the second's end"
    assert renew(replace(later, origins=origins), once).machine == twice


def test_runs_of_one_day_keep_their_own_origins() -> None:
    """Groups of 3 and of 4 ranks from two runs of the day that `BASE` names, and of 2 from today's."""
    costs, library = BASE.fabric_costs[1], BASE.fabric_costs[0]
    named = dict(BASE.origins)
    other = replace(named["fused"], spread=0.5)
    three = tuple(replace(curve, world=3, origin=f"fused@{BEFORE}") for curve in costs.curves if curve.world == 2)
    base = replace(
        BASE,
        origins=tuple(sorted({**named, f"fused@{BEFORE}": other}.items())),
        fabric_costs=(library, replace(costs, curves=(*costs.curves, *three))),
    )
    machine = renew(measured_today(), base).machine
    origins = {curve.world: curve.origin for curve in machine.fabric_costs[1].curves}
    assert origins == {2: "fused", 3: f"fused@{BEFORE}", 4: f"fused@{BEFORE}.2"}
    assert origin_of(machine, origins[3]) == other and origin_of(machine, origins[4]) == named["fused"]


def test_the_same_ranks_keep_nothing_that_was_measured_again() -> None:
    later = replace(
        BASE, origins=tuple((name, replace(origin, date=TODAY)) for name, origin in BASE.origins), relative_error=0.25
    )
    found = renew(later, BASE)
    assert found.kept == ()
    assert found.machine == replace(later, relative_error=relative_error(later))


def test_fabrics_dtypes_and_kinds_that_were_not_measured_are_kept() -> None:
    today = measured_today()
    library = next(costs for costs in today.fabric_costs if costs.fabric is Fabric.LIBRARY)
    today = replace(
        today,
        gemms=today.gemms[:1],
        attention=None,
        fabric_costs=(replace(library, curves=tuple(c for c in library.curves if c.op != "all_to_all")),),
    )
    found = renew(today, BASE)
    assert [costs.dtype for costs in found.machine.gemms] == ["bfloat16", "float32"]
    assert found.machine.attention is not None
    assert {"gemms.float32", "attention", "peer", "library.all_to_all of 2"} <= set(found.kept)
    both = found.machine.fabric_costs[0].curves_of("all_to_all")
    assert [curve.world for curve in both] == [2, 4]
    assert {origin_of(found.machine, curve.origin).host for curve in both} == {"4 x NVIDIA H200"}


def test_kernels_of_one_group_size_are_all_of_one_run() -> None:
    """A coarse look measures fewer kernels; one of last year's among them would win or lose by the year."""
    today = measured_today()
    costs = today.fabric_costs[1]
    few = tuple(c for c in costs.curves if c.row == 4096 and ("=" not in c.variant or c.variant.endswith("=8")))
    assert few
    merged = renew(replace(today, fabric_costs=(today.fabric_costs[0], replace(costs, curves=few))), BASE)
    peer = merged.machine.fabric_costs[1]
    assert tuple(curve for curve in peer.curves if curve.world == 2) == few


def test_a_datasheets_numbers_stand_behind_measured_ones() -> None:
    base = cost_model.load("h200x8")
    found = renew(measured_today(), base)
    today = measured_today()
    assert found.machine.ranks_per_host == 8
    assert found.machine.contention == today.contention and found.machine.copy_engine == today.copy_engine
    by_fabric = {costs.fabric: costs for costs in found.machine.fabric_costs}
    assert by_fabric[Fabric.LIBRARY].link == today.fabric_costs[0].link
    assert Fabric.MULTIMEM in by_fabric and "multimem" in found.kept
    named = dict(found.machine.origins)
    for curve in by_fabric[Fabric.LIBRARY].curves_of("all_reduce"):
        assert (named[curve.origin].kind == "measured") == (curve.world == 2)


def test_transfers_of_the_base_go_where_they_would_hide_what_was_measured() -> None:
    today = measured_today()
    only_packets = tuple(
        replace(costs, transfers=("ll_packet",)) if costs.fabric is Fabric.PEER else costs
        for costs in BASE.fabric_costs
    )
    base = replace(BASE, fabric_costs=only_packets)
    assert renew(today, base).machine.fabric_costs[1].transfers == ()
    peer = today.fabric_costs[1]
    packets = tuple(curve for curve in peer.curves if "ll_packet" in curve.variant)
    today = replace(today, fabric_costs=(today.fabric_costs[0], replace(peer, curves=packets)))
    assert renew(today, base).machine.fabric_costs[1].transfers == ("ll_packet",)


def test_kernels_of_families_that_were_not_measured_are_kept() -> None:
    def kernel(op: str, us: float) -> KernelCurve:
        return KernelCurve("attention", op, "paged", "keys", (SizePoint(1, us),))

    base = replace(BASE, kernels=(kernel("attention", 1.0), kernel("grouped_gemm", 2.0)))
    found = renew(replace(measured_today(), kernels=(kernel("attention", 3.0),)), base)
    assert [(each.op, each.points[0].us) for each in found.machine.kernels] == [
        ("attention", 3.0),
        ("grouped_gemm", 2.0),
    ]
    assert "kernels.grouped_gemm" in found.kept and "kernels.attention" not in found.kept


def test_the_error_is_of_all_curves() -> None:
    """Points that bend, in the base's larger groups only, are what the merged profile rests on too."""
    bent = tuple(Point(1 << place, 10.0 * (1 if place < 4 else 3 ** (place % 2 + 1))) for place in range(8))
    curves = tuple(
        replace(curve, points=tuple(sorted(bent, key=lambda point: (point.us, point.bytes))))
        for curve in BASE.fabric_costs[1].curves
    )
    rising = tuple(
        replace(curve, points=tuple(Point(1 << index, point.us) for index, point in enumerate(curve.points)))
        for curve in curves
    )
    base = replace(BASE, fabric_costs=(BASE.fabric_costs[0], replace(BASE.fabric_costs[1], curves=rising)))
    assert renew(measured_today(), base).machine.relative_error > renew(measured_today(), BASE).machine.relative_error


def test_bases_of_other_devices_are_refused() -> None:
    here = BASE.wiring
    assert here is not None
    accept("h200x4", BASE, "cuda", here)
    accept("h200x4", BASE, "cuda", replace(here, memory_bytes=int(1.01 * here.memory_bytes)))
    accept("h200x8", cost_model.load("h200x8"), "cuda", here)
    wrong: list[tuple[str, str, Wiring, str]] = [
        ("h200x4", "cpu", here, "a profile of cuda ranks, but this run measures cpu ranks"),
        ("cpu", "cuda", here, "a profile of cpu ranks, but this run measures cuda ranks"),
        ("h200x4", "cuda", replace(here, processors=108), "measured with 132 SMs, found 108 here"),
        ("a100x4-slingshot", "cuda", here, "measured with 108 SMs, found 132 here"),
        ("h200x4", "cuda", replace(here, memory_bytes=80 << 30), "GPUs of 140 GiB, found 80 GiB here"),
        ("cpu", "cpu", replace(here, processors=64), "measured with 2 cores, found 64 here"),
    ]
    for name, device, wiring, said in wrong:
        with pytest.raises(OptionError) as caught:
            accept(name, cost_model.load(name), device, wiring)
        assert said in str(caught.value) and f"--base {name}" in str(caught.value) and "\n" not in str(caught.value)


def test_what_compiled_graphs_take_beyond_is_todays_or_kept() -> None:
    assert BASE.compiled is not None
    none = renew(replace(measured_today(), compiled=None), BASE)
    assert none.machine.compiled == BASE.compiled and "compiled" in none.kept
    assert origin_of(none.machine, "compiled") == origin_of(BASE, "compiled")
    today = replace(measured_today(), compiled=replace(BASE.compiled, host_us=1.125))
    again = renew(today, BASE)
    assert again.machine.compiled == today.compiled and "compiled" not in again.kept
