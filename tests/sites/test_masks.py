"""What masks mean: forms of them, 500 random masks of each class, masks that almost are of a class, large masks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.mask_graphs import MaskGraph
from weaveopt.sites.masks import Mask, MaskCache, MaskKind, MaskReading, evaluate, intervals, read_mask

aten = torch.ops.aten
NUM_RANDOM = 500


@pytest.fixture(params=["short forms", "blocks"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the answer; blocks of a few rows, and hardly a node that is evaluated whole."""
    if request.param == "blocks":
        monkeypatch.setattr(intervals, "_derived", lambda node, is_inverted, values: None)
        monkeypatch.setattr(intervals, "BLOCK_ELEMENTS", 64)
        monkeypatch.setattr(evaluate, "WHOLE_ELEMENTS", 48)
    return str(request.param)


def read(graph: MaskGraph, node: fx.Node) -> MaskReading:
    shape = graph.value(node).shape
    return read_mask(node, False, shape[-2], shape[-1])


def admits(graph: MaskGraph, node: fx.Node) -> torch.Tensor:
    value = graph.value(node)
    return value if value.dtype is torch.bool else value == 0


def assert_sound(graph: MaskGraph, node: fx.Node) -> MaskReading:
    """A reading is the mask, bit for bit, or has a reason; and `admitted` is what the mask is made from."""
    reading, truth = read(graph, node), admits(graph, node)
    assert (reading.mask is None) == (reading.reason is not None)
    if reading.mask is not None:
        expanded = reading.mask.admitted(truth.shape[-2], truth.shape[-1])
        assert torch.equal(expanded.expand(truth.shape), truth), reading
    if reading.admitted is not None:
        assert torch.equal((graph.value(reading.admitted) != reading.is_inverted).expand(truth.shape), truth)
    return reading


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
    monkeypatch.setattr("weaveopt.sites.masks.reading._decide", None)
    assert read_mask(node, False, 6, 6, cache) is first
    assert read_mask(graph.bias(node), False, 6, 6, cache).mask == first.mask


def test_fake_tensors_do_not_reach_the_evaluation(path: str) -> None:
    """A compiler has them switched on while it asks."""
    graph = MaskGraph()
    node = graph.masked(9, 9, window=4)
    with FakeTensorMode():
        assert read(graph, node).mask == Mask(MaskKind.WINDOW, window=4)


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
    for _ in range(NUM_RANDOM // 2):
        graph = MaskGraph()
        size = (chance.randint(1, 10), chance.randint(1, 10))
        node = random_condition(chance, graph, size, 3)
        node = graph.call(aten.expand.default, node, [*graph.value(node).shape[:-2], *size])
        node = graph.bias(node) if chance.random() < 0.5 else node
        reading = assert_sound(graph, node)
        assert reading.mask is not None or (reading.reason is not None and reading.reason.code != "mask_not_evaluated")
        num_read += reading.mask is not None
    assert num_read > NUM_RANDOM // 20


def test_masks_of_fewer_dimensions() -> None:
    graph = MaskGraph()
    assert read_mask(graph.scalar(True, torch.bool), False, 3, 5).mask == Mask(MaskKind.NONE)
    keys = graph.call(aten.lt.Scalar, graph.positions(5, 0, rank=1), 4)
    assert read_mask(keys, False, 3, 5).mask == Mask(MaskKind.FULL, num_filled=4)
    queries = graph.call(aten.ge.Scalar, graph.positions(3, 0, rank=2), 0)
    assert read_mask(queries, False, 3, 5).mask == Mask(MaskKind.NONE)


@pytest.mark.parametrize("facts", [{}, {"window": 4096}, {"chunk": 8192}])
def test_long_masks_are_read_in_a_fraction_of_a_second(facts: dict[str, int]) -> None:
    """What transformers writes for 16384 tokens: two sequences, and the test for packed ones, which are not."""
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
