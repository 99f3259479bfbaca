"""One rank of `test_scatter_gather`: compiled blocks of a sequence-parallel plan, by every pair of variants.

Profiles claim made-up times, so short that the variants meant are chosen. What has to come out is computed by plain
torch from all ranks' inputs, which are -1, 0 and 1: nothing is rounded.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import weaveopt
from benchmarks.ranks import Place, barrier, run_and_exit
from tests.gpu.profiles import with_curves, written_once
from tests.gpu.scatter_gather_ranks import equal, small
from weaveopt import cost_model
from weaveopt.cost_model.machine import Curve, Point
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.ops.gemm_comm.all_gather.call import ALL_GATHER
from weaveopt.ops.gemm_comm.reduce_scatter.call import REDUCE_SCATTER

POINTS = (Point(1 << 10, 0.5), Point(1 << 30, 1.0))
ROWS, HIDDEN, INNER = 512, 1024, 512
"""Rows of a rank; elements of a row; elements of a row between the GEMMs."""
EARLY = (("all_gather_gemm", "pushed"), ("gemm_reduce_scatter", "tiles"))
LATE = (("all_gather_gemm", "copies"), ("gemm_reduce_scatter", "partials"))


def profile(early: bool) -> str:
    base, world = cost_model.load("h200x4"), dist.get_world_size()
    if early:
        pushed, tiles = TileConfig(256, 1), TileConfig(256, 1, 4)
        curves = tuple(
            curve
            for size in (64, 8192)
            for curve in (
                Curve("fused", "all_gather_gemm", ALL_GATHER.name_of(pushed, size), world, POINTS, HIDDEN),
                Curve("fused", "gemm_reduce_scatter", REDUCE_SCATTER.name_of(tiles, size), world, POINTS, HIDDEN),
            )
        )
    else:
        curves = (
            Curve("fused", "all_gather", "copies", world, POINTS),
            Curve("fused", "reduce_scatter", "partials", world, POINTS),
        )
    return written_once(with_curves(base, f"short{early}", curves))


def compiled(place: Place, machine: str, early: bool, cuda_graphs: bool) -> None:
    ups = [small(INNER, HIDDEN, seed=rank, dtype=torch.bfloat16) for rank in range(place.world)]
    downs = [small(HIDDEN, INNER, seed=rank + 9, dtype=torch.bfloat16) for rank in range(place.world)]
    up, down = ups[place.rank], downs[place.rank]

    def block(shard: Tensor) -> Tensor:
        rows = functional.all_gather_tensor(shard, 0, dist.group.WORLD)
        between = torch.sign(torch.nn.functional.linear(rows, up))
        total = functional.reduce_scatter_tensor(torch.nn.functional.linear(between, down), "sum", 0, dist.group.WORLD)
        return torch.sign(total)

    def want(shards: list[Tensor]) -> Tensor:
        rows = torch.cat(shards).float()
        total = torch.zeros_like(rows)
        for first, second in zip(ups, downs, strict=True):
            total += torch.sign(rows @ first.float().t()) @ second.float().t()
        return torch.sign(total).bfloat16().chunk(place.world)[place.rank]

    torch._dynamo.reset()
    options = {
        "machine": machine, "strict": True, "timeout_s": 30.0, "cuda_graphs": cuda_graphs,
        "force": [rule for rule, _ in EARLY],
    }  # fmt: skip
    run = torch.compile(block, backend="weave", options=options)  # type: ignore[call-overload]
    for turn in range(5):
        shards = [small(ROWS, HIDDEN, seed=50 * turn + rank, dtype=torch.bfloat16) for rank in range(place.world)]
        equal(run(shards[place.rank]), want(shards), f"turn {turn}, early {early}, cuda_graphs {cuda_graphs}")
    chosen = {(each.chosen.choice, each.chosen.variant) for each in weaveopt.report().graphs[-1].decisions}
    assert chosen == set(EARLY if early else LATE), chosen
    barrier()


def program(place: Place) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        for early in (True, False):
            machine = profile(early)
            for cuda_graphs in (False, True):
                compiled(place, machine, early, cuda_graphs)
    print("compiled blocks agree", flush=True)


if __name__ == "__main__":
    run_and_exit(program)
