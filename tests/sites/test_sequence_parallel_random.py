"""Random movements between a GEMM and a collective: recognized exactly where the rows are a rank's block of them.

What is right is found without the matcher: the numbers of all elements are moved, and compared with every block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from tests.graphs.capturing import codes, gathers, scattered, scatters, sites_in
from tests.graphs.collective_graphs import Mover, Ranks, aten
from tests.graphs.rewriting import Rewritten, check_rewritten
from weaveopt.rule import CapturedGraph, FoundSite

NUM_GRAPHS = 200
"""Number of graphs for each of the two kinds of sites."""


def small(generator: torch.Generator, *sizes: int) -> Tensor:
    """Numbers so small that sums are exact in every dtype."""
    return torch.randint(-1, 2, sizes, generator=generator).float()


def sizes_of(chosen: random.Random) -> tuple[int, int, int, int]:
    """world, outer, inner, columns of one rank."""
    return chosen.choice((2, 3, 4)), chosen.choice((1, 2, 3)), chosen.choice((1, 2, 3)), chosen.choice((1, 2))


def moved(mover: Mover, broken: bool) -> None:
    steps = mover.random.randrange(1, 6)
    breaks = mover.random.randrange(steps) if broken else -1
    for step in range(steps):
        mover.step()
        if step == breaks:
            mover.break_rows()


def blocks(whole: Tensor, world: int) -> Iterator[tuple[int, int, Tensor]]:
    """(dim, outer, elements of every rank) of each way to share a matrix out that a site may have."""
    rows, columns = whole.shape
    if rows % world == 0:
        for outer in (each for each in range(1, rows // world + 1) if rows // world % each == 0):
            cut = whole.view(outer, world, rows // world // outer, columns)
            yield int(outer > 1), outer, cut.transpose(0, 1).reshape(world, -1)
    if columns % world == 0:
        yield -1, 1, whole.view(rows, world, columns // world).transpose(0, 1).reshape(world, -1)


def numbered(ranks: Ranks, source: fx.Node, numbers: Tensor, node: fx.Node) -> Tensor:
    """The value of `node` if `source` held `numbers`."""
    held: dict[fx.Node, object] = {source: numbers}

    def of(each: fx.Node) -> object:
        if each not in held:
            args = fx.map_arg(each.args, of)
            is_cast = each.target is torch.ops.prims.convert_element_type.default
            held[each] = args[0] if is_cast else each.target(*args, **each.kwargs)  # type: ignore[operator]
        return held[each]

    found = of(node)
    assert isinstance(found, Tensor)
    return found


def rewritten(ranks: Ranks) -> Rewritten:
    """The graph, rewritten in place, computes what it did."""
    inputs = [ranks.values[node] for node in ranks.graph.find_nodes(op="placeholder")]
    return check_rewritten(CapturedGraph("graph", "inference", 0, ("0",), ranks.graph), ranks.world, inputs)


def scatter_graph(seed: int) -> tuple[Ranks, fx.Node, Mover, list[FoundSite]] | None:
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    world, outer, inner, columns = sizes_of(chosen)
    ranks, depth = Ranks(world), 3
    m, n = outer * world * inner, world * columns
    a = ranks.input([small(generator, m, depth) for _ in range(world)])
    b = ranks.input([small(generator, depth, n) for _ in range(world)])
    gemm = ranks.call(aten.mm.default, a, b)
    mover = Mover(ranks, chosen, gemm, [[outer, world, inner], [world, columns]])
    if chosen.random() < 0.6:  # toward a form that is one: the rank in front
        dim = chosen.choice((0, 1))
        parts = [[outer], [world], [inner], [n]] if dim == 0 else [[m], [world], [columns]]
        mover._view(parts)
        mover._apply(aten.permute.default, [1, 0, *range(2, len(parts))])
        mover.parts = [parts[1], parts[0], *parts[2:]]
        mover.cast() if chosen.random() < 0.3 else mover.merge()
        if chosen.random() < 0.3:
            mover.break_rows()
    else:
        moved(mover, broken=chosen.random() < 0.3)
    if math.prod(mover.parts[0]) % world:
        mover.to_rank(1)
    if math.prod(mover.parts[0]) % world:
        return None  # no collective takes it
    result = ranks.reduce_scatter(mover.node)
    return ranks, gemm, mover, sites_in(ranks.captured(result), world)


def test_scatters_are_recognized_exactly() -> None:
    recognized, refused = 0, 0
    for seed in range(NUM_GRAPHS):
        made = scatter_graph(seed)
        if made is None:
            continue
        ranks, gemm, mover, [site] = made
        [m, n] = ranks.tensors(gemm)[0].shape
        numbers = torch.arange(m * n).view(m, n)
        sent = numbered(ranks, gemm, numbers, mover.node)
        right = []
        if sent.numel() == m * n:
            shards = sent.reshape(ranks.world, -1)
            right = [(dim, outer) for dim, outer, block in blocks(numbers, ranks.world) if torch.equal(block, shards)]
        assert bool(right) == bool(scatters([site])), (seed, right, site.site.rejections, ranks.graph)
        if not right:
            refused += 1
            assert set(codes(site)) <= {"form_not_known", "scatter_dim_not_supported", "uneven_shards"}, codes(site)
            continue
        recognized += 1
        [facts] = scatters([site])
        assert (facts.dim, facts.outer) in right, (seed, facts, right)
        total = torch.stack(ranks.tensors(gemm)).sum(0)
        found = (facts.dim, facts.outer)
        [block] = [block for dim, outer, block in blocks(total, ranks.world) if (dim, outer) == found]
        for rank, shard in enumerate(ranks.tensors(scattered(site).shard)):
            assert torch.equal(block[rank], shard.float().flatten()), seed
        assert (facts.m, facts.n, facts.k) == (m, n, 3)
        done = rewritten(ranks)
        assert done.num_rewritten == (facts.dtype == facts.gemm_dtype), (seed, done)
    assert recognized >= 60 and refused >= 60, (recognized, refused)


def gather_graph(seed: int) -> tuple[Ranks, fx.Node, Mover, fx.Node, list[FoundSite]]:
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    world, outer, inner, columns = sizes_of(chosen)
    ranks, depth = Ranks(world), 2 * columns
    x = ranks.input([small(generator, outer * inner, depth) for _ in range(world)])
    shard = ranks.call(aten.abs.default, x)
    whole = ranks.all_gather(shard)
    mover = Mover(ranks, chosen, whole, [[world, outer, inner], [2, columns]])
    if chosen.random() < 0.6:
        mover._view([[world], [outer], [inner], [2, columns]])
        source = chosen.choice(([1, 0, 2, 3], [0, 1, 2, 3], [1, 2, 0, 3]))
        mover._apply(aten.permute.default, source)
        mover.parts = [mover.parts[at] for at in source]
        mover._view([[*mover.parts[0], *mover.parts[1], *mover.parts[2]], mover.parts[3]])
        if chosen.random() < 0.3:
            mover.break_rows()
    else:
        moved(mover, broken=chosen.random() < 0.3)
    mover.to_rank(2)
    operand = mover.node
    value = ranks.tensors(operand)[0]
    weight = ranks.input([small(generator, value.shape[1], 3).to(value.dtype)] * world)
    gemm = ranks.call(aten.mm.default, operand, weight)
    return ranks, shard, mover, gemm, sites_in(ranks.captured(gemm), world)


def test_gathers_are_recognized_exactly() -> None:
    recognized, refused = 0, 0
    for seed in range(NUM_GRAPHS):
        ranks, shard, mover, gemm, [site] = gather_graph(seed)
        world, own = ranks.world, ranks.tensors(shard)[0]
        waited = next(node for node in ranks.graph.nodes if "wait_tensor" in str(node.target))
        got = numbered(ranks, waited, torch.arange(world * own.numel()).view(-1, own.shape[1]), mover.node)
        right = []
        if got.numel() == world * own.numel():
            # A rank's own elements in their order, as rows that lie [outer, world, inner].
            each = got.shape[0] // world if got.shape[0] % world == 0 else 0
            shards = torch.arange(world * own.numel()).view(world, each, -1) if each else torch.empty(0)
            for outer in (size for size in range(1, each + 1) if each % size == 0):
                placed = shards.view(world, outer, each // outer, -1).transpose(0, 1).reshape(got.shape)
                right += [(int(outer > 1), outer)] if torch.equal(placed, got) else []
        assert bool(right) == bool(gathers([site])), (seed, right, site.site.rejections, ranks.graph)
        if not right:
            refused += 1
            known = {"form_not_known", "layout_not_supported", "gather_dim_not_supported", "uneven_shards"}
            assert set(codes(site)) <= known, codes(site)
            continue
        recognized += 1
        [facts] = gathers([site])
        assert (facts.dim, facts.outer) in right, (seed, facts, right)
        shares = torch.stack(ranks.tensors(shard)).view(world, facts.outer, -1, facts.k)
        rows = shares.transpose(0, 1).reshape(-1, facts.k)
        for rank, product in enumerate(ranks.tensors(gemm)):
            weight = ranks.tensors(gemm.args[1])[rank]  # type: ignore[arg-type]
            assert torch.equal(rows @ weight.float(), product.float()), seed
        assert (facts.m, facts.n) == (rows.shape[0], 3)
        done = rewritten(ranks)
        assert done.num_rewritten == (facts.dtype == facts.gemm_dtype), (seed, done)
    assert recognized >= 60 and refused >= 60, (recognized, refused)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_the_collective_itself_may_be_saved(op: str) -> None:
    """Partitioners save what a backward pass reads in front of the wait: the site ends there, and stays one."""
    ranks = Ranks(2)
    a, b = (ranks.input([torch.ones(4, 4)] * 2) for _ in range(2))
    wait = ranks.reduce_scatter(ranks.call(aten.mm.default, a, b), op)
    collective = wait.args[0]
    assert isinstance(collective, fx.Node)
    total = ranks.call(aten.add.Tensor, wait, ranks.input([torch.ones(2, 4)] * 2))
    [site] = sites_in(ranks.captured(total, collective), 2)
    [facts] = scatters([site])
    assert (facts.has_residual, facts.sum_is_read, facts.reduce_op) == (False, True, op)
    assert scattered(site).shard is wait
    assert rewritten(ranks).num_rewritten == 1


def test_a_shard_that_is_saved_is_not_summed_away() -> None:
    """Two scatters whose results are added are one site, unless one of the results is needed by itself."""
    for saves in (False, True):
        ranks = Ranks(2)
        a, b = (ranks.input([torch.ones(4, 4)] * 2) for _ in range(2))
        waits = [ranks.reduce_scatter(ranks.call(aten.mm.default, x, y)) for x, y in ((a, b), (b, a))]
        total = ranks.call(aten.add.Tensor, *waits)
        found = sites_in(ranks.captured(total, *waits[:1] if saves else ()), 2)
        assert [each.num_partials for each in scatters(found)] == ([1, 1] if saves else [2])
        # By itself the other one is the residual of neither: both end at their own shard.
        assert all(site.facts is not None for site in found)
        assert rewritten(ranks).num_rewritten == len(found)
