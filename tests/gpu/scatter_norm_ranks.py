"""One rank of `test_scatter_gather`: GEMM + reduce-scatter + addition + RMSNorm in one kernel, against plain torch.

Inputs are -1, 0 and 1, so sums are exact and equal the reference bit by bit. Norms are within the tolerance of kernels,
and bitwise the same from call to call, by every cut, and in replays of captured graphs, whose inputs change. Before a
call the buffers in the arena hold NaN, and so does uninitialized memory: rows that were read too early show.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import Place, barrier, run_and_exit
from benchmarks.timing import capture as captured
from tests.gpu.scatter_gather_ranks import (
    GATHER_CUTS,
    MOST_ROWS,
    TILE_CUTS,
    TILE_SHAPES,
    TIMEOUT_S,
    equal,
    gather,
    gather_call,
    poison,
    reserve,
    scatter,
    scatter_call,
    small,
)
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.ops.gemm_comm.all_gather.call import Weights
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterNormCall, Products
from weaveopt.ops.gemm_comm.reduce_scatter.reference import add_and_normalize, reference_norm
from weaveopt.records.candidate import Fabric

CUTS = (
    TileConfig(256, 1, 4),
    TileConfig(256, 4, 4),
    TileConfig(256, 2, 16),
    TileConfig(128, 1, 2),
    TileConfig(256, 2, 0),
)
REPLAYS = 400


def norm_call(hidden: int, dtype: str, cut: TileConfig | None, **more: object) -> GemmReduceScatterNormCall:
    """Its buffer is that of `scatter_call`, for which the arena is reserved here."""
    world = dist.get_world_size()
    call = GemmReduceScatterNormCall(
        site=f"norm {hidden} {dtype} {cut} {more}", group="0", fabric=Fabric.PEER, world=world, hidden=hidden,
        dtype=dtype, max_tokens=MOST_ROWS * world, timeout_s=TIMEOUT_S, cut="" if cut is None else str(cut), eps=1e-5,
    )  # fmt: skip
    reserve(call.scatter)
    return replace(call, **more)  # type: ignore[arg-type]


def run(
    a: Tensor, b: Tensor, residual: Tensor, weight: Tensor | None, call: GemmReduceScatterNormCall
) -> tuple[Tensor, Tensor]:
    """Normalized rows, and rows of the sum."""
    found: tuple[Tensor, Tensor] = torch.ops.weave.gemm_reduce_scatter_norm.default(
        a, b, residual, weight, call.encode()
    )
    return found


def positive(hidden: int, dtype: torch.dtype) -> Tensor:
    """A norm's weight, the same on all ranks."""
    random = torch.Generator("cuda").manual_seed(hidden)
    return (torch.rand(hidden, generator=random, device="cuda") + 0.5).to(dtype)


def agree(place: Place, rows: int, depth: int, weight: Tensor | None, call: GemmReduceScatterNormCall) -> Tensor:
    """Calls against the reference; the normalized rows."""
    kind, tokens = getattr(torch, call.dtype), rows * place.world
    a = [small(tokens, depth, seed=10 * rank, dtype=kind) for rank in range(place.world)]
    b = [small(call.hidden, depth, seed=10 * rank + 5, dtype=kind).t() for rank in range(place.world)]
    residual = small(tokens, call.hidden, seed=77, dtype=kind)
    partials = [left @ right for left, right in zip(a, b, strict=True)]
    want, total = reference_norm(partials, residual, weight, call)[place.rank]
    own = residual[place.rank * rows : (place.rank + 1) * rows]
    what = f"{rows} rows, depth {depth}, {call}"
    poison()
    found = [run(a[place.rank], b[place.rank], own, weight, call) for _ in range(2)]
    among = run(a[place.rank], b[place.rank], own, weight, replace(call, full_size_sum=True))
    assert among[1].shape == residual.shape, what
    found.append((among[0], among[1][place.rank * rows : (place.rank + 1) * rows]))
    for normalized, summed in found:
        equal(summed, total, what)
        equal(normalized, found[0][0], what)
        assert_close(normalized, want, KERNEL, what, kind)
    return found[0][0]


def normed(place: Place) -> None:
    """Shapes, dtypes, cuts, and norms of several families; each call twice."""
    for index, (rows, hidden, depth) in enumerate(TILE_SHAPES):
        for dtype in ("bfloat16", "float16"):
            kind = getattr(torch, dtype)
            weight = (positive(hidden, kind), positive(hidden, torch.float32), None)[index % 3]
            more = {"cast_before_weight": index % 2 == 0, "weight_offset": float(index % 3 == 1)}
            found = [agree(place, rows, depth, weight, norm_call(hidden, dtype, cut, **more)) for cut in CUTS]
            for cut, other in zip(CUTS, found, strict=True):
                equal(other, found[0], f"{rows} rows of {hidden}, {dtype}, by {cut} and {CUTS[0]}")


def not_for_the_kernel(place: Place) -> None:
    """A depth that it does not take, a dtype that it does not, and no cut."""
    for dtype, depth, cut in (("bfloat16", 36, CUTS[0]), ("float32", 64, None), ("float16", 64, None)):
        weight = positive(1024, getattr(torch, dtype))
        agree(place, 96, depth, weight, norm_call(1024, dtype, cut, cast_before_weight=True))


class Layers:
    """all-gather -> GEMM -> GEMM -> reduce-scatter -> addition -> norm, over and over, by several kernels in turn."""

    def __init__(self, place: Place, rows: int, hidden: int, inner: int) -> None:
        self.place, kind = place, torch.bfloat16
        self.up = [small(inner, hidden, seed=rank, dtype=kind).t() for rank in range(place.world)]
        self.down = [small(hidden, inner, seed=rank + 9, dtype=kind).t() for rank in range(place.world)]
        self.weight = positive(hidden, kind)
        self.steps = [
            (gather_call(hidden, "bfloat16", gather_cut), norm_call(hidden, "bfloat16", cut, cast_before_weight=True))
            for gather_cut, cut in (
                (GATHER_CUTS[0], CUTS[0]),
                (GATHER_CUTS[1], CUTS[2]),
                (None, None),
                (GATHER_CUTS[2], CUTS[1]),
                (None, CUTS[3]),
            )
        ]
        self.plain = scatter_call(hidden, "bfloat16", TILE_CUTS[0])
        for gathering, _ in self.steps:
            reserve(gathering)
        reserve(self.plain)

    def run(self, shard: Tensor) -> Tensor:
        """Outputs of the last layer: normalized rows, rows of the sum, and the sum of the kernel without a norm."""
        rank, total, rows = self.place.rank, shard, shard
        normalized = rows
        for gathering, norming in self.steps:
            _, between = gather(rows, Weights([self.up[rank]], [None]), 1, gathering)
            normalized, total = run(torch.sign(between), self.down[rank], torch.sign(total), self.weight, norming)
            # Signs of both are those of the sum: weights are positive.
            rows = torch.sign(normalized)
        # The kernel without a norm uses the same buffer and the same words.
        alone = scatter(Products([torch.sign(between)], [self.down[rank]]), 1, self.plain)
        return torch.stack([normalized, total, alone])

    def want(self, shards: list[Tensor]) -> Tensor:
        """Reference outputs of this rank."""
        total = rows = torch.cat(shards).float()
        summed = torch.zeros_like(total)
        for _ in self.steps:
            made = [torch.sign(rows @ up.float()) @ down.float() for up, down in zip(self.up, self.down, strict=True)]
            summed = torch.stack(made).sum(0)
            total = summed + torch.sign(total)
            rows = torch.sign(total)
        kind, own = shards[0].dtype, self.place.rank
        mine, alone = (each.chunk(self.place.world)[own] for each in (total, summed))
        normalized, rounded = add_and_normalize(
            mine, torch.zeros_like(mine, dtype=kind), self.weight, self.steps[-1][1]
        )
        return torch.stack([normalized, rounded, alone.to(kind)])


def replays(place: Place, rows: int, hidden: int, inner: int) -> None:
    """Eager, then from a CUDA graph whose input changes from replay to replay, without a barrier between them."""
    layers, what = Layers(place, rows, hidden, inner), f"layers of {rows} x {hidden} x {inner}"
    inputs = [
        [small(rows, hidden, seed=100 * turn + rank, dtype=torch.bfloat16) for rank in range(place.world)]
        for turn in range(3)
    ]
    eager = []
    for shards in inputs:
        got, want = layers.run(shards[place.rank]), layers.want(shards)
        equal(got[1:], want[1:], what)
        assert_close(got[0], want[0], KERNEL, what, torch.bfloat16)
        eager.append(got.clone())
    assert not torch.equal(eager[0], eager[1]) and bool((eager[0] != 0).any()), "the layers make nothing of their input"
    held = inputs[0][place.rank].clone()
    found: list[Tensor] = []

    def step() -> None:
        found[:] = [layers.run(held)]

    graph = captured(step, torch.cuda.graph_pool_handle())
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(REPLAYS):
        held.copy_(inputs[turn % 3][place.rank])
        graph.replay()
        wrong += (found[0] != eager[turn % 3]).sum()
    assert int(wrong) == 0, f"{int(wrong)} elements of {REPLAYS} replays of {what} differ"
    barrier()
    _alive.append(graph)


_alive: list[object] = []
"""Captured graphs hold addresses of arenas to the end."""


def program(place: Place) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        torch.use_deterministic_algorithms(True, warn_only=True)
        for part in (normed, not_for_the_kernel):
            part(place)
            place.say(f"{part.__name__} agree")
        torch.use_deterministic_algorithms(False)
        replays(place, 300, 1024, 512)
        # Rows so wide that the ring has an odd number of slots, which both teams use in turn.
        replays(place, 128, 8192, 256)
    print("sums and norms agree", flush=True)


if __name__ == "__main__":
    run_and_exit(program)
