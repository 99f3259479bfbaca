"""The order of a graph's communication: placed in the graph, kept through Inductor, read back from what it wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.fx as fx
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.pattern_matcher import stable_topological_sort

from tests.graphs.tolerances import KERNEL, assert_close
from tests.ranks import run_ranks
from weaveopt.errors import OrderError
from weaveopt.inductor import seams
from weaveopt.inductor.order import keeping
from weaveopt.ops.collective_wait.place import place
from weaveopt.records.order import ANY_ORDER, CODE, Order, order_kept

HIDDEN = 64
ROWS = 32
LAYERS = 2
COLLECTIVE = torch.ops._c10d_functional.all_reduce.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
STARTS = tuple("all_reduce" + (f"_{n}" if n else "") for n in range(2 * LAYERS))
WAITS = tuple("wait_tensor" + (f"_{n}" if n else "") for n in range(2 * LAYERS))
ORDER = Order(tuple(zip(WAITS, STARTS[1:], strict=False)))
"""Every wait comes after the start of the other half's next collective."""
Weights = list[tuple[Tensor, Tensor, Tensor]]


def make_weights() -> Weights:
    random = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) / shape[0] ** 0.5

    return [(weight(HIDDEN, HIDDEN), weight(HIDDEN, HIDDEN), weight(HIDDEN)) for _ in range(LAYERS)]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def halves(weights: Weights, x: Tensor) -> Tensor:
    """A stack of GEMMs and all-reduces on two equal halves of the rows, in turns."""
    sums = list(x.chunk(2))
    pending: list[Tensor | None] = [None, None]
    for up, down, weight in weights:
        for half in (0, 1):
            before = pending[half]
            if before is not None:
                sums[half] = sums[half] + before
            partial = torch.relu(norm(sums[half], weight) @ up) @ down
            pending[half] = functional.all_reduce(partial, "sum", dist.group.WORLD)
    return torch.cat([total + last for total, last in zip(sums, pending, strict=True)])


def sink_waits(graph: fx.Graph) -> None:
    """Move every wait to just before its first reader, and after the next start, as in a graph of two halves."""
    starts = [node for node in graph.nodes if node.target is COLLECTIVE]
    waits = [next(iter(start.users)) for start in starts]
    assert tuple(node.name for node in starts) == STARTS
    assert tuple(node.name for node in waits) == WAITS
    for wait, following in zip(waits, [*starts[1:], None], strict=True):
        min(wait.users).prepend(wait)
        if following is not None and wait < following:
            following.append(wait)
    stable_topological_sort(graph)
    graph.lint()


@dataclass
class Compiling:
    """A backend that gives Inductor the graph of two halves."""

    prepare: Callable[[fx.Graph], Order]
    """Edits the graph and returns the order that is asked of Inductor."""
    written: list[list[str]] = field(default_factory=list)
    errors: list[OrderError] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[object]) -> object:
        return seams.compile_with(self.inner, module, inputs)

    def inner(self, module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        sink_waits(module.graph)
        captured = fx.GraphModule(module, _copy(module.graph))
        order = self.prepare(module.graph)
        module.recompile()
        with keeping(ANY_ORDER) as written:
            try:
                return seams.compile_graph(module, inputs, arguments, order=order)
            except OrderError as error:
                self.errors.append(error)
                return seams.compile_graph(captured, inputs, arguments)
            finally:
                self.written.append(written)


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    output, old = copied.graph_copy(graph, {}, return_output_node=True)  # type: ignore[misc]
    copied.output(output).meta.update(old.meta)
    copied._codegen = graph._codegen
    return copied


def placed(graph: fx.Graph) -> Order:
    return place(graph, ORDER)


def unplaced(graph: fx.Graph) -> Order:
    """As if the pass were defeated: the order is asked for, and nothing in the graph keeps it."""
    return ORDER


def unordered(graph: fx.Graph) -> Order:
    return ANY_ORDER


def run(rank: int, prepare: Callable[[fx.Graph], Order], times: int = 1) -> tuple[list[list[str]], list[str]]:
    """Communication in the order of the code that Inductor wrote, of each compile; the codes of its rejections."""
    weights = make_weights()
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(rank))
    dist.broadcast(x, 0)
    backend = Compiling(prepare)
    with torch.no_grad():
        expected = halves(weights, x)
        for _ in range(times):
            torch._dynamo.reset()
            found = torch.compile(lambda x: halves(weights, x), backend=backend, fullgraph=True)(x)
            assert_close(found, expected, KERNEL)
    names = [
        [name for name in each if name.startswith(("all_reduce", "wait", "collective"))] for each in backend.written
    ]
    assert all(error.rejection.message == str(error) for error in backend.errors)
    return names, [error.rejection.code for error in backend.errors]


def in_turns(names: Sequence[str]) -> bool:
    """True if every start but the first comes right before the other half's wait."""
    kinds = ["start" if name.startswith("all_reduce") else "wait" for name in names]
    return kinds == ["start", *["start", "wait"] * (2 * LAYERS - 1), "wait"]


def run_uncached(rank: int, prepare: Callable[[fx.Graph], Order]) -> tuple[list[list[str]], list[str]]:
    with torch._inductor.config.patch(force_disable_caches=True):
        return run(rank, prepare)


def test_without_the_record_equal_halves_lose_their_order() -> None:
    """Inductor fuses the halves' norms, which then need both sums: the record is what keeps the order."""
    for names, _ in run_ranks(run_uncached, 2, unordered):
        assert sorted(names[0]) == sorted((*STARTS, *WAITS))
        assert not in_turns(names[0]), names


def run_defeated(rank: int, directory: str) -> list[str]:
    """Inductor's cache is on: a compile that was refused must not be found in it."""
    with torch._inductor.config.patch(fx_graph_cache=True), torch._inductor.utils.fresh_cache(dir=directory):
        return run(rank, unplaced, times=2)[1]


def test_a_lost_order_is_seen_each_time() -> None:
    """The graph without the order ran in its place, with the same result."""
    assert run_ranks(run_defeated, 2, None) == [[CODE, CODE]] * 2


def run_cached(rank: int) -> tuple[list[list[str]], int]:
    with torch._inductor.config.patch(fx_graph_cache=True), torch._inductor.utils.fresh_cache():
        counters.clear()
        names, codes = run(rank, placed, times=2)
        assert not codes
        return names, counters["inductor"]["fxgraph_cache_hit"]


def test_the_order_is_kept_and_that_of_a_compiled_graph_from_the_cache_was() -> None:
    """The first compile finds nothing in the cache."""
    for names, hits in run_ranks(run_cached, 2):
        assert hits == 1
        assert in_turns(names[0]) and not names[1]


def test_the_record_names_what_is_missing() -> None:
    order = Order((("wait_a", "start_b"), ("wait_b", "start_c")))
    assert order.waits == ("wait_a", "wait_b") and order.starts_before("wait_b") == ("start_c",)
    assert order_kept(order, ["start_a", "start_b", "wait_a", "start_c", "wait_b"]) is None
    assert order_kept(ANY_ORDER, []) is None
    twice = ["start_b", "wait_a", "start_c", "wait_b"] * 2
    assert order_kept(order, twice) is None
    late = order_kept(order, ["start_b", "wait_a", "wait_b", "start_c"])
    assert late is not None and late.code == CODE
    assert late.values == (("wait", "wait_b"), ("start", "start_c"))
    lost = order_kept(order, ["start_b", "wait_a", "wait_b"])
    assert lost is not None and "no call of start_c" in lost.message
    once = order_kept(order, [*twice[:4], "wait_a", "start_b", "start_c", "wait_b"])
    assert once is not None and once.values[0] == ("wait", "wait_a")
    assert order.within({"wait_a": 0, "start_b": 0, "wait_b": 0}) == Order((("wait_a", "start_b"),))


def graph_of_two() -> fx.Graph:
    graph = fx.Graph()
    values = [graph.placeholder(name) for name in ("a", "b")]
    starts = [
        graph.create_node("call_function", COLLECTIVE, (value, "sum", "0"), name=name)
        for value, name in zip(values, STARTS, strict=False)
    ]
    waits = [
        graph.create_node("call_function", WAIT, (start,), name=name)
        for start, name in zip(starts, WAITS, strict=False)
    ]
    graph.output(tuple(waits))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, device="meta")
    return graph


def test_pairs_of_removed_nodes_are_gone() -> None:
    graph = graph_of_two()
    order = place(graph, Order((("wait_tensor", "all_reduce_1"), ("wait_tensor_1", "all_reduce_7"))))
    assert order == Order((("collective_wait_default", "all_reduce_1"),))
    found = [node for node in graph.nodes if node.target is torch.ops.weave.collective_wait.default]
    assert [[argument.name for argument in node.args[1]] for node in found] == [["all_reduce_1"]]
    graph.lint()


def test_a_start_after_its_wait_is_a_broken_invariant() -> None:
    graph = graph_of_two()
    start, wait = (next(node for node in graph.nodes if node.name == name) for name in ("all_reduce_1", "wait_tensor"))
    start.prepend(wait)
    with pytest.raises(AssertionError, match="all_reduce_1"):
        place(graph, Order((("wait_tensor", "all_reduce_1"),)))
