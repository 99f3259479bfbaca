"""Masks of symbolic sizes: what is said of them holds at every size, and what is not known is not said."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from tests.graphs.mask_graphs import MaskGraph
from weaveopt.sites.shared.masks import Mask, MaskCache, MaskKind, MaskReading, read_mask

aten = torch.ops.aten
Function = Callable[[torch.Tensor], torch.Tensor]


def read(function: Function, num_queries: int = 13, num_keys: int = 13) -> MaskReading:
    """Reading of a mask function of a tensor `[queries, keys]`, of which only the sizes matter, traced with both
    symbolic."""
    graph = make_fx(function, tracing_mode="symbolic", decomposition_table=select_decomp_table())(
        torch.zeros(num_queries, num_keys)
    ).graph
    (placeholder,) = graph.find_nodes(op="placeholder")
    sizes = placeholder.meta["val"].shape
    node = graph.output_node().args[0]
    assert isinstance(node, fx.Node)
    num_guards = len(sizes[0].node.shape_env.guards) if isinstance(sizes[0], torch.SymInt) else 0
    reading = read_mask(node, False, sizes[0], sizes[1], MaskCache())
    if isinstance(sizes[0], torch.SymInt):
        assert len(sizes[0].node.shape_env.guards) == num_guards
    return reading


def transformers_mask(x: torch.Tensor, *, offset: int = 0, window: int = 0, batch: int = 2) -> torch.Tensor:
    """With the test for packed sequences, and positions looked up in `position_ids`."""
    num_queries, num_keys = x.shape
    query = (torch.arange(num_queries) + offset)[None, None, :, None]
    key = torch.arange(num_keys)[None, None, None, :]
    sequence = torch.arange(batch)[:, None, None, None]
    position = torch.arange(num_keys)[None].expand(batch, -1)
    document = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    found = torch.ones((), dtype=torch.bool) & (document[sequence, query] == document[sequence, key])
    if window:
        found = found & (key > query - window)
    found = found & (position[sequence, key] <= query)
    return torch.where(found.expand(batch, -1, num_queries, num_keys), 0.0, float("-inf"))


def test_prompts_of_any_length() -> None:
    assert read(lambda x: transformers_mask(x)).mask == Mask(MaskKind.CAUSAL)
    assert read(lambda x: transformers_mask(x, window=4)).mask == Mask(MaskKind.WINDOW, window=4)
    assert read(lambda x: transformers_mask(x, offset=3)).mask == Mask(MaskKind.CAUSAL, 3)


def test_what_hangs_on_a_size_is_not_said() -> None:
    def lower_right(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[1]) <= torch.arange(x.shape[0])[:, None] + (x.shape[1] - x.shape[0])

    def short_window(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[1]) > torch.arange(x.shape[0])[:, None] - 4

    def documents(x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(x.shape[0])
        return (position // 5)[:, None] == torch.arange(x.shape[1]) // 5

    for function in (lower_right, short_window, documents):
        reading = read(function, 13, 17)
        assert reading.mask is None and reading.reason is not None
        assert reading.reason.code == "symbolic_sizes" and reading.admitted is not None


SQUARES = [(2, 2), (7, 7), (13, 13)]
OBLONGS = [(2, 9), (9, 2), (5, 31), (31, 5)]


def random_mask(chance: random.Random) -> Function:
    """A conjunction of bounds on the distance of key and query, in any spelling, some of them nothing at any size."""
    spellings = {"upper": (("le", 1), ("lt", 1), ("ge", -1), ("gt", -1)), "lower": (("ge", 1), ("gt", 1), ("le", -1))}
    sides = ["upper", *chance.choices(["upper", "lower", "lower"], k=chance.randint(0, 2))]
    bounds = []
    for side in sides:
        name, sign = chance.choice(spellings[side])
        bounds.append((name, sign, chance.randint(-3, 6), chance.choice([0] * 6 + [1, -1])))

    def mask(x: torch.Tensor) -> torch.Tensor:
        num_queries, num_keys = x.shape
        found = torch.ones((), dtype=torch.bool)
        for name, sign, shift, times in bounds:
            key, query = torch.arange(num_keys)[None, :], torch.arange(num_queries)[:, None]
            bound = shift + times * num_keys
            left, right = (key, query + bound) if sign > 0 else (query + bound, key)
            found = found & getattr(torch, name)(left, right)
        return found.expand(num_queries, num_keys)

    return mask


def test_what_is_said_holds_at_every_size() -> None:
    chance = random.Random(3)
    kinds: dict[MaskKind | None, int] = {}
    for _ in range(25):
        function = random_mask(chance)
        is_square = chance.random() < 0.5  # then both are one symbol
        reading = read(function, 13, 13 if is_square else 17)
        kind = reading.mask.kind if reading.mask is not None else None
        kinds[kind] = kinds.get(kind, 0) + 1
        if reading.mask is not None:
            for num_queries, num_keys in SQUARES if is_square else SQUARES + OBLONGS:
                truth = function(torch.zeros(num_queries, num_keys))
                assert torch.equal(reading.mask.admitted(num_queries, num_keys), truth), (
                    reading,
                    num_queries,
                    num_keys,
                )
    assert kinds.keys() >= {None, MaskKind.CAUSAL, MaskKind.WINDOW}, kinds


@pytest.mark.parametrize("is_full", [True, False])
def test_decoding_with_a_full_window_sees_all_of_it(is_full: bool) -> None:
    """As transformers writes one step over a sliding cache of 64 keys: which it holds, the graph knows by a guard."""
    environment = ShapeEnv()
    seen = environment.create_unspecified_symint_and_symbol(70, ConstantSource("seen"), DimDynamic.DYNAMIC)
    if is_full:
        assert bool(seen >= 64)  # the guard
    graph = MaskGraph()
    symbol = graph.graph.placeholder("seen")
    symbol.meta["val"] = seen
    first = graph.graph.call_function(torch.sym_max, (symbol, 0))
    first.meta["val"] = torch.sym_max(seen - 63, 0)
    key, query = graph.positions(64, -1), graph.positions(1, -2)
    moved = [graph.graph.call_function(aten.add.Tensor, (at, by)) for at, by in ((key, first), (query, symbol))]
    for node, like in zip(moved, (key, query), strict=True):
        node.meta["val"] = like.meta["val"]
    behind = graph.graph.call_function(aten.sub.Tensor, (moved[1], 64))
    behind.meta["val"] = query.meta["val"]
    tests = [graph.graph.call_function(target, (moved[0], other)) for target, other in
             ((aten.gt.Tensor, behind), (aten.le.Tensor, moved[1]))]  # fmt: skip
    both = graph.graph.call_function(aten.bitwise_and.Tensor, tuple(tests))
    for node in (*tests, both):
        node.meta["val"] = torch.empty(1, 1, 1, 64, dtype=torch.bool, device="meta")
    reading = read_mask(both, False, 1, 64)
    if is_full:
        assert reading.mask == Mask(MaskKind.NONE), reading
    else:
        assert reading.mask is None and reading.reason is not None and reading.reason.code == "symbolic_sizes"
