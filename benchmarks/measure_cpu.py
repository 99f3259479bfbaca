"""Measures this host for the cost model's `cpu` profile and writes the profile.

    python benchmarks/measure_cpu.py [--output FILE] [--worlds 2,3,4] [--quick]

One thread a rank, as launchers set it. Kernels of a rank's own are timed with one rank on every core, so that
ranks share the memory's bandwidth as they do in a run; weights rotate through more memory than the caches hold.
Every time is the median over iterations, the maximum over ranks, and the best of several passes. What a host
cannot measure alone, the link to another one, is kept from the profile that is there already.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch._inductor.config
import torch.distributed as dist

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt import cost_model
from weaveopt.cost_model.machine import (
    Curve,
    FabricCosts,
    Link,
    Machine,
    MemoryCosts,
    Origin,
    Point,
    ProductCosts,
    Rate,
)
from weaveopt.decision import Algorithm, Fabric
from weaveopt.ops.all_reduce_norm_call import AllReduceNormCall, NormForm, NormKind, SumOut, arena_bytes
from weaveopt.runtime import arena, topology

PROFILE = Path(cost_model.__file__).parent / "profiles" / "cpu.json"
HIDDEN = 4096
CACHE_BYTES = 96 << 20
LONGEST_S = 0.25
NUM_PASSES = 3
SHM_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Times = dict[str, list[tuple[int, float]]]


def timed_us(step: Callable[[int], object], quick: bool) -> float:
    """Median time of `step(i)` in microseconds, over as many iterations as fit the time allowed."""
    for index in range(3):
        step(index)
    limit_s = LONGEST_S / (4 if quick else 1)
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < 10 or (time.perf_counter() - begin < limit_s and len(samples) < 2000):
        start = time.perf_counter()
        step(len(samples))
        samples.append((time.perf_counter() - start) * 1e6)
    return median(samples)


def together_us(step: Callable[[], object], quick: bool) -> float:
    """Like `timed_us`, with the same number of iterations on all ranks: no rank may stop by its own clock."""

    def once() -> float:
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e6

    probe = torch.tensor([max(once() for _ in range(5))], dtype=torch.float64)
    dist.all_reduce(probe, op=dist.ReduceOp.MAX)
    count = int(min(400, max(8, LONGEST_S * 1e6 / (4 if quick else 1) / probe.item())))
    dist.barrier()
    return median(once() for _ in range(count))


def group_name() -> str:
    return str(dist.distributed_c10d._get_default_group().group_name)


def measure_gloo(quick: bool) -> Times:
    """The functional all-reduce and its wait, as compiled graphs call them."""
    group = group_name()

    def all_reduce(tensor: torch.Tensor) -> None:
        torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(tensor, "sum", group))

    tensors = [torch.zeros((1 << exponent) // 2, dtype=torch.bfloat16) for exponent in range(11, 27)]
    return {"gloo": [(each.nbytes, together_us(partial(all_reduce, each), quick)) for each in tensors]}


def measure_shm(quick: bool) -> Times:
    """The fused operation on the fabric `shm`, less the copy of the partial result into the arena.

    Residual and sum are sharded by tokens, as along a chain of sites; `two_shot_whole` hands the sum out too.
    """
    group, world = group_name(), dist.get_world_size()
    largest = SHM_TOKENS[-1]
    need = arena_bytes(largest, HIDDEN, "bfloat16", "bfloat16", world)
    output_offset = 2 * need.partial_bytes
    arena.reserve(topology.discover(group, 60.0), output_offset + need.output_bytes, 60.0)
    norm = NormForm(NormKind.RMS, 1e-5)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
    buffer = torch.empty(largest, HIDDEN, dtype=torch.bfloat16)

    def fused(partial_sum: torch.Tensor, residual: torch.Tensor, call: str) -> object:
        return torch.ops.weave.all_reduce_norm(
            partial_sum, None, None, residual, None, None, weight, None, call
        )  # fmt: skip

    times: Times = {}
    for name, threshold, sharded in (("one_shot", largest, True), ("two_shot", 0, True), ("two_shot_whole", 0, False)):
        call = AllReduceNormCall(
            site=name,
            group=group,
            fabric=Fabric.SHM,
            world=world,
            hidden=HIDDEN,
            dtype="bfloat16",
            out_dtype="bfloat16",
            partial_offset=0,
            output_offset=output_offset,
            partial_bytes=need.partial_bytes,
            max_tokens=largest,
            one_shot_max_tokens=threshold,
            post=None,
            norm=norm,
            timeout_s=60.0,
            residual_sharded=sharded,
            sum_out=SumOut.SHARDED if sharded else SumOut.WHOLE,
        ).encode()
        times[name] = []
        for tokens in SHM_TOKENS:
            x, residual = torch.randn(2, tokens, HIDDEN, dtype=torch.bfloat16).unbind()
            target = buffer[:tokens]
            copy_us = together_us(partial(target.copy_, x), quick)
            us = together_us(partial(fused, x, residual, call), quick)
            times[name].append((x.nbytes, max(us - copy_us, us / 2)))
    return times


def measure_products(quick: bool) -> Times:
    """`a[m, k] @ weight[n, k].t()` by rows; the time is that of k = n = 2048."""
    size = 2048

    def multiply(a: torch.Tensor, weights: list[torch.Tensor], index: int) -> object:
        return torch.mm(a, weights[index % len(weights)].t())

    times: Times = {}
    for name, dtype in DTYPES.items():
        weights = [torch.randn(size, size, dtype=dtype) for _ in range(CACHE_BYTES // (size * size * dtype.itemsize))]
        times[name] = []
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048):
            a = torch.randn(rows, size, dtype=dtype)
            dist.barrier()
            times[name].append((rows, timed_us(partial(multiply, a, weights), quick)))
    tiny = torch.randn(1, 8), torch.randn(8, 8)
    times["mm_launch"] = [(1, timed_us(lambda index: torch.mm(*tiny), quick))]
    return times


def measure_memory(quick: bool) -> Times:
    """Inductor's residual add + RMSNorm, less the cost of calling a compiled function; and a plain copy."""

    def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        wide = total.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return total, (wide * scale).to(x.dtype) * weight

    compiled = torch.compile(add_norm, dynamic=False)
    empty = torch.compile(lambda x, residual, weight: (x + 1, weight + 1), dynamic=False)
    small = torch.zeros(8)
    call_us = timed_us(lambda index: empty(small, small, small), quick)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
    torch._dynamo.config.cache_size_limit = 64

    def normalize(x: torch.Tensor, residual: torch.Tensor, index: int) -> object:
        return compiled(x, residual, weight)

    times: Times = {"add_norm": [], "call": [(1, call_us)], "copy": []}
    for tokens in (1, 4, 16, 64, 256, 1024, 4096):
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
        residual = torch.randn_like(x)
        dist.barrier()
        us = timed_us(partial(normalize, x, residual), quick)
        times["add_norm"].append((tokens * HIDDEN * 2 * 4, max(us - call_us, 0.3)))
    source = torch.randn(CACHE_BYTES // 4)
    target = torch.empty_like(source)
    dist.barrier()
    times["copy"].append((2 * CACHE_BYTES, timed_us(lambda index: target.copy_(source), quick)))
    return times


SUITES = {"gloo": measure_gloo, "shm": measure_shm, "products": measure_products, "memory": measure_memory}


def run_rank(suite: str, rank: int, world: int, store: str, quick: bool, results: multiprocessing.Queue[Times]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # residuals are the same on all ranks
    # Compiling beside the other rank's measurement would be measured too.
    torch._inductor.config.compile_threads = 1
    timeout = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    with torch.inference_mode():
        times = SUITES[suite](quick)
    results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def measure(suite: str, world: int, quick: bool) -> Times:
    """The best of several passes at each size: what other programs on the host add is not the machine's."""
    passes = [one_pass(suite, world, quick) for _ in range(1 if quick else NUM_PASSES)]
    return {
        name: [(size, min(times[name][index][1] for times in passes)) for index, (size, _) in enumerate(rows)]
        for name, rows in passes[0].items()
    }


def one_pass(suite: str, world: int, quick: bool) -> Times:
    """One suite on `world` spawned ranks: the maximum over ranks of each median."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(suite, rank, world, f"{folder}/store", quick, results), daemon=True)
            for rank in range(world)
        ]
        for each in ranks:
            each.start()
        try:
            found = [results.get(timeout=120) for _ in ranks]
        finally:
            for each in ranks:
                each.join(timeout=30)
                each.kill()
    return {
        name: [(size, max(times[name][index][1] for times in found)) for index, (size, _) in enumerate(rows)]
        for name, rows in found[0].items()
    }


def never_falling(rows: list[tuple[int, float]]) -> tuple[Point, ...]:
    """Times that fall with growing size are noise: neighbours that do are set to their mean, until none does."""
    pools: list[list[float]] = []
    for _, us in rows:
        pools.append([us])
        while len(pools) > 1 and sum(pools[-2]) / len(pools[-2]) > sum(pools[-1]) / len(pools[-1]):
            tail = pools.pop()
            pools[-1] += tail
    smooth = [sum(pool) / len(pool) for pool in pools for _ in pool]
    return tuple(Point(size, round(us, 2)) for (size, _), us in zip(rows, smooth, strict=True))


def products(dtype: str, times: Times) -> ProductCosts:
    """Rates by rows as measured; the traffic limit is what the one-row product reached on its weights."""
    launch_us = times["mm_launch"][0][1]
    size = 2048
    rates = tuple(Rate(rows, round(2 * rows * size * size / (us - launch_us) * 1e6, -6)) for rows, us in times[dtype])
    rows, us = min(times[dtype], key=lambda row: row[1])
    bytes_per_s = (size * size + 2 * rows * size) * DTYPES[dtype].itemsize / (us - launch_us) * 1e6
    return ProductCosts(dtype, "kernels", round(launch_us, 2), round(bytes_per_s, -6), rates=rates)


def shm_costs(by_world: dict[int, Times]) -> FabricCosts:
    """Curves by world size; the link's rate is what handing out the sum's rows as well costs at the largest size."""
    smallest = by_world[min(by_world)]
    world, (message, whole_us), (_, sharded_us) = (
        min(by_world),
        smallest["two_shot_whole"][-1],
        smallest["two_shot"][-1],
    )
    rate = (world - 1) / world * message / max(whole_us - sharded_us, 1.0) * 1e6
    curves = tuple(
        Curve("shm", Algorithm(name), world, never_falling(times[name]))
        for world, times in by_world.items()
        for name in ("one_shot", "two_shot")
    )
    latency_us = max(smallest["two_shot"][0][1] - smallest["one_shot"][0][1], 1.0)
    return FabricCosts(Fabric.SHM, Link("shm", round(latency_us, 2), round(rate, -6)), all_reduce_norm=curves)


def host() -> str:
    """`2-core x86_64`: what matters of the host, and nothing that names it."""
    return f"{len(os.sched_getaffinity(0))}-core {platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=str(PROFILE))
    parser.add_argument("--worlds", default="2,3,4")
    parser.add_argument("--quick", action="store_true", help="a quarter of the time, for a look")
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    times = measure("products", cores, asked.quick) | measure("memory", cores, asked.quick)
    worlds = [int(word) for word in asked.worlds.split(",")]
    library = {world: measure("gloo", world, asked.quick)["gloo"] for world in worlds}
    shm = {world: measure("shm", world, asked.quick) for world in worlds}
    note = f"torch {torch.__version__}, one thread a rank, median, maximum over ranks, best of {NUM_PASSES} passes"
    origin = Origin("measured", datetime.date.today().isoformat(), host(), note)
    before = cost_model.load("cpu")
    shm_note = f"fused all-reduce + add + RMSNorm, residual sharded, hidden {HIDDEN}, bfloat16; {note}"
    smallest, largest = library[min(library)][0], library[min(library)][-1]
    copied_bytes, copy_us = times["copy"][0]
    between = dict(before.origins)[before.inter_host.origin]
    machine = Machine(
        name="cpu",
        device="cpu",
        ranks_per_host=cores,
        relative_error=before.relative_error,
        origins=(("between", between), ("gloo", origin), ("kernels", origin), ("shm", replace(origin, note=shm_note))),
        memory=MemoryCosts(
            origin="kernels",
            floor_us=round(times["add_norm"][0][1], 2),
            bytes_per_s=round(copied_bytes / copy_us * 1e6, -6),
            points=never_falling(times["add_norm"]),
        ),
        products=tuple(products(dtype, times) for dtype in DTYPES),
        inter_host=replace(before.inter_host, origin="between"),
        fabric_costs=(
            FabricCosts(
                fabric=Fabric.LIBRARY,
                link=Link("gloo", round(smallest[1] / 2, 1), round(largest[0] / largest[1] * 1e6, -6)),
                all_reduce=tuple(
                    Curve("gloo", Algorithm.LIBRARY, world, never_falling(rows)) for world, rows in library.items()
                ),
            ),
            shm_costs(shm),
        ),
    )
    Path(asked.output).write_text(cost_model.dumps(machine), encoding="utf-8")
    cost_model.load(asked.output)
    print(f"{asked.output}: call of a compiled function {times['call'][0][1]:.1f} us, not in the profile")


if __name__ == "__main__":
    main()
