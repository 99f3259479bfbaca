"""One rank of `test_scatter_gather`: GEMM + reduce-scatter and all-gather + GEMM between GPUs, against plain torch.

Inputs are -1, 0 and 1, so products, sums and their rounding are exact: every result has to equal the reference bit by
bit, whatever the order of a sum. Before a call the buffers in the arena hold NaN, and so does uninitialized memory:
rows that were read too early show. In captured graphs inputs change from replay to replay.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import Place, barrier, run_and_exit
from benchmarks.timing import capture as captured
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.fabrics import peer, topology
from weaveopt.fabrics.rows_call import RowsCall, memory_plan
from weaveopt.ops.gemm_comm.all_gather import op as gathers
from weaveopt.ops.gemm_comm.all_gather import reference as gathered
from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall, Weights
from weaveopt.ops.gemm_comm.reduce_scatter import op as scatters
from weaveopt.ops.gemm_comm.reduce_scatter import reference as scattered
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, Products
from weaveopt.records.candidate import Fabric

TIMEOUT_S = 30.0
MOST_ROWS = 1100
"""Most rows of one rank."""
TILE_CUTS = (TileConfig(256, 1, 4), TileConfig(128, 2, 2), TileConfig(256, 2, 0), TileConfig(128, 1, 16))
TILE_SHAPES = ((0, 1024, 64), (1, 1024, 64), (37, 2880, 520), (129, 8192, 256), (300, 1000, 1000), (1050, 1032, 72))
"""Rows of a rank, columns, depth."""
GATHER_CUTS = (TileConfig(256, 1), TileConfig(128, 2), TileConfig(160, 2), TileConfig(256, 4))
GATHER_SHAPES = (
    (0, 64, (1024,)),
    (1, 64, (1024, 256)),
    (37, 520, (2880,)),
    (300, 1000, (1000, 8, 1032)),
    (1050, 72, (520,)),
)
"""Rows of a rank, their elements, columns of the GEMMs."""
REPLAYS = 300


def small(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=random, device="cuda").to(dtype)


def reserve(call: RowsCall) -> None:
    sites = gathers.SITES if isinstance(call, AllGatherGemmCall) else scatters.SITES
    buffers = sites[call.fabric].buffers(call)  # type: ignore[arg-type]
    plan = memory_plan("0", [(call, buffers)])
    peer.reserve(topology.discover("0", TIMEOUT_S), plan, 0, TIMEOUT_S)


def poison() -> None:
    """Between calls, when no peer writes: all buffers are NaN in every dtype."""
    torch.cuda.synchronize()
    barrier()
    memory = peer.of("0")
    for buffer in memory.layout.buffers:
        memory.tensor(buffer.offset, (buffer.num_bytes,), torch.uint8).fill_(0xFF)
    torch.cuda.synchronize()
    barrier()


def scatter_call(hidden: int, dtype: str, cut: TileConfig | None, **more: object) -> GemmReduceScatterCall:
    world = dist.get_world_size()
    call = GemmReduceScatterCall(
        site=f"scatter {hidden} {dtype} {cut} {more}", group="0", fabric=Fabric.PEER, world=world, hidden=hidden,
        dtype=dtype, max_tokens=MOST_ROWS * world, timeout_s=TIMEOUT_S, cut="" if cut is None else str(cut),
    )  # fmt: skip
    return replace(call, **more)  # type: ignore[arg-type]


def gather_call(hidden: int, dtype: str, cut: TileConfig | None, returns_rows: bool = False) -> AllGatherGemmCall:
    world = dist.get_world_size()
    return AllGatherGemmCall(
        site=f"gather {hidden} {dtype} {cut} {returns_rows}", group="0", fabric=Fabric.PEER, world=world,
        hidden=hidden, dtype=dtype, max_tokens=MOST_ROWS * world, timeout_s=TIMEOUT_S, returns_rows=returns_rows,
        cut="" if cut is None else str(cut),
    )  # fmt: skip


def equal(got: Tensor, want: Tensor, what: str) -> None:
    assert got.shape == want.shape and got.dtype is want.dtype, f"{what}: {got.shape} {got.dtype}"
    if not torch.equal(got, want):
        wrong = (got != want).nonzero()
        raise AssertionError(f"{what}: {len(wrong)} of {got.numel()} differ, the first at {wrong[0].tolist()}")


def scatter(products: Products, outer: int, call: GemmReduceScatterCall) -> Tensor:
    op = torch.ops.weave.gemm_reduce_scatter.default
    result: Tensor = op(list(products.a), list(products.b), list(products.addends), outer, call.encode())
    return result


def gather(shard: Tensor, weights: Weights, outer: int, call: AllGatherGemmCall) -> list[Tensor]:
    op = torch.ops.weave.all_gather_gemm.default
    results: list[Tensor] = op(shard, list(weights.b), list(weights.addends), outer, call.encode())
    return results


def tiles(place: Place) -> None:
    """The kernel that sends its tiles: shapes, dtypes and cuts; each call twice."""
    for index, (rows, hidden, depth) in enumerate(TILE_SHAPES):
        for turn, cut in enumerate(TILE_CUTS):
            dtype = ("bfloat16", "float16")[(index + turn) % 2]
            kind, tokens = getattr(torch, dtype), rows * place.world
            call = scatter_call(hidden, dtype, cut, scale=(1.0, 0.25)[turn % 2])
            reserve(call)
            every = [
                Products(
                    [small(tokens, depth, seed=10 * rank + turn, dtype=kind)],
                    [small(hidden, depth, seed=10 * rank + turn + 5, dtype=kind).t()],
                )
                for rank in range(place.world)
            ]
            want = scattered.reference([each.compute() for each in every], 1, call)[place.rank]
            poison()
            for _ in range(2):
                equal(scatter(every[place.rank], 1, call), want, f"{rows} rows, depth {depth}, {call}")


def partials(place: Place) -> None:
    """GEMMs of the library, summed after them: every way to cut, addends, odd sizes, all dtypes."""
    for dtype in ("bfloat16", "float16", "float32"):
        kind = getattr(torch, dtype)
        for hidden, rows, outer, columns, gemms in (
            (1024, 300, 1, False, 1),
            (1001 * place.world, 37, 1, True, 2),
            (1001, 37, 1, False, 2),
            (264 * place.world, 96, 3, True, 1),
            (1032, 96, 3, False, 3),
            (8, 2, 2, False, 1),
            (520, 0, 1, False, 1),
        ):
            call = scatter_call(hidden, dtype, None, columns=columns, scale=1 / place.world)
            tokens = rows * place.world
            reserve(call)

            def made(rank: int, tokens: int = tokens, hidden: int = hidden, gemms: int = gemms) -> Products:
                a = [small(tokens, 33 + each, seed=rank + 7 * each, dtype=kind) for each in range(gemms)]  # noqa: B023
                b = [small(33 + each, hidden, seed=rank + 9 * each, dtype=kind) for each in range(gemms)]  # noqa: B023
                addends = [small(hidden, seed=rank, dtype=kind), small(tokens, hidden, seed=rank + 1, dtype=kind)]  # noqa: B023
                return Products(a, b, addends[: gemms - 1])

            every = [made(rank) for rank in range(place.world)]
            want = scattered.reference([each.compute() for each in every], outer, call)[place.rank]
            poison()
            for _ in range(2):
                got = scatter(every[place.rank], outer, call)
                equal(got, want, f"{rows} rows, outer {outer}, columns {columns}, {call}")


def not_for_tiles(place: Place) -> None:
    """Calls of a site with a cut that its kernel does not take are summed after the library's GEMMs."""
    kind, rows, hidden = torch.bfloat16, 96, 1024
    call = scatter_call(hidden, "bfloat16", TILE_CUTS[0])
    reserve(call)
    for outer, depth, num_addends in ((3, 64, 0), (1, 36, 0), (1, 64, 1)):
        every = [
            Products(
                [small(rows * place.world, depth, seed=rank, dtype=kind)],
                [small(depth, hidden, seed=rank + 5, dtype=kind)],
                [small(hidden, seed=rank + 3, dtype=kind)][:num_addends],
            )
            for rank in range(place.world)
        ]
        want = scattered.reference([each.compute() for each in every], outer, call)[place.rank]
        equal(scatter(every[place.rank], outer, call), want, f"outer {outer}, depth {depth}, {num_addends} addends")


def pushed(place: Place) -> None:
    """GEMMs that begin before all rows are here, and those that start after them; each call twice."""
    for index, (rows, hidden, widths) in enumerate(GATHER_SHAPES):
        for turn, cut in enumerate((*GATHER_CUTS, None)):
            dtype, output = ("bfloat16", "float16")[(index + turn) % 2], turn % 2 == 1
            kind = getattr(torch, dtype)
            shards = [small(rows, hidden, seed=rank + turn, dtype=kind) for rank in range(place.world)]
            b = [small(width, hidden, seed=width + turn, dtype=kind).t() for width in widths]
            addends: list[Tensor | None] = [None] * len(widths)
            if turn == 1:
                addends = [small(width, seed=width, dtype=kind) for width in widths]
            if turn == 2:  # this one comes behind all rows
                tokens = rows * place.world
                addends[-1] = small(tokens, widths[-1], seed=turn, dtype=kind)
            check_gather(place, shards, Weights(b, addends), 1, gather_call(hidden, dtype, cut, output))


def copied(place: Place) -> None:
    """Rows of each of several sequences, odd rows, fp32, no GEMM at all; every rank gets the same rows."""
    for dtype, cut in (("bfloat16", GATHER_CUTS[0]), ("float32", None), ("float16", None)):
        kind = getattr(torch, dtype)
        for rows, outer, hidden in ((96, 3, 520), (36, 2, 1001), (36, 1, 1001), (0, 1, 64)):
            shards = [small(rows, hidden, seed=rank, dtype=kind) for rank in range(place.world)]
            weights = Weights([small(hidden, 264, seed=3, dtype=kind)], [small(264, seed=4, dtype=kind)])
            for each in (weights, Weights([], [])):
                check_gather(place, shards, each, outer, gather_call(hidden, dtype, cut, True))


def check_gather(place: Place, shards: list[Tensor], weights: Weights, outer: int, call: AllGatherGemmCall) -> None:
    reserve(call)
    want = gathered.reference(shards, weights, outer, call)
    poison()
    for _ in range(2):
        found = gather(shards[place.rank], weights, outer, call)
        for number, (got, expected) in enumerate(zip(found, want, strict=True)):
            equal(got, expected, f"result {number} of {len(shards[0])} rows, outer {outer}, {call}")
    for got in (each for each in found[:2] if each.numel()):  # weights are the same on all ranks, so results are
        mine = got.float().cpu()
        everyone = [torch.empty_like(mine) for _ in range(place.world)]
        dist.all_gather(everyone, mine)
        assert all(torch.equal(mine, other) for other in everyone), f"ranks differ: {call}"


def random_values(place: Place) -> None:
    """Values that are rounded, within the tolerance of kernels."""
    rows, hidden, depth, kind = 700, 2048, 1024, torch.bfloat16

    def rounded(*shape: int, seed: int) -> Tensor:
        random = torch.Generator("cuda").manual_seed(seed)
        return (torch.randn(*shape, generator=random, device="cuda") / depth**0.25).to(kind)

    tokens = rows * place.world
    every = [
        Products([rounded(tokens, depth, seed=rank)], [rounded(hidden, depth, seed=rank + 9).t()])
        for rank in range(place.world)
    ]
    found = []
    for cut in (*TILE_CUTS, None):
        call = scatter_call(hidden, "bfloat16", cut)
        reserve(call)
        want = scattered.reference([each.compute() for each in every], 1, call)[place.rank]
        found.append(scatter(every[place.rank], 1, call))
        assert_close(found[-1], want, KERNEL, f"random values, {cut}", kind)
    assert all(torch.equal(found[0], other) for other in found[1 : len(TILE_CUTS)]), "cuts give other bits"
    for gather_cut in (*GATHER_CUTS, None):
        shards = [rounded(rows, depth, seed=rank) for rank in range(place.world)]
        weights = Weights([rounded(hidden, depth, seed=5).t()], [None])
        wide = gather_call(depth, "bfloat16", gather_cut)
        reserve(wide)
        for got, expected in zip(
            gather(shards[place.rank], weights, 1, wide), gathered.reference(shards, weights, 1, wide), strict=True
        ):
            assert_close(got, expected, KERNEL, f"random values, {gather_cut}", kind)


class Layers:
    """all-gather -> GEMM -> GEMM -> reduce-scatter, over and over: each layer by other kernels than the one before."""

    def __init__(self, place: Place, rows: int, hidden: int, inner: int) -> None:
        self.place, self.rows, self.hidden, kind = place, rows, hidden, torch.bfloat16
        self.up = [small(inner, hidden, seed=rank, dtype=kind).t() for rank in range(place.world)]
        self.down = [small(hidden, inner, seed=rank + 9, dtype=kind).t() for rank in range(place.world)]
        self.calls = [
            (gather_call(hidden, "bfloat16", gather_cut, output), scatter_call(hidden, "bfloat16", tile_cut))
            for gather_cut, tile_cut, output in (
                (GATHER_CUTS[0], TILE_CUTS[0], False),
                (GATHER_CUTS[1], TILE_CUTS[2], True),
                (None, None, True),
                (GATHER_CUTS[2], None, False),
                (None, TILE_CUTS[1], False),
            )
        ]
        for pair in self.calls:
            for call in pair:
                reserve(call)

    def run(self, shard: Tensor) -> Tensor:
        rank = self.place.rank
        for gathering, scattering in self.calls:
            rows, between = gather(shard, Weights([self.up[rank]], [None]), 1, gathering)
            shard = torch.sign(scatter(Products([torch.sign(between)], [self.down[rank]]), 1, scattering))
            if gathering.returns_rows:
                own = rows[rank * self.rows : (rank + 1) * self.rows]
                shard = torch.sign(shard + own + rows.sum(0, dtype=torch.float32).sign().to(shard.dtype))
        return shard

    def want(self, shards: list[Tensor]) -> Tensor:
        whole = torch.cat(shards)
        for gathering, _ in self.calls:
            total = sum(
                (
                    torch.sign(whole.float() @ up.float()) @ down.float()
                    for up, down in zip(self.up, self.down, strict=True)
                ),
                torch.zeros(whole.shape, device="cuda"),
            )
            before, whole = whole, torch.sign(total).to(whole.dtype)
            if gathering.returns_rows:
                whole = torch.sign(whole + before + before.sum(0, dtype=torch.float32).sign().to(whole.dtype))
        return whole.chunk(self.place.world)[self.place.rank]


def replays(place: Place, rows: int, hidden: int, inner: int) -> None:
    """Eager, then from a CUDA graph whose input changes from replay to replay, without a barrier between them."""
    layers = Layers(place, rows, hidden, inner)
    inputs = [
        [small(rows, hidden, seed=100 * turn + rank, dtype=torch.bfloat16) for rank in range(place.world)]
        for turn in range(3)
    ]
    want = [layers.want(shards) for shards in inputs]
    for shards, expected in zip(inputs, want, strict=True):
        equal(layers.run(shards[place.rank]), expected, f"layers of {rows} x {hidden} x {inner}")
    assert not torch.equal(want[0], want[1]) and bool((want[0] != 0).any()), "the layers make nothing of their input"
    held = inputs[0][place.rank].clone()
    found: list[Tensor] = []

    def step() -> None:
        found[:] = [layers.run(held)]

    graph = captured(step, torch.cuda.graph_pool_handle())
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(REPLAYS):
        held.copy_(inputs[turn % 3][place.rank])
        graph.replay()
        wrong += (found[0] != want[turn % 3]).sum()
    assert int(wrong) == 0, f"{int(wrong)} elements of {REPLAYS} replays of {rows} x {hidden} x {inner} differ"
    barrier()
    _alive.append(graph)


_alive: list[object] = []
"""Captured graphs hold addresses of arenas to the end."""


def program(place: Place) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        torch.use_deterministic_algorithms(True, warn_only=True)
        for part in (tiles, partials, not_for_tiles, pushed, copied):
            part(place)
            place.say(f"{part.__name__} agree")
        torch.use_deterministic_algorithms(False)
        random_values(place)
        place.say("random values agree")
        replays(place, 300, 1024, 512)
        # Rows so wide that the ring has an odd number of slots, which both teams use in turn.
        replays(place, 128, 8192, 256)
    print("scatter and gather agree", flush=True)


if __name__ == "__main__":
    run_and_exit(program)
