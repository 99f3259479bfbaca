"""Slots of `weave::expert_prefetch` by themselves: a made-up copy engine knows what follows what, and finds races."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.graphs.nonempty import some
from weaveopt.ops.experts.prefetch.ring import SLICE_BYTES, Copy, ExpertSource, Ring, pulled, slices
from weaveopt.ops.experts.prefetch.slots import MOST_CAPTURES, ModelSlots

FIRST = "first"
LAYERS = 6


@dataclass(eq=False)
class Node:
    """A pull, a kernel, or what joins some: in a graph, or enqueued."""

    kind: str
    memory: str = ""
    layer: int = -1
    before: tuple[Node, ...] = ()
    every: frozenset[Node] = field(default_factory=frozenset)
    """All that it follows."""

    def __post_init__(self) -> None:
        self.every = frozenset(each for node in self.before for each in (node, *node.every))

    def follows(self, other: Node) -> bool:
        return other in self.every


class MadeUpEngine:
    """Streams are numbers; those of `capturing` are part of a capture."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.last: dict[tuple[int, int], Node] = {}
        self.capturing: dict[int, int] = {}
        self.settled: list[Node] = []
        self.fails = False
        """Pulls leave a part of what they should."""
        self.broken: list[Node] = []
        self.captured: dict[Node, int] = {}

    def _add(self, stream: int, node: Node) -> Node:
        self.nodes.append(node)
        self.captured[node] = self.capture_of(stream)
        return node

    def _tail(self, stream: int) -> tuple[Node, ...]:
        found = self.last.get((stream, self.capture_of(stream)))
        return () if found is None else (found,)

    def capture_of(self, stream: int) -> int:
        return self.capturing.get(stream, 0)

    def mark(self, stream: int) -> Node:
        return self._add(stream, Node("mark", before=self._tail(stream)))

    def wait(self, stream: int, mark: Node) -> None:
        assert self.captured[mark] == self.capture_of(stream), "a mark of another capture"
        joined = self._add(stream, Node("join", before=(*self._tail(stream), mark)))
        self.last[stream, self.capture_of(stream)] = joined

    def pull(self, stream: int, copies: Sequence[Copy], after: Sequence[Node]) -> Node:
        assert all(self.captured[mark] == self.capture_of(stream) for mark in after), "a mark of another capture"
        [(memory, layer, _)] = copies
        before = (*after, *self.broken)  # copies that one stream has got follow one another
        made = self._add(stream, Node("pull", str(memory), -1 if self.fails else layer, before))
        if self.fails:
            self.broken.append(made)
            raise RuntimeError("no copy")
        return made

    def settle(self, marks: Sequence[Node]) -> None:
        assert all(self.captured[mark] == 0 for mark in marks), "the host cannot wait for a graph"
        self.settled += marks

    def kernel(self, stream: int, memory: str, layer: int) -> None:
        self.last[stream, self.capture_of(stream)] = self._add(
            stream, Node("kernel", memory, layer, self._tail(stream))
        )

    def pulls(self, capture: int = 0) -> list[int]:
        return [each.layer for each in self.nodes if each.kind == "pull" and self.captured[each] == capture]

    def expect_no_race(self) -> None:
        """Each kernel follows the pull of its layer, and each other pull into that memory is before or follows it."""
        kernels = [each for each in self.nodes if each.kind == "kernel" and each.memory != FIRST]
        assert kernels
        for kernel in kernels:
            pulls = [
                each
                for each in self.nodes
                if each.kind == "pull" and each.memory == kernel.memory and self.captured[each] == self.captured[kernel]
            ]
            before = [each for each in pulls if kernel.follows(each)]
            assert before, f"layer {kernel.layer} was not pulled"
            latest = max(before, key=self.nodes.index)
            assert latest.layer == kernel.layer, f"layer {kernel.layer} reads layer {latest.layer}"
            for each in pulls:
                ordered = each is latest or latest.follows(each) or each.follows(kernel)
                assert ordered, f"a pull of layer {each.layer} races with layer {kernel.layer}"


class Model:
    def __init__(self, engine: MadeUpEngine, name: str = "", layers: int = LAYERS, pairs: int = 9) -> None:
        self.engine, self.name, self.pairs, self.layers = engine, name, pairs, layers
        self.made = 0
        self.slots: ModelSlots[Node, str] = ModelSlots(engine, layers, FIRST, self._allocate, self._copies)

    def _allocate(self) -> tuple[str, str] | None:
        if self.made == self.pairs:
            return None
        self.made += 1
        return f"{self.name}{self.made}a", f"{self.name}{self.made}b"

    def _copies(self, layer: int, memory: str) -> list[Copy]:
        return [(memory, layer, 0)]  # type: ignore[list-item]

    def call(self, layer: int, stream: int = 1, last: bool = True, fails: bool = False) -> str | None:
        with self.slots.reading(layer, stream, last) as memory:
            assert (memory == FIRST) is (layer == 0)
            if memory is not None:
                self.engine.kernel(stream, memory, layer)
            if fails:
                raise ValueError("no memory for the result")
            return memory

    def forward(self, stream: int = 1) -> None:
        for layer in range(self.layers):
            self.call(layer, stream)


@pytest.fixture
def engine() -> MadeUpEngine:
    return MadeUpEngine()


def test_each_layer_is_pulled_once_in_a_forward_and_a_layer_ahead(engine: MadeUpEngine) -> None:
    model = Model(engine)
    for turn in range(1, 4):
        model.forward()
        assert engine.pulls() == [*range(1, LAYERS)] * turn
    engine.expect_no_race()
    kernels = [each for each in engine.nodes if each.kind == "kernel"]
    pulls = [each for each in engine.nodes if each.kind == "pull"]
    for turn in range(3):
        for layer in range(2, LAYERS):
            pull, before = pulls[turn * (LAYERS - 1) + layer - 1], kernels[turn * LAYERS + layer - 1]
            assert not pull.follows(before), f"the pull of layer {layer} waits for layer {layer - 1}"
    assert not engine.settled and model.made == 1


def test_the_first_layers_pull_waits_for_nothing_but_its_slot(engine: MadeUpEngine) -> None:
    model = Model(engine)
    model.forward()
    model.forward()
    second = [each for each in engine.nodes if each.kind == "pull" and each.layer == 1][1]
    assert {each.layer for each in second.every if each.kind == "kernel"} <= set(range(LAYERS - 1))


@pytest.mark.parametrize("marked", [True, False])
def test_half_batches(engine: MadeUpEngine, marked: bool) -> None:
    """Two halves of a batch take turns in each layer; calls that say which half is the last one pull once."""
    model = Model(engine)
    for _ in range(2):
        for layer in range(LAYERS):
            model.call(layer, 1, last=not marked)
            model.call(layer, 2)
    engine.expect_no_race()
    assert (len(engine.pulls()) == 2 * (LAYERS - 1)) is marked


def test_a_retried_call(engine: MadeUpEngine) -> None:
    model = Model(engine)
    model.forward()
    for layer in (0, 1, 2):
        model.call(layer)
    with pytest.raises(ValueError, match="no memory"):
        model.call(3, fails=True)
    for layer in range(3, LAYERS):
        model.call(layer)
    assert engine.pulls() == [*range(1, LAYERS)] * 2
    engine.expect_no_race()


def test_a_pull_that_fails_leaves_a_slot_that_holds_nothing(engine: MadeUpEngine) -> None:
    model = Model(engine)
    model.call(0)
    model.call(1)
    engine.fails = True
    with pytest.raises(RuntimeError, match="no copy"):
        model.call(5)
    engine.fails = False
    for layer in (2, 1, 3, 5, 1):
        model.call(layer)
    engine.expect_no_race()


@pytest.mark.parametrize("seed", range(40))
def test_any_order_on_any_stream(engine: MadeUpEngine, seed: int) -> None:
    chance = random.Random(seed)
    models = [Model(engine, "x"), Model(engine, "y", layers=3)]
    for step in range(120):
        model = chance.choice(models)
        for stream in (1, 2, 3):
            # Two streams are captured from time to time, together or apart.
            if chance.random() < 0.05:
                engine.capturing = (
                    {1: 0, 2: 0, 3: 0} if engine.capture_of(stream) else {stream: 100 + step, 3: 100 + step}
                )
        with contextlib.suppress(ValueError):
            model.call(
                chance.randrange(model.layers), chance.choice((1, 2, 3)), chance.random() < 0.7, chance.random() < 0.1
            )
    engine.expect_no_race()


def test_captures_have_slots_of_their_own_and_begin_with_none_held(engine: MadeUpEngine) -> None:
    """The first capture takes the slots of the warm-up, once that is done; each later one refetches."""
    model = Model(engine)
    model.forward(1)
    used = {each.memory for each in engine.nodes if each.kind == "kernel"} - {FIRST}
    assert not engine.settled
    for capture in (7, 8):
        engine.capturing = {1: capture}
        model.forward(1)
        assert engine.pulls(capture) == [*range(1, LAYERS)]
        roots = [each for each in engine.nodes if each.kind == "pull" and engine.captured[each] == capture]
        assert not roots[0].every, "the first pull of a graph waits for nothing"
        engine.capturing = {}
        model.forward(1)
    assert {each.memory for each in engine.nodes if each.kind == "kernel" and engine.captured[each]} == used | {FIRST}
    again = {each.memory for each in engine.nodes[-40:] if each.kind == "kernel" and not engine.captured[each]}
    assert not again & used and model.made == 2 and engine.settled
    engine.expect_no_race()


def test_a_graph_that_is_cut_anywhere(engine: MadeUpEngine) -> None:
    """Each piece is a capture; none relies on what another one pulled."""
    model = Model(engine)
    model.forward()
    for cut in range(1, LAYERS):
        for piece, layers in enumerate((range(cut), range(cut, LAYERS))):
            engine.capturing = {1: 10 * cut + piece + 1}
            for layer in layers:
                model.call(layer)
            assert set(layers) - {0} <= set(engine.pulls(10 * cut + piece + 1))
    engine.expect_no_race()


def test_a_capture_without_a_call_before_reads_in_place(engine: MadeUpEngine) -> None:
    model = Model(engine)
    engine.capturing = {1: 5}
    assert [model.call(layer) for layer in range(3)] == [FIRST, None, None]
    assert not engine.pulls(5)


def test_without_memory_experts_are_read_in_place(engine: MadeUpEngine) -> None:
    model = Model(engine, pairs=1)
    model.forward()
    engine.capturing = {1: 3}
    model.forward()
    engine.capturing = {}
    assert [model.call(layer) for layer in range(3)] == [FIRST, None, None]
    engine.expect_no_race()


def test_nothing_grows(engine: MadeUpEngine) -> None:
    model = Model(engine)
    model.forward()
    for capture in range(1, 3 * MOST_CAPTURES):
        engine.capturing = {1: capture}
        model.call(1)
    assert len(model.slots._captures) == MOST_CAPTURES


def test_closing_waits_for_pulls_that_nobody_reads(engine: MadeUpEngine) -> None:
    model = Model(engine)
    model.call(0)
    model.slots.close()
    assert {each.layer for each in engine.settled if each.kind == "pull"} == {1, 2}


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranges_and_copies_are_all_experts_once(world: int) -> None:
    """Kernels find each expert at its id, whatever is cached."""
    experts, size = 4, 16
    for rank in some(range(world)):
        for cached in some((0, 1, experts, (world - 1) * experts // 2, (world - 1) * experts)):
            ring = Ring(world, rank, experts, cached)
            peers = [10**6 * (each + 1) for each in range(world)]
            held = {ExpertSource.OWN: [rank * experts + each for each in range(experts)]}
            for source_of, first, end in (
                (ExpertSource.CACHED, 0, cached),
                (ExpertSource.FETCHED, cached, ring.missing),
            ):
                found = {}
                for to, source, num_bytes in pulled(ring, first, end, peers, size, 0):
                    owner, offset = divmod(source, 10**6)
                    for at in range(num_bytes // size):
                        found[to // size + at] = (owner - 1) * experts + offset // size + at
                assert sorted(found) == list(range(end - first))
                held[source_of] = [found[each] for each in range(end - first)]
                if source_of is ExpertSource.FETCHED and cached == 0:
                    assert found[0] == (rank + 1) % world * experts, "the next rank comes first"
            every = [id for each in ring.ranges() for id in held[each.source][each.first : each.first + each.count]]
            assert every == list(range(world * experts)) and len(ring.ranges()) <= 4


def test_several_peers_are_pulled_from_in_turns() -> None:
    size = 20 << 20
    two = pulled(Ring(2, 0, 4), 0, 4, [0, 1 << 40], size, 0)
    assert two == [(0, 1 << 40, 4 * size)], "one copy a weight"
    three = pulled(Ring(3, 1, 4), 0, 8, [1 << 40, 2 << 40, 3 << 40], size, 0)
    assert [source >> 40 for _, source, _ in three[:4]] == [3, 1, 3, 1]
    assert all(num_bytes >= SLICE_BYTES for _, _, num_bytes in three) and len(three) == 20
    assert sum(num_bytes for _, _, num_bytes in three) == 8 * size
    assert list(slices(0, 64, 100)) == [(0, 64, 100)]
