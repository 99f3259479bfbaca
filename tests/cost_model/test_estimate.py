"""Estimates: the profile's own points, known figures, and what must hold for any machine."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from itertools import product as combinations

import pytest

from weaveopt import cost_model
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.machine import Machine
from weaveopt.records.candidate import Algorithm, Estimate, Fabric
from weaveopt.records.site import Product, Workload

HIDDEN = 8192
ROW_BYTES = HIDDEN * 2
MACHINES = {name: cost_model.load(name) for name in cost_model.names()}
ALGORITHMS = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
SIZES = [1 << exponent for exponent in range(6, 34)]


def _work(tokens: int, world: int = 4, hosts: int = 1) -> Workload:
    return Workload(tokens, tokens, HIDDEN, "bfloat16", world, hosts, Product(tokens, 7168, HIDDEN))


def _terms(estimate: Estimate) -> dict[str, float]:
    return {term.name: term.us for term in estimate.terms}


@pytest.mark.parametrize(
    ("tokens", "measured_us"), [(1, 13.7), (64, 21.7), (4096, 323.5), (32768, 2318.4)], ids=lambda value: str(value)
)
def test_nccl_on_h200x4(tokens: int, measured_us: float) -> None:
    machine = MACHINES["h200x4"]
    found = cost_model.all_reduce_us(machine, Fabric.LIBRARY, Algorithm.LIBRARY, tokens * ROW_BYTES, 4, 1)
    assert found == pytest.approx(measured_us, rel=0.06), "another run on the same machine"


@pytest.mark.parametrize(("tokens", "printed_us"), [(64, 17.70), (1024, 75.71), (8192, 502.24), (32768, 1960.90)])
def test_tokenweave_table_1(tokens: int, printed_us: float) -> None:
    """The fused kernel's terms add up to the printed time on eight GPUs."""
    work = replace(_work(tokens, world=8), product=Product(tokens, 0, HIDDEN))
    found = cost_model.estimate_all_reduce_norm(MACHINES["h100x8"], work, Fabric.MULTIMEM, Algorithm.TWO_SHOT)
    assert found.us == pytest.approx(printed_us)


@pytest.mark.parametrize(
    ("m", "k", "n", "measured_us", "tolerance"),
    [
        (1024, 2048, 8192, 47, 0.25),  # 53 and 58 us in two runs of calibrate
        (4096, 2048, 8192, 181, 0.15),
        (1024, 7168, 8192, 168, 0.15),
        (4096, 7168, 8192, 675, 0.15),
        (8192, 7168, 8192, 1424, 0.15),
        (4096, 8192, 14336, 1387, 0.15),
        (64, 7168, 8192, 34, 0.15),
    ],
)
def test_products_on_h200x4(m: int, k: int, n: int, measured_us: float, tolerance: float) -> None:
    machine = MACHINES["h200x4"]
    found = cost_model.product_us(machine, Product(m, k, n), "bfloat16")
    # Another run; products one right after the other, as calibrate measures them, have lower clocks.
    assert found == pytest.approx(measured_us, rel=tolerance)


def test_waves() -> None:
    """300 CTAs on 132 SMs: two full waves and a partial one (TokenWeave §3)."""
    assert cost_model.num_waves(300, 132) == 3
    assert cost_model.num_waves(264, 132) == 2
    assert cost_model.num_waves(1, 132) == 1
    assert cost_model.num_waves(0, 132) == 0


def test_products_grow_in_waves() -> None:
    """132 tiles and one tile fewer take the same time; a tile more takes a wave more."""
    tile_only = MACHINES["h100x8"]
    costs = replace(tile_only.products[0], tiles=tile_only.products[0].tiles[:1], launch_us=0.0, bytes_per_s=1e18)
    machine = replace(tile_only, products=(costs, *tile_only.products[1:]))
    times = [cost_model.product_us(machine, Product(128 * rows, 8192, 256), costs.dtype) for rows in (131, 132, 133)]
    assert times[0] == times[1]
    assert times[2] == pytest.approx(2 * times[1])


def test_no_product() -> None:
    assert cost_model.product_us(MACHINES["h200x4"], None, "bfloat16") == 0.0


def test_every_curve_goes_through_its_points() -> None:
    seen = 0
    for machine in MACHINES.values():
        for costs in machine.fabric_costs:
            for curve in costs.all_reduce:
                for point in curve.points:
                    kind = costs.fabric, curve.algorithm
                    found = cost_model.all_reduce_us(machine, *kind, point.bytes, curve.world, 1)
                    assert found == pytest.approx(point.us)
                    seen += 1
        for point in machine.memory.points:
            assert cost_model.memory_us(machine, point.bytes) == pytest.approx(point.us)
    assert seen > 90


@pytest.mark.parametrize("name", MACHINES)
def test_never_falls_with_bytes(name: str) -> None:
    machine = MACHINES[name]
    for fabric, world, hosts in combinations(machine.fabrics, (2, 3, 5, 8, 16), (1, 2)):
        for algorithm in (Algorithm.LIBRARY,) if fabric is Fabric.LIBRARY else ALGORITHMS:
            times = [cost_model.all_reduce_us(machine, fabric, algorithm, size, world, hosts) for size in SIZES]
            assert times == sorted(times), (fabric, algorithm, world, hosts)
    kernels = [cost_model.memory_us(machine, size) for size in SIZES]
    assert kernels == sorted(kernels)
    for dtype in ("bfloat16", "float32"):
        products = [cost_model.product_us(machine, Product(1 << e, 1024, 1024), dtype) for e in range(15)]
        # A library changes kernels as rows grow: four rows in fp32 measured 16 % faster than two on CPU.
        assert all(later >= 0.8 * before for before, later in pairwise(products)), dtype


@pytest.mark.parametrize("name", MACHINES)
def test_positive_and_finite_everywhere(name: str) -> None:
    machine = MACHINES[name]
    grid = combinations((1, 3, 64, 1000, 32768), (64, 4096), ("bfloat16", "float16", "float32"), (2, 3, 8, 16), (1, 2))
    for tokens, hidden, dtype, world, hosts in grid:
        base = Workload(tokens, tokens, hidden, dtype, world, hosts, Product(tokens, 1024, hidden))
        for work in (base, replace(base, product=None, num_partials=2, num_norms=2, has_residual=False)):
            estimates = [cost_model.estimate_unfused(machine, work)]
            for fabric in machine.fabrics:
                for algorithm in ALGORITHMS:
                    estimates.append(cost_model.estimate_all_reduce_norm(machine, work, fabric, algorithm))
            for estimate in estimates:
                assert all(math.isfinite(term.us) and term.us > 0 for term in estimate.terms), (work, estimate)
                assert 0 < estimate.relative_error <= machine.relative_error


def test_no_tokens_cost_nothing() -> None:
    assert cost_model.estimate_unfused(MACHINES["h200x4"], _work(0)).us == 0
    fused = cost_model.estimate_all_reduce_norm(MACHINES["h200x4"], _work(0), Fabric.PEER, Algorithm.TWO_SHOT)
    assert fused.us == 0


def test_product_writes_into_the_arena_or_is_copied() -> None:
    machine, work = MACHINES["h100x8"], _work(512)
    direct = _terms(cost_model.estimate_all_reduce_norm(machine, work, Fabric.MULTIMEM, Algorithm.TWO_SHOT))
    copied = _terms(
        cost_model.estimate_all_reduce_norm(machine, replace(work, product=None), Fabric.MULTIMEM, Algorithm.TWO_SHOT)
    )
    assert "copy" not in direct
    assert copied["copy"] == cost_model.memory_us(machine, 2 * work.message_bytes)
    assert "gemm" not in copied


@pytest.mark.parametrize("product", [Product(512, 7168, HIDDEN), None])
def test_peer_copies_nothing_and_adds_with_a_kernel(product: Product | None) -> None:
    """Its kernel sends rows from wherever they are; two products are added by a kernel of the graph's own."""
    machine, work = MACHINES["h200x4"], replace(_work(512), product=product, num_partials=2)
    terms = _terms(cost_model.estimate_all_reduce_norm(machine, work, Fabric.PEER, Algorithm.TWO_SHOT))
    assert "copy" not in terms
    assert terms["add"] == cost_model.memory_us(machine, 3 * work.message_bytes)


def test_two_partials_reduce_once() -> None:
    machine, work = MACHINES["h200x4"], replace(_work(4096), num_partials=2)
    unfused = _terms(cost_model.estimate_unfused(machine, work))
    once_us = cost_model.all_reduce_us(machine, Fabric.LIBRARY, Algorithm.LIBRARY, work.message_bytes, 4)
    assert unfused["all_reduce"] == pytest.approx(2 * once_us)
    one, two = (
        _terms(cost_model.estimate_all_reduce_norm(machine, each, Fabric.PEER, Algorithm.TWO_SHOT))
        for each in (_work(4096), work)
    )
    assert two.pop("add") > 0
    assert two == one


def test_second_norm_is_a_kernel_more_only_unfused() -> None:
    machine, work = MACHINES["h200x4"], replace(_work(4096), num_norms=2)
    assert "norm" in _terms(cost_model.estimate_unfused(machine, work))
    assert "norm" not in _terms(cost_model.estimate_unfused(machine, _work(4096)))


def test_whole_sum_is_handed_out_too() -> None:
    machine, work = MACHINES["h200x4"], _work(4096)
    sharded = cost_model.estimate_all_reduce_norm(machine, work, Fabric.PEER, Algorithm.TWO_SHOT)
    whole = cost_model.estimate_all_reduce_norm(machine, work, Fabric.PEER, Algorithm.TWO_SHOT, sum_sharded=False)
    assert whole.us > sharded.us
    assert _terms(whole)["gather"] == pytest.approx(whole.us - sharded.us)
    unread = replace(work, sum_is_used=False)
    assert "gather" not in _terms(
        cost_model.estimate_all_reduce_norm(machine, unread, Fabric.PEER, Algorithm.TWO_SHOT, sum_sharded=False)
    )


def test_error_leaves_out_the_product() -> None:
    """The product is the same before and after: only what a rewrite changes is uncertain."""
    machine = MACHINES["h200x4"]
    estimate = cost_model.estimate_unfused(machine, _work(4096))
    assert estimate.error_us == pytest.approx(machine.relative_error * (estimate.us - _terms(estimate)["gemm"]))


@pytest.mark.parametrize("name", [name for name in MACHINES if name != "gh200-infiniband"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_threshold_is_the_crossing(name: str, world: int) -> None:
    machine = MACHINES[name]
    for fabric in machine.fabrics:
        threshold = cost_model.one_shot_max_tokens(machine, fabric, HIDDEN, "bfloat16", world, 1)
        if fabric is Fabric.LIBRARY:
            assert threshold == 0
            continue

        def wins(tokens: int, fabric: Fabric = fabric) -> bool:
            work = Workload(tokens, tokens, HIDDEN, "bfloat16", world)
            one, two = (cost_model.estimate_all_reduce_norm(machine, work, fabric, each).us for each in ALGORITHMS)
            return one <= two

        assert threshold == 0 or wins(threshold)
        assert not wins(threshold + 1)


def test_threshold_follows_bytes() -> None:
    machine = MACHINES["h100x8"]
    wide = cost_model.one_shot_max_tokens(machine, Fabric.PEER, 8192, "bfloat16", 4, 1)
    narrow = cost_model.one_shot_max_tokens(machine, Fabric.PEER, 4096, "bfloat16", 4, 1)
    assert wide > 1 and abs(narrow - 2 * wide) <= 1


def test_other_world_sizes_scale_by_traffic() -> None:
    """Beyond latency a ring moves `2 (n - 1) / n` messages: 1.5 on four ranks, 1.75 on eight (not measured)."""
    machine = MACHINES["h200x4"]
    eight, four = (
        cost_model.all_reduce_us(machine, Fabric.LIBRARY, Algorithm.LIBRARY, 1 << 32, world, 1) for world in (8, 4)
    )
    assert eight / four == pytest.approx(1.75 / 1.5, rel=0.01)


def test_crowded_cores_slow_a_rank() -> None:
    machine = MACHINES["cpu"]
    cores = machine.ranks_per_host
    fits, crowded = (
        _terms(cost_model.estimate_unfused(machine, _work(64, world)))["gemm"] for world in (cores, 2 * cores)
    )
    assert crowded == pytest.approx(2 * fits)


def _fabrics(machine: Machine) -> set[Fabric]:
    return set(machine.fabrics)


def test_fabrics_that_exist() -> None:
    assert _fabrics(MACHINES["cpu"]) == {Fabric.LIBRARY, Fabric.SHM}
    assert _fabrics(MACHINES["h200x4"]) == {Fabric.LIBRARY, Fabric.PEER}  # multicast is off there
    assert _fabrics(MACHINES["h100x8"]) == {Fabric.LIBRARY, Fabric.MULTIMEM, Fabric.PEER}
    assert fabric_costs(MACHINES["h200x4"], Fabric.PEER).all_reduce_norm
