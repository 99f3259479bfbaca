"""Captured graphs run on simulated ranks with random inputs, and what their sites say they compute, computed again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.fx as fx
from torch import Tensor

from tests.graphs.capturing import gathered, scattered
from weaveopt.graph.facts import group_of
from weaveopt.rule import CapturedGraph, FoundSite
from weaveopt.sites.sequence.gather_matcher import GatherFacts
from weaveopt.sites.sequence.scatter_matcher import ScatterFacts
from weaveopt.sites.sequence.scatter_producer import Partial
from weaveopt.sites.shared.linear import MatchedGemm

c10d = torch.ops._c10d_functional
Values = dict[fx.Node, list[object]]
"""Value of every rank at every node."""


def run(captured: CapturedGraph, world: int) -> Values:
    """All ranks of one group of `world`; collectives of other groups are not known."""
    generator = torch.Generator().manual_seed(0)
    values: Values = {}
    for node in captured.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            values[node] = [_input(node.meta.get("val"), generator) for _ in range(world)]
            continue
        if node.op == "get_attr":
            raise AssertionError(f"{node.name}: constants of a graph are not known here")
        args = [fx.map_arg(node.args, lambda each, rank=rank: values[each][rank]) for rank in range(world)]
        if node.target is c10d.all_gather_into_tensor.default:
            values[node] = [torch.cat([own[0] for own in args])] * world
        elif node.target is c10d.reduce_scatter_tensor.default:
            total = torch.stack([own[0].float() for own in args]).sum(0) / (world if node.args[1] == "avg" else 1)
            values[node] = list(total.to(args[0][0].dtype).chunk(world))
        elif node.target is c10d.wait_tensor.default:
            values[node] = [own[0] for own in args]
        else:
            assert not group_of(node) or node.target.namespace != "_c10d_functional", node
            values[node] = [node.target(*own, **node.kwargs) for own in args]
    return values


def _input(value: object, generator: torch.Generator) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.dtype.is_floating_point:
        return torch.zeros(value.shape, dtype=value.dtype)
    made = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype)
    return made.copy_(torch.randint(-2, 3, tuple(value.shape), generator=generator))


def check(found: Sequence[FoundSite], values: Values, world: int) -> int:
    """Every recognized site computes what it says; returns how many there are."""
    for site in found:
        if isinstance(site.facts, ScatterFacts):
            _check_scatter(site, site.facts, values, world)
        elif isinstance(site.facts, GatherFacts):
            _check_gather(site, site.facts, values, world)
    return sum(site.facts is not None for site in found)


def _check_scatter(site: FoundSite, facts: ScatterFacts, values: Values, world: int) -> None:
    nodes = scattered(site)
    shards = [_shards(partial, facts, values, world) for partial in nodes.partials]
    for rank in range(world):
        own = [each[rank] * prod(nodes.scales) for each in shards]
        got = _tensor(values, nodes.shard, rank)
        _close(got, own[0].reshape(got.shape))
        after = nodes.after
        if after is None or after.post is not None:
            continue
        want = torch.stack(own).sum(0).reshape(got.shape)
        for bias in after.biases:
            want = want + _tensor(values, bias, rank)
        want = want * after.scale * (1 if after.scale_tensor is None else _tensor(values, after.scale_tensor, rank))
        got = _tensor(values, after.total, rank)
        want = want.reshape(got.shape)
        for residual in after.residuals:
            want = want + _tensor(values, residual, rank)
        _close(got, want)


def _shards(partial: Partial, facts: ScatterFacts, values: Values, world: int) -> list[Tensor]:
    """Shard of every rank of `sum over ranks of (scale * (sum of a @ b + biases) + addends)`."""
    total = torch.zeros(facts.m, facts.n)
    for rank in range(world):
        own = torch.zeros(facts.m, facts.n)
        for gemm in partial.gemms:
            own += _product(gemm, values, rank)
        for bias in partial.biases:
            own += _tensor(values, bias, rank)
        own *= partial.scale
        for addend in partial.addends:
            own += _tensor(values, addend, rank).reshape(own.shape)
        total += own
    total = total / world if facts.reduce_op == "avg" else total
    if facts.dim == -1:
        return list(total.chunk(world, dim=1))
    return list(total.view(facts.outer, world, -1, facts.n).unbind(1))


def _check_gather(site: FoundSite, facts: GatherFacts, values: Values, world: int) -> None:
    nodes = gathered(site)
    shares = torch.stack([_tensor(values, nodes.shard, rank) for rank in range(world)])
    rows = shares.view(world, facts.outer, -1, facts.k).transpose(0, 1).reshape(facts.m, facts.k)
    for gemm in nodes.gemms:
        for rank in range(world):
            operand = _tensor(values, gemm.a, rank)
            _close(operand, rows)
            want = rows @ _tensor(values, gemm.b, rank)
            want = want if gemm.bias is None else want + _tensor(values, gemm.bias, rank)
            _close(_tensor(values, gemm.node, rank), want)


def _product(gemm: MatchedGemm, values: Values, rank: int) -> Tensor:
    return _tensor(values, gemm.a, rank) @ _tensor(values, gemm.b, rank)


def _tensor(values: Values, node: fx.Node, rank: int) -> Tensor:
    value = values[node][rank]
    assert isinstance(value, Tensor), node
    return value.float()


def _close(got: Tensor, want: Tensor) -> None:
    """Compares values that are sent and added in bf16, relative to the largest one, since sums cancel."""
    scale = float(want.abs().max()) or 1.0
    assert got.abs().max() > 0, "nothing is compared"
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.03 * scale)
