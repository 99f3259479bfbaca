"""Random masks: 500 of each class, as many that almost are of one, and random programs. Each keeps its meaning."""

from __future__ import annotations

import random

import pytest
import torch
import torch.fx as fx

from tests.graphs.mask_graphs import MaskGraph, admits, assert_sound
from weaveopt.sites.shared.masks import MaskKind

aten = torch.ops.aten
NUM_RANDOM = 500


def random_class(chance: random.Random, kind: MaskKind) -> tuple[int, int, dict[str, int]]:
    num_queries, num_keys = chance.randint(1, 14), chance.randint(1, 14)
    facts: dict[str, int] = {"offset": chance.choice([0, num_keys - num_queries, chance.randint(0, 9)])}
    if kind is MaskKind.WINDOW:
        facts["window"] = chance.randint(1, 12)
    if kind is MaskKind.CHUNKED:
        facts["chunk"] = chance.randint(1, 9)
    if kind is MaskKind.FULL:
        facts = {"offset": num_keys, "num_filled": chance.randint(1, num_keys)}
    elif chance.random() < 0.3:
        facts["num_filled"] = chance.randint(1, num_keys)
    return num_queries, num_keys, facts


@pytest.mark.parametrize("kind", [MaskKind.CAUSAL, MaskKind.WINDOW, MaskKind.CHUNKED, MaskKind.FULL])
def test_random_masks_of_each_class_are_read(path: str, kind: MaskKind) -> None:
    chance = random.Random(f"{kind} {path}")
    kinds: set[MaskKind] = set()
    num_unread = 0
    for _ in range(NUM_RANDOM if path == "short forms" else NUM_RANDOM // 5):
        num_queries, num_keys, facts = random_class(chance, kind)
        graph = MaskGraph()
        node = graph.masked(num_queries, num_keys, **facts)
        node = graph.call(aten.expand.default, node, [chance.randint(1, 3), -1, num_queries, num_keys])
        node = graph.bias(node) if chance.random() < 0.5 else node
        reading = assert_sound(graph, node)
        if reading.mask is not None:
            kinds.add(reading.mask.kind)
        else:  # some masks of which queries see nothing fit several offsets, and not all of them are tried
            num_unread += bool(admits(graph, node).any(dim=-1).all())
    assert kind in kinds
    assert num_unread == 0


def near_miss(chance: random.Random, graph: MaskGraph, case: str) -> fx.Node:
    kind = chance.choice([MaskKind.CAUSAL, MaskKind.WINDOW, MaskKind.CHUNKED])
    num_queries, num_keys, facts = random_class(chance, kind)
    batch, heads = chance.randint(1, 3), chance.randint(1, 3)
    node = graph.masked(num_queries, num_keys, **facts)
    if case == "one bit":
        place = (chance.randrange(num_queries), chance.randrange(num_keys))
        node = graph.call(aten.expand.default, node, [batch, heads, num_queries, num_keys])
        return graph.flipped(node, chance.randrange(batch), chance.randrange(heads), *place)
    if case == "table":
        return graph.constant(torch.rand(batch, heads, num_queries, num_keys) < chance.choice([0.1, 0.5, 0.9]))
    # Each sequence or head has an offset of its own, most of them the same.
    dim, count = (0, batch) if case == "sequences" else (1, heads)
    own = [chance.choice([0, 0, 0, 1]) for _ in range(count)]
    shift = graph.constant(torch.tensor(own).reshape(-1, *(1,) * (3 - dim)))
    query = graph.call(aten.add.Tensor, graph.positions(num_queries, -2), shift)
    return graph.both(node, graph.call(aten.le.Tensor, graph.positions(num_keys, -1), query))


@pytest.mark.parametrize("case", ["one bit", "table", "sequences", "heads"])
def test_masks_that_are_almost_of_a_class_keep_their_meaning(path: str, case: str) -> None:
    chance = random.Random(f"{case} {path}")
    torch.manual_seed(len(case))
    num_refused = 0
    for _ in range(NUM_RANDOM if path == "short forms" else NUM_RANDOM // 5):
        graph = MaskGraph()
        num_refused += assert_sound(graph, near_miss(chance, graph, case)).mask is None
    assert num_refused > 10


DTYPES = [torch.int64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.float32, torch.bool]
COMPARISONS = [aten.le, aten.lt, aten.ge, aten.gt, aten.eq, aten.ne]


def random_number(chance: random.Random, graph: MaskGraph, size: tuple[int, int], depth: int) -> fx.Node:
    """Numbers of any dtype that broadcast to `[1, 1, *size]`, wrapping ones too."""
    roll = chance.random()
    if depth == 0 or roll < 0.3:
        dim = chance.choice([-1, -2])
        node = graph.positions(size[dim], dim, start=chance.choice([0, 0, -3, 120, 250]))
        return graph.call(torch.ops.prims.convert_element_type.default, node, chance.choice(DTYPES))
    inner = random_number(chance, graph, size, depth - 1)
    if graph.value(inner).dtype is torch.bool:
        return graph.call(torch.ops.prims.convert_element_type.default, inner, chance.choice(DTYPES[:-1]))
    if roll < 0.5:
        return graph.call(
            chance.choice([aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor]), inner, chance.randint(-4, 9)
        )
    if roll < 0.6:
        return graph.call(aten.remainder.Scalar, inner, chance.randint(1, 9))
    if roll < 0.7:
        return graph.call(aten.neg.default, inner)
    other = random_number(chance, graph, size, depth - 1)
    if graph.value(other).dtype is torch.bool:
        return inner
    return graph.call(chance.choice([aten.add.Tensor, aten.sub.Tensor]), inner, other)


def random_condition(chance: random.Random, graph: MaskGraph, size: tuple[int, int], depth: int) -> fx.Node:
    roll = chance.random()
    if depth == 0 or roll < 0.3:
        left, compare = random_number(chance, graph, size, 2), chance.choice(COMPARISONS)
        if chance.random() < 0.3:
            return graph.call(compare.Scalar, left, chance.randint(-5, 9))
        return graph.call(compare.Tensor, left, random_number(chance, graph, size, 2))
    inner = random_condition(chance, graph, size, depth - 1)
    if roll < 0.4:
        return graph.call(aten.logical_not.default, inner)
    if roll < 0.5:
        full = graph.call(aten.expand.default, inner, [1, 1, *size])
        sliced = graph.call(aten.slice.Tensor, full, chance.choice([2, -1]), 0, 9223372036854775807, 1)
        return graph.call(aten.view.default, sliced, [1, 1, 1, *size]) if depth == 3 else sliced
    if roll < 0.55:
        full = graph.call(aten.expand.default, inner, [1, 1, *size])
        return graph.call(aten.permute.default, graph.call(aten.permute.default, full, [0, 3, 1, 2]), [0, 2, 3, 1])
    other = random_condition(chance, graph, size, depth - 1)
    if roll < 0.6:
        return graph.call(aten.where.self, inner, other, graph.scalar(chance.random() < 0.5, torch.bool))
    ops = [aten.bitwise_and.Tensor, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor]
    return graph.call(chance.choice(ops), inner, other)


def test_random_programs_keep_their_meaning(path: str) -> None:
    """Whatever is written: what is read is the mask, and what is not a class is refused; never evaluated wrongly."""
    chance = random.Random(path)
    num_read = 0
    for _ in range(NUM_RANDOM // 3):
        graph = MaskGraph()
        size = (chance.randint(1, 10), chance.randint(1, 10))
        node = random_condition(chance, graph, size, 3)
        node = graph.call(aten.expand.default, node, [*graph.value(node).shape[:-2], *size])
        node = graph.bias(node) if chance.random() < 0.5 else node
        reading = assert_sound(graph, node)
        assert reading.mask is not None or (reading.reason is not None and reading.reason.code != "mask_not_evaluated")
        num_read += reading.mask is not None
    assert num_read > NUM_RANDOM // 30
