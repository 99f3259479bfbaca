"""From samples to a machine: the blocks of a profile, each with its origin and the spread of what it rests on."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

import torch

from weaveopt import cost_model
from weaveopt.cost_model.machine import (
    CompiledCosts,
    Contention,
    CopyEngine,
    Curve,
    FabricCosts,
    Launch,
    Link,
    Machine,
    MemoryCosts,
    Origin,
    ProductCosts,
    RowCurve,
    Wiring,
)
from weaveopt.measure import fit
from weaveopt.measure.clock import Sample
from weaveopt.measure.kernels import Grid
from weaveopt.measure.suite import CPU_RATES, GPU_FP32_GRID, Found
from weaveopt.records.candidate import Algorithm, Fabric, Form, Lowering

LEAST_ERROR, MOST_ERROR = 0.03, 0.25
"""No profile claims less of itself: clocks and caches differ from run to run. Few points tell little of the error."""


def host(device: torch.device, world: int) -> str:
    """`4 x NVIDIA H200` or `2-core x86_64`: what matters of the host, and nothing that names it."""
    if device.type == "cuda":
        return f"{world} x {torch.cuda.get_device_name(device)}"
    return f"{len(os.sched_getaffinity(0))}-core {platform.machine()}"


def wiring(device: torch.device) -> Wiring:
    """What the host is made of, as far as torch tells."""
    if device.type != "cuda":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Wiring("host", len(os.sched_getaffinity(0)), pages, (("ranks", "shared memory of one host"),))
    found = torch.cuda.get_device_properties(device)
    peers = [i for i in range(torch.cuda.device_count()) if i != device.index]
    reached = [i for i in peers if torch.cuda.can_device_access_peer(device.index or 0, i)]
    word = "peer access between all pairs" if peers and len(reached) == len(peers) else f"{len(reached)} peers reached"
    return Wiring("host", found.multi_processor_count, found.total_memory, (("gpus", word),))


class Origins:
    """Origins of what was measured today, one a block, with the spread of its samples."""

    def __init__(self, device: torch.device, world: int, kept: tuple[tuple[str, Origin], ...]) -> None:
        self._host = host(device, world)
        self._note = f"torch {torch.__version__}, median, slowest rank"
        self.found: dict[str, Origin] = dict(kept)

    def add(self, name: str, samples: Iterable[Sample], what: str) -> str:
        spreads = [sample.spread for sample in samples]
        spread = round(median(spreads), 4) if spreads else None
        today = datetime.date.today().isoformat()
        self.found[name] = Origin("measured", today, self._host, f"{what}; {self._note}", spread)
        return name


def machine(name: str, device: torch.device, found: Found, world: int, grid: Grid, before: Machine | None) -> Machine:
    """The profile. What one host cannot measure, the link to another one, is kept from `before` or assumed."""
    between = Origin("estimate", "", "", "50 GB/s (400 Gbit/s) between hosts, assumed")
    link = Link("between", 10.0, 50e9)
    if device.type == "cpu":
        between = Origin("estimate", "", "", "10 Gbit/s Ethernet between hosts, assumed")
        link = Link("between", 50.0, 1.25e9)
    if before is not None:
        between, link = dict(before.origins)[before.inter_host.origin], replace(before.inter_host, origin="between")
    origins = Origins(device, world, (("between", between),))
    origins.add("host", (), "as the system tells")
    launch = Launch(
        origins.add("launch", (), "one-element kernels"), round(found.launch_us, 3), round(found.eager_us, 3)
    )
    is_gpu = device.type == "cuda"
    units = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
    made = Machine(
        name=name,
        device=device.type,
        ranks_per_host=max(world, torch.cuda.device_count()) if is_gpu else len(os.sched_getaffinity(0)),
        relative_error=LEAST_ERROR,
        origins=(),
        memory=_memory(found, origins),
        products=tuple(_products(dtype, found, origins, units, grid, is_gpu) for dtype in sorted(found.products)),
        inter_host=link,
        fabric_costs=tuple(sorted(_fabrics(found, origins, is_gpu), key=lambda costs: costs.fabric.value)),
        launch=launch,
        wiring=wiring(device),
    )
    if found.attention:
        name = origins.add(
            "attention", found.attention.values(), "scaled_dot_product_attention, heads of 128, bfloat16"
        )
        made = replace(made, attention=fit.attention_costs(name, units, found.attention))
    if found.grouped:
        samples = [sample for pair in found.grouped.values() for sample in pair]
        name = origins.add("compiled", samples, "grouped products of 8 experts against one of the same work, bfloat16")
        slowdown = round(fit.grouped_slowdown(found.grouped.values()), 3)
        made = replace(made, compiled=CompiledCosts(name, grouped=slowdown))
    else:
        # The host's part was found on whole models: chains of little kernels, all in cache, show next to nothing of it.
        known = before if before is not None and before.compiled is not None else cost_model.load("cpu")
        if known.device == device.type and known.compiled is not None:
            origins.found["compiled"] = dict(known.origins)[known.compiled.origin]
            made = replace(made, compiled=replace(known.compiled, origin="compiled"))
    if found.crowded:
        name = origins.add("contention", (), "4096 x 8192 x 7168 bfloat16 beside the bulk form at 4096 tokens")
        made = replace(made, contention=Contention(name, tuple(found.crowded)))
    if found.copies is not None:
        latency_us, alone, contended = found.copies
        name = origins.add("copy_engine", (), "64 MiB pulled from a peer; contended: all ranks pull beside products")
        costs = CopyEngine(name, round(latency_us, 3), round(alone, -8), round(min(contended, alone), -8))
        made = replace(made, copy_engine=costs)
    return replace(made, relative_error=relative_error(made), origins=tuple(sorted(origins.found.items())))


def relative_error(machine: Machine) -> float:
    """What decisions rest on: exchanges, read between the points of their curves."""
    curves = [curve.points for costs in machine.fabric_costs for curve in (*costs.all_reduce, *costs.all_reduce_norm)]
    return round(min(max(LEAST_ERROR, fit.between_error(curves)), MOST_ERROR), 3)


def _memory(found: Found, origins: Origins) -> MemoryCosts:
    samples = [sample for rows in (*found.norms.values(), found.gates) for _, sample in rows]
    name = origins.add("memory", samples, "Inductor's kernels for static shapes, bfloat16")
    norms = tuple(
        RowCurve(hidden, fit.never_falling([(size, sample.us) for size, sample in rows]))
        for hidden, rows in sorted(found.norms.items())
    )
    # Without a point-wise kernel measured apart, the norm's curve stands for all.
    points = fit.never_falling([(size, sample.us) for size, sample in found.gates]) if found.gates else norms[0].points
    assert found.copy is not None
    copied_bytes, copy = found.copy
    return MemoryCosts(
        name, points[0].us, round(copied_bytes / copy.us * 1e6, -6), points, norms if found.gates else ()
    )


def _products(dtype: str, found: Found, origins: Origins, units: int, grid: Grid, is_gpu: bool) -> ProductCosts:
    times = found.products[dtype]
    name = origins.add(f"products.{dtype}", times.values(), f"{len(times)} products, weights out of cache")
    if is_gpu:
        return fit.tiled_products(dtype, name, units, grid if dtype == "bfloat16" else GPU_FP32_GRID, times)
    square = {corner: sample for corner, sample in times.items() if corner[1] == corner[2] == CPU_RATES}
    if not square:  # a coarse look
        n, k = max((corner[1:] for corner in times), key=lambda pair: pair[0] * pair[1])
        square = {corner: sample for corner, sample in times.items() if corner[1:] == (n, k)}
    size = max(corner[1] for corner in square)
    rated = fit.rated_products(dtype, name, min(found.launch_us, 2.0), size, square)
    return fit.with_samples(rated, grid, times)


def _fabrics(found: Found, origins: Origins, is_gpu: bool) -> list[FabricCosts]:
    return [_library(found, origins, "nccl" if is_gpu else "gloo"), _fused(found, origins, is_gpu)]


def _library(found: Found, origins: Origins, library: str) -> FabricCosts:
    samples = [sample for rows in found.collectives.values() for _, sample in rows]
    name = origins.add(library, samples, "collectives as compiled graphs call them, bfloat16")

    def curves(kind: str) -> tuple[Curve, ...]:
        return tuple(
            Curve(name, Algorithm.LIBRARY, world, fit.never_falling([(size, sample.us) for size, sample in rows]))
            for (which, world), rows in sorted(found.collectives.items(), key=lambda item: item[0])
            if which == kind
        )

    all_reduce = curves("all_reduce")
    # α of a step and β of the wire, from the largest group's ends.
    world, points = all_reduce[-1].world, all_reduce[-1].points
    latency_us = points[0].us / (2 * (world - 1))
    rate = 2 * (world - 1) / world * points[-1].bytes / (points[-1].us - points[0].us) * 1e6
    return FabricCosts(
        Fabric.LIBRARY,
        Link(name, round(latency_us, 3), round(rate, -6)),
        all_reduce,
        all_gather=curves("all_gather"),
        reduce_scatter=curves("reduce_scatter"),
        all_to_all=curves("all_to_all"),
    )


def _fused(found: Found, origins: Origins, is_gpu: bool) -> FabricCosts:
    samples = [sample for rows in found.fused.values() for _, sample in rows]
    name = origins.add("fused", samples, "fused all-reduce + add + RMSNorm, residual sharded, bfloat16")
    curves = (
        Curve(
            name, kernel.algorithm, world, fit.never_falling([(size, sample.us) for size, sample in rows]),
            kernel.form, kernel.num_ctas, hidden if is_gpu else 0,
        )
        for (world, hidden, kernel), rows in found.fused.items()
    )  # fmt: skip
    fabric = Fabric.PEER if is_gpu else Fabric.SHM
    return FabricCosts(fabric, _fused_link(found, name), all_reduce_norm=tuple(sorted(curves, key=curve_order)))


def curve_order(curve: Curve) -> tuple[int, int, str, str, int]:
    """How a profile sorts its curves."""
    return curve.world, curve.hidden, curve.algorithm.value, curve.form.value, curve.ctas


def _fused_link(found: Found, origin: str) -> Link:
    """α: two-shot beyond one-shot at the smallest size; β: what the largest exchange moves in its time."""
    largest = max(world for world, _, _ in found.fused)
    if found.shm_whole_us:
        # On shared memory: what handing out the rows of the sum as well costs.
        smallest = min(found.shm_whole_us)
        rows = _rows(found.fused, smallest, Algorithm.TWO_SHOT)
        size, sharded_us = rows[-1][0], rows[-1][1].us
        more_us = max(found.shm_whole_us[smallest] - sharded_us, 1.0)
        latency_us = max(rows[0][1].us - _rows(found.fused, smallest, Algorithm.ONE_SHOT)[0][1].us, 1.0)
        return Link(origin, round(latency_us, 3), round((smallest - 1) / smallest * size / more_us * 1e6, -6))
    rows = _rows(found.fused, largest, Algorithm.TWO_SHOT)
    (size, sample), floor_us = rows[-1], rows[0][1].us
    rate = 2 * (largest - 1) / largest * size / (sample.us - floor_us) * 1e6
    return Link(origin, round(floor_us / 2, 3), round(rate, -8))


def _rows(
    fused: Mapping[tuple[int, int, Lowering], list[tuple[int, Sample]]], world: int, algorithm: Algorithm
) -> list[tuple[int, Sample]]:
    """The fastest kernel at each size."""
    best: dict[int, Sample] = {}
    for (ranks, _, kernel), rows in fused.items():
        if ranks == world and kernel.algorithm is algorithm and kernel.form is not Form.DIRECT:
            for size, sample in rows:
                if size not in best or sample.us < best[size].us:
                    best[size] = sample
    return sorted(best.items())
