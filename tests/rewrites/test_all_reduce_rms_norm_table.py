"""The run-time table: the fastest kernel at every token count, a prefix that ends where the library wins for good."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.graphs.nonempty import some
from weaveopt import cost_model
from weaveopt.cost_model.machine import Curve, FabricCosts, Machine, Point
from weaveopt.ops.reduction.prices.estimate import estimate_fused, estimate_unfused
from weaveopt.ops.reduction.prices.kernels import kernel_variants
from weaveopt.ops.reduction.prices.table import lowerings, one_shot_max_tokens
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer, parse_variant, variant_name
from weaveopt.records.candidate import Fabric

HIDDEN, DTYPE, WORLD = 1024, "bfloat16", 4
ROW_BYTES = HIDDEN * 2
ONE, TWO = Algorithm.ONE_SHOT, Algorithm.TWO_SHOT
MAIL, BULK = Transfer.LL_PACKET, Transfer.BULK
BASE = cost_model.load("h200x4")
Times = dict[int, float]
"""Microseconds by tokens."""


def curve(
    algorithm: Algorithm, form: Transfer, times: Times, ctas: int = 0, world: int = WORLD, hidden: int = 0
) -> Curve:
    points = tuple(Point(tokens * hidden_bytes(hidden), us) for tokens, us in times.items())
    name, last_bytes = variant_name(algorithm, form, ctas), points[-1].bytes if form is MAIL else None
    return Curve("fused", "all_reduce_norm", name, world, points, row=hidden, last_bytes=last_bytes)


def hidden_bytes(hidden: int) -> int:
    return (hidden or HIDDEN) * 2


def machine(*curves: Curve, library: Times | None = None, error: float = 0.1) -> Machine:
    """`BASE` with these kernels on peer; `library`: all-reduce, addition and norm together."""
    every: list[FabricCosts] = []
    for costs in BASE.fabric_costs:
        if costs.fabric is Fabric.PEER:
            costs = replace(costs, curves=curves)
        elif library is not None:
            points = tuple(Point(tokens * ROW_BYTES, us - 0.001) for tokens, us in library.items())
            costs = replace(costs, curves=(Curve("nccl", "all_reduce", "library", WORLD, points),))
        every.append(costs)
    free = (Point(1, 0.001), Point(1 << 40, 0.001))
    memory = BASE.memory if library is None else replace(BASE.memory, points=free)
    return replace(BASE, fabric_costs=tuple(every), memory=memory, relative_error=error)


def table(found: Machine, max_tokens: int = 8192, **settings: int | bool) -> list[tuple[object, ...]]:
    rows = lowerings(found, Fabric.PEER, HIDDEN, DTYPE, WORLD, 1, max_tokens, **settings)  # type: ignore[arg-type]
    return [(row.max_tokens, row.algorithm, row.transfer, row.num_ctas) for row in rows]


ONE_MAIL = curve(ONE, MAIL, {1: 5.0, 16: 8.0, 64: 20.0, 256: 80.0})
TWO_MAIL = curve(TWO, MAIL, {1: 7.0, 64: 10.0, 512: 40.0})
BULK_16 = curve(TWO, BULK, {1: 11.0, 256: 20.0, 8192: 600.0}, ctas=16)
BULK_64 = curve(TWO, BULK, {1: 12.0, 256: 24.0, 8192: 400.0}, ctas=64)
SLOW: Times = {1: 30.0, 8192: 3000.0}
"""A library that is never faster."""


def test_every_row_is_the_fastest_at_every_count() -> None:
    kernels = (ONE_MAIL, TWO_MAIL, BULK_16, BULK_64)
    found = machine(*kernels, library=SLOW)
    rows = lowerings(found, Fabric.PEER, HIDDEN, DTYPE, WORLD, 1, 4096)
    assert [row.transfer for row in rows] == [MAIL, MAIL, BULK, BULK]
    assert [row.max_tokens for row in rows] == sorted({row.max_tokens for row in rows}) and rows[-1].max_tokens == 4096
    for tokens in range(1, 4097):
        row = next(row for row in rows if tokens <= row.max_tokens)
        work = Workload(tokens, tokens, HIDDEN, DTYPE, WORLD)
        times = {}
        for each in kernels:
            if each.last_bytes is None or work.message_bytes <= each.last_bytes:
                kernel = parse_variant(each.variant)
                algorithm, transfer, num_ctas = kernel
                estimate = estimate_fused(found, work, Fabric.PEER, algorithm, transfer=transfer, num_ctas=num_ctas)
                times[kernel] = estimate.us
        assert times[row.algorithm, row.transfer, row.num_ctas] == min(times.values()), tokens


def test_ties_go_to_fewer_ctas_and_equal_neighbours_are_one_row() -> None:
    many, all_of_them = (replace(BULK_16, variant=variant_name(TWO, BULK, ctas)) for ctas in (132, 0))
    found = machine(all_of_them, many, BULK_16, library=SLOW)
    assert table(found) == [(8192, TWO, BULK, 16)]


def test_ll_packets_are_never_used_beyond_their_last_point() -> None:
    cheap = curve(TWO, MAIL, {1: 1.0, 512: 2.0})
    assert table(machine(cheap, BULK_64, library=SLOW)) == [(512, TWO, MAIL, 0), (8192, TWO, BULK, 64)]
    assert table(machine(cheap, library=SLOW)) == [(512, TWO, MAIL, 0)]
    assert table(machine(cheap, library=SLOW), against_library=False) == [(512, TWO, MAIL, 0)]
    assert table(machine(curve(TWO, BULK, {1: 1.0, 512: 2.0}), library=SLOW)) == [(8192, TWO, BULK, 0)]


def test_it_ends_where_the_library_wins_for_good() -> None:
    ours = curve(TWO, BULK, {1: 10.0, 64: 20.0, 8192: 2000.0}, ctas=8)
    library = {1: 20.0, 64: 30.0, 8192: 1000.0}
    found = machine(ours, library=library)
    ((end, *_),) = table(found)
    assert isinstance(end, int) and 64 < end < 8192

    def wins(tokens: int) -> bool:
        work = Workload(tokens, tokens, HIDDEN, DTYPE, WORLD)
        fused = estimate_fused(found, work, Fabric.PEER, TWO)
        return fused.us <= estimate_unfused(found, work).us

    assert wins(end) and not wins(end + 1)
    assert table(found, against_library=False) == [(8192, TWO, BULK, 8)]
    assert table(found, max_tokens=end) == [(end, TWO, BULK, 8)]


@pytest.mark.parametrize(("library_us", "bridged"), [(95.0, True), (80.0, False)])
def test_a_hole_is_bridged_within_the_error_only(library_us: float, bridged: bool) -> None:
    ours = curve(TWO, BULK, {1: 10.0, 64: 50.0, 256: 100.0, 1024: 200.0, 8192: 800.0})
    library = {1: 20.0, 64: 60.0, 256: library_us, 1024: 300.0, 8192: 2000.0}
    rows = table(machine(ours, library=library))
    assert (rows[-1][0] == 8192) is bridged
    assert bridged or 64 <= int(str(rows[-1][0])) < 256
    # What never comes is no hole.
    assert table(machine(ours, library=library), min_tokens=2048) == [(8192, TWO, BULK, 0)]


def test_no_table_where_the_library_is_faster_everywhere() -> None:
    found = machine(BULK_64, library={1: 1.0, 8192: 2.0})
    assert table(found) == []
    assert table(found, against_library=False) == [(8192, TWO, BULK, 64)]


def test_no_table_without_a_kernel_for_the_group() -> None:
    assert lowerings(BASE, Fabric.PEER, HIDDEN, DTYPE, WORLD, 2, 64) == ()
    assert lowerings(BASE, Fabric.PEER, HIDDEN, DTYPE, 1, 1, 64) == ()
    assert lowerings(BASE, Fabric.MULTIMEM, HIDDEN, DTYPE, WORLD, 1, 64) == ()
    assert lowerings(BASE, Fabric.LIBRARY, HIDDEN, DTYPE, WORLD, 1, 64) == ()


def test_curves_are_read_at_the_nearest_world_and_between_the_rows_measured() -> None:
    near = curve(TWO, BULK, {1: 10.0, 8192: 500.0}, ctas=32, hidden=HIDDEN)
    far_row = replace(near, row=4 * HIDDEN, points=tuple(replace(each, us=4 * each.us) for each in near.points))
    far_world = replace(near, world=2, variant=variant_name(TWO, BULK, 16))
    found = machine(far_row, near, far_world, library=SLOW)
    (variant,) = kernel_variants(found, Fabric.PEER, HIDDEN, WORLD)
    assert variant.curve == near and variant.measured
    (variant,) = kernel_variants(found, Fabric.PEER, 8 * HIDDEN, WORLD)
    assert variant.curve is not None and variant.curve.row_error > 0.0, "nothing was measured there"
    assert replace(variant.curve, row_error=0.0) == far_row
    (variant,) = kernel_variants(found, Fabric.PEER, 2 * HIDDEN, WORLD)
    assert variant.curve is not None and [each.us for each in variant.curve.points] == pytest.approx([20.0, 1000.0])
    (variant,) = kernel_variants(found, Fabric.PEER, HIDDEN, 2)
    assert variant.curve == far_world
    (variant,) = kernel_variants(found, Fabric.PEER, HIDDEN, 8)
    assert variant.curve == near and not variant.measured, "carried over from four ranks"


def test_what_was_not_measured_is_modelled() -> None:
    def kernels(name: str, fabric: Fabric) -> list[tuple[Algorithm, Transfer]]:
        found = kernel_variants(cost_model.load(name), fabric, 8192, 4)
        assert not any(variant.measured for variant in found)
        return [(variant.algorithm, variant.transfer) for variant in found]

    assert kernels("h100x8", Fabric.PEER) == [(ONE, MAIL), (TWO, BULK)]
    assert kernels("h100x8", Fabric.MULTIMEM) == [(TWO, Transfer.DIRECT)], "a one-shot by multicast has no kernel"
    # Bulk copies need sm_90.
    assert kernels("a100x4-slingshot", Fabric.PEER) == kernels("a800x4", Fabric.PEER) == [(ONE, MAIL), (TWO, MAIL)]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("max_tokens", [1, 100, 8192])
def test_shm_divides_at_its_threshold(world: int, max_tokens: int) -> None:
    cpu = cost_model.load("cpu")
    threshold = one_shot_max_tokens(cpu, Fabric.SHM, 64, DTYPE, world, 1)
    rows = lowerings(cpu, Fabric.SHM, 64, DTYPE, world, 1, max_tokens)
    assert rows[-1].max_tokens == max_tokens and {row.transfer for row in rows} == {Transfer.SEGMENT}
    for tokens in {1, threshold, threshold + 1, max_tokens} & set(range(1, max_tokens + 1)):
        row = next(row for row in rows if tokens <= row.max_tokens)
        assert (row.algorithm is ONE) == (tokens <= threshold)


def test_every_site_gets_the_same_object() -> None:
    """An 80-layer graph asks 161 times; loading the profile again changes nothing."""
    ask = [lowerings(cost_model.load("h200x4"), Fabric.PEER, 8192, DTYPE, 4, 1, 8192) for _ in range(161)]
    assert len(set(map(id, ask))) == 1


def test_the_table_of_h200x4_covers_every_size() -> None:
    """The measured kernels beat the library at every size; few CTAs fill the link at large ones."""
    rows = lowerings(BASE, Fabric.PEER, 8192, DTYPE, 4, 1, 8192)
    assert rows[-1].max_tokens == 8192 and (rows[-1].algorithm, rows[-1].transfer) == (TWO, BULK)


@pytest.mark.parametrize("name", cost_model.names())
@pytest.mark.parametrize(
    ("hidden", "world", "dtype"), [(8192, 8, "bfloat16"), (2880, 4, "float32"), (64, 3, "float16")]
)
def test_tables_of_shipped_profiles(name: str, hidden: int, world: int, dtype: str) -> None:
    loaded = cost_model.load(name)
    for fabric in some(loaded.fabrics):
        rows = lowerings(loaded, fabric, hidden, dtype, world, 1, 32768)
        assert all(isinstance(row, KernelRow) and 1 <= row.max_tokens <= 32768 for row in rows)
        assert all(a.max_tokens < b.max_tokens for a, b in itertools.pairwise(rows))
        kernels = [(row.algorithm, row.transfer, row.num_ctas) for row in rows]
        assert all(a != b for a, b in itertools.pairwise(kernels))
