"""Meaning of masks: every spelling, the inputs that they depend on, refusals with their reasons, long masks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graphs.mask_graphs import MaskGraph, assert_sound, read
from weaveopt.sites.shared.masks import Mask, MaskCache, MaskKind, read_mask

aten = torch.ops.aten


def test_a_bit_too_many_or_too_few_is_never_missed(path: str) -> None:
    """Every bit of one mask of each class."""
    for facts in ({"offset": 0}, {"offset": 2, "window": 3}, {"offset": 0, "chunk": 4}):
        for query in range(7):
            for key in range(9):
                graph = MaskGraph()
                node = graph.flipped(graph.masked(7, 9, **facts), 0, 0, query, key)
                reading = assert_sound(graph, node)
                assert reading.mask != Mask(MaskKind.CAUSAL, num_filled=7), (facts, query, key)


def test_classes_have_one_spelling() -> None:
    def mask_of(num_queries: int, num_keys: int, **facts: int) -> Mask | None:
        graph = MaskGraph()
        return read(graph, graph.masked(num_queries, num_keys, **facts)).mask

    assert mask_of(8, 8) == Mask(MaskKind.CAUSAL)
    assert mask_of(8, 20) == Mask(MaskKind.CAUSAL, num_filled=8)
    assert mask_of(8, 20, offset=12) == Mask(MaskKind.CAUSAL, 12)
    assert mask_of(1, 20, offset=19) == Mask(MaskKind.NONE)
    assert mask_of(1, 20, offset=11) == Mask(MaskKind.FULL, num_filled=12)
    assert mask_of(8, 8, window=8) == Mask(MaskKind.CAUSAL)
    assert mask_of(8, 8, window=7) == Mask(MaskKind.WINDOW, window=7)
    assert mask_of(8, 8, chunk=8) == Mask(MaskKind.CAUSAL)
    assert mask_of(8, 8, chunk=3) == Mask(MaskKind.CHUNKED, chunk=3)
    assert mask_of(4, 12, offset=8, chunk=5) == Mask(MaskKind.CHUNKED, 8, chunk=5)
    assert Mask(MaskKind.WINDOW, 2, window=3).admitted(2, 5).tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0]]
    assert str(Mask(MaskKind.WINDOW, 2, window=3)) == "window offset=2 window=3"


def test_a_query_without_keys_is_told() -> None:
    assert Mask(MaskKind.CAUSAL).every_query_sees(4, 4)
    assert not Mask(MaskKind.CAUSAL, -1).every_query_sees(4, 4)
    assert not Mask(MaskKind.WINDOW, window=2, num_filled=3).every_query_sees(8, 8)
    graph = MaskGraph()
    node = graph.masked(4, 4, offset=-4)
    reading = assert_sound(graph, node)
    assert reading.reason is not None and reading.reason.code == "mask_empty"


def traced(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> fx.Node:
    """The output node of a function as AOTAutograd leaves it."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in inputs]
        graph = make_fx(function, decomposition_table=select_decomp_table())(*fakes).graph
    return graph.output_node().args[0]  # type: ignore[return-value]


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "tril": lambda: torch.ones(9, 9, dtype=torch.bool).tril(),
    "triu of -inf": lambda: torch.full((9, 9), float("-inf")).triu(1),
    "masked_fill": lambda: torch.zeros(1, 1, 9, 9).masked_fill(torch.ones(9, 9).triu(1) != 0, -10000.0),
    "not later": lambda: ~(torch.arange(9) > torch.arange(9)[:, None]),
    "finfo.min in two dtypes": lambda: torch.where(
        torch.arange(9) <= torch.arange(9)[:, None], 0.0, torch.finfo(torch.float32).min
    ).to(torch.bfloat16),
    "neither before nor after": lambda: (
        ~((torch.arange(9) > torch.arange(9)[:, None]) | (torch.arange(9) < torch.arange(9)[:, None] - 50))
    ),
    "differences": lambda: (torch.arange(9)[:, None] - torch.arange(9)) >= 0,
    "descending": lambda: torch.arange(9, 0, -1) >= torch.arange(9, 0, -1)[:, None],
    "view": lambda: (torch.arange(9) <= torch.arange(9)[:, None]).view(1, 9, 9).unsqueeze(0).expand(2, 3, 9, 9),
    "int8": lambda: (torch.arange(9) <= torch.arange(9)[:, None]).to(torch.int8).to(torch.bool),
    "transposed": lambda: (torch.arange(9)[:, None] <= torch.arange(9)).transpose(0, 1),
    "padded rows": lambda: torch.nn.functional.pad(
        torch.where(torch.arange(9) <= torch.arange(9)[:, None], 0.0, float("-inf")), (0, 7)
    )[:, :9].expand(1, 2, 9, 9),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_causal_is_causal(path: str, form: str) -> None:
    reading = read_mask(traced(FORMS[form]), False, 9, 9)
    assert reading.mask == Mask(MaskKind.CAUSAL), reading


def test_biases_that_are_no_masks_are_refused() -> None:
    later = torch.arange(9) > torch.arange(9)[:, None]
    cases: dict[str, Callable[[], torch.Tensor]] = {
        "alibi": lambda: torch.arange(9).float() * -0.5 + torch.zeros(9, 1),
        "weak": lambda: torch.where(torch.arange(9) > torch.arange(9)[:, None], -5.0, 0.0),
        "not zero": lambda: torch.where(torch.arange(9) > torch.arange(9)[:, None], float("-inf"), 1.0),
        "multiplied": lambda: (1.0 - torch.ones(9, 9).tril()) * torch.finfo(torch.float32).min,
        "positive": lambda: torch.where(torch.arange(9) > torch.arange(9)[:, None], 0.0, 65536.0),
        "nan": lambda: torch.where(torch.arange(9) > torch.arange(9)[:, None], float("nan"), 0.0),
    }
    assert bool(later.any())
    for name, function in cases.items():
        reading = read_mask(traced(function), False, 9, 9)
        assert reading.mask is None and reading.admitted is None, name
        assert reading.reason is not None and reading.reason.code == "bias_not_boolean", (name, reading)


def test_the_fill_is_what_is_added() -> None:
    graph = MaskGraph()
    least = torch.finfo(torch.float32).min
    bias = graph.bias(graph.masked(3, 3), torch.float32, least)
    node = graph.call(torch.ops.prims.convert_element_type.default, bias, torch.float16)
    assert read(graph, node).fill == float("-inf")
    assert read(graph, graph.bias(graph.masked(3, 3))).fill == -65536.0
    assert read(graph, graph.masked(3, 3)).fill is None


def test_a_mask_that_hangs_on_inputs_names_them() -> None:
    graph = MaskGraph()
    padding, weights = graph.input(torch.tensor([[True, False, True]])), graph.input(torch.zeros(3, 3))
    keys = graph.call(aten.index.Tensor, padding, [graph.positions(1, 0, 2), graph.positions(3, 1, 2)])
    node = graph.bias(graph.both(graph.masked(3, 3), keys))
    reading = assert_sound(graph, node)
    assert reading.inputs == (padding,) and reading.admitted is node.args[0]
    assert reading.reason is not None and reading.reason.code == "depends_on_input"
    assert reading.reason.values == (("inputs", padding.name),)
    assert not reading.hangs_on_lengths_only
    like = graph.call(aten.full_like.default, weights, True, dtype=torch.bool)
    assert read(graph, like).mask == Mask(MaskKind.NONE)


def test_a_cache_length_is_told_from_other_inputs() -> None:
    graph = MaskGraph()
    length = graph.input(torch.tensor(5))
    position = graph.call(aten.add.Tensor, graph.positions(1, -2), length)
    reading = assert_sound(graph, graph.call(aten.le.Tensor, graph.positions(16, -1), position))
    assert reading.inputs == (length,) and reading.hangs_on_lengths_only


def test_calls_without_a_mask() -> None:
    assert read_mask(None, False, 5, 7).mask == Mask(MaskKind.NONE)
    assert read_mask(None, True, 7, 7).mask == Mask(MaskKind.CAUSAL)
    assert read_mask(None, True, 5, 7).mask == Mask(MaskKind.CAUSAL, num_filled=5)
    assert read_mask(None, True, 1, 7).mask == Mask(MaskKind.FULL, num_filled=1)
    graph = MaskGraph()
    both = read_mask(graph.masked(5, 5), True, 5, 5)
    assert both.mask is None and both.reason is not None and both.reason.code == "mask_beside_is_causal"


def test_what_cannot_be_evaluated_is_named() -> None:
    graph = MaskGraph()
    noise = graph.call(aten.rand.default, [4, 4], device=torch.device("cpu"))
    node = graph.both(graph.masked(4, 4), graph.call(aten.gt.Scalar, noise, 0.5))
    reading = read_mask(node, False, 4, 4)
    assert reading.mask is None and reading.reason is not None and reading.reason.code == "mask_not_evaluated"
    assert ("node", noise.name) in reading.reason.values
    other = read_mask(graph.masked(4, 4), False, 4, 5)
    assert other.mask is None and other.reason is not None and other.reason.code == "mask_of_other_shape"


def test_a_mask_is_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cache = MaskGraph(), MaskCache()
    node = graph.masked(6, 6)
    first = read_mask(node, False, 6, 6, cache)
    monkeypatch.setattr("weaveopt.sites.shared.masks.reading._decide", None)
    assert read_mask(node, False, 6, 6, cache) is first
    assert read_mask(graph.bias(node), False, 6, 6, cache).mask == first.mask


def test_fake_tensors_do_not_reach_the_evaluation(path: str) -> None:
    """A compiler has them switched on while it asks."""
    graph = MaskGraph()
    node = graph.masked(9, 9, window=4)
    with FakeTensorMode():
        assert read(graph, node).mask == Mask(MaskKind.WINDOW, window=4)


@pytest.mark.parametrize("gap", [-1, 0, 1, 2])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_ranges_with_a_gap_are_not_one_range(path: str, gap: int, is_swapped: bool) -> None:
    graph = MaskGraph()
    query, key = graph.positions(6, -2), graph.positions(12, -1)
    sides = [
        graph.call(aten.lt.Tensor, key, query),
        graph.call(aten.ge.Tensor, key, graph.call(aten.add.Tensor, query, gap)),
    ]
    reading = assert_sound(graph, graph.call(aten.bitwise_or.Tensor, *(sides[::-1] if is_swapped else sides)))
    if gap <= 0:
        assert reading.mask == Mask(MaskKind.NONE)
    else:
        assert reading.reason is not None and reading.reason.code == "keys_not_contiguous"


def test_sums_that_wrap_are_not_taken_for_ones_that_do_not(path: str) -> None:
    graph = MaskGraph()
    key = graph.call(torch.ops.prims.convert_element_type.default, graph.positions(8, -1), torch.int32)
    for _ in range(2):
        key = graph.call(aten.add.Tensor, key, (1 << 30) - 1)
    node = graph.call(aten.gt.Tensor, key, graph.positions(8, -2))
    assert graph.value(node).any() and not graph.value(node).all()
    assert assert_sound(graph, node).mask == Mask(MaskKind.FULL, num_filled=2)


def test_strided_slices(path: str) -> None:
    """Every other query, from the second on, of twice as many."""
    graph = MaskGraph()
    node = graph.masked(24, 12, offset=-1)
    node = graph.call(aten.slice.Tensor, node, -2, 1, 9223372036854775807, 2)
    assert assert_sound(graph, node).reason is not None
    shifted = graph.call(aten.slice.Tensor, graph.masked(9, 24, window=4), -1, 3, 12, 1)
    assert assert_sound(graph, shifted).mask == Mask(MaskKind.WINDOW, -3, window=4, num_filled=6)


def test_masks_of_fewer_dimensions() -> None:
    graph = MaskGraph()
    assert read_mask(graph.scalar(True, torch.bool), False, 3, 5).mask == Mask(MaskKind.NONE)
    keys = graph.call(aten.lt.Scalar, graph.positions(5, 0, rank=1), 4)
    assert read_mask(keys, False, 3, 5).mask == Mask(MaskKind.FULL, num_filled=4)
    queries = graph.call(aten.ge.Scalar, graph.positions(3, 0, rank=2), 0)
    assert read_mask(queries, False, 3, 5).mask == Mask(MaskKind.NONE)


@pytest.mark.parametrize("facts", [{}, {"window": 4096}, {"chunk": 8192}])
def test_long_masks_are_read_in_a_fraction_of_a_second(facts: dict[str, int]) -> None:
    """The masks that transformers makes for 16384 tokens: two sequences, and its test for packed ones."""
    size = 16384

    def mask() -> torch.Tensor:
        query, key = torch.arange(size)[None, None, :, None], torch.arange(size)[None, None, None, :]
        found = torch.ones((), dtype=torch.bool) & (key <= query)
        if "window" in facts:
            found = found & (key > query - facts["window"])
        if "chunk" in facts:
            found = found & (key // facts["chunk"] == query // facts["chunk"])
        position = torch.arange(size)[None].expand(2, -1)
        document = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        batch = torch.arange(2)[:, None, None, None]
        found = found & (document[batch, query] == document[batch, key])
        return torch.where(found.expand(2, -1, size, size), 0.0, float("-inf"))

    node = traced(mask)
    start = time.process_time()
    reading = read_mask(node, False, size, size)
    seconds = time.process_time() - start
    assert str(reading.mask).split() == [
        "causal" if not facts else "window" if "window" in facts else "chunked",
        *(f"{name}={value}" for name, value in facts.items()),
    ]
    assert seconds < 0.5
