"""Why tokens are not split: each reason once, from the graphs that give it; none of them builds a graph in vain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from tests.graphs import forms
from tests.graphs.capturing import captured, context_of
from tests.ranks.simulated import equal_ranks
from weaveopt.config import Config
from weaveopt.cost_model.machine import Contention, ContentionRow
from weaveopt.records.task import Stream
from weaveopt.rewrites.token_split import TokenSplit
from weaveopt.rule import CapturedGraph, Context, Exposure, GraphWork

WORLD, VOCABULARY, HIDDEN, BATCH, LENGTH = 2, 32, 16, 1, 8
HEAD = 8


def local(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight)


def mixed(x: Tensor, weight: Tensor) -> Tensor:
    """Every token needs a number of all tokens, which is in no table."""
    return torch.relu(x @ weight) * torch.linalg.vector_norm(x)


def unmasked(x: Tensor, weight: Tensor) -> Tensor:
    """Attention of every token to every other one."""
    heads = (x @ weight).unflatten(-1, (-1, HEAD)).transpose(1, 2)
    keys, values = heads * 2.0, heads * 3.0
    return torch.nn.functional.scaled_dot_product_attention(heads, keys, values).transpose(1, 2).flatten(-2)


def latent(x: Tensor, weight: Tensor, cache: Tensor) -> Tensor:
    """Keys computed from a cache of latents, which grows by what is known of the tokens."""
    heads = (x @ weight).unflatten(-1, (-1, HEAD)).transpose(1, 2)
    keys = torch.cat([cache, heads], 2).flip(-1) * 2.0
    length = x.shape[1]
    places = torch.arange(cache.shape[2] + length)
    mask = places[None, :] <= (torch.arange(length) + cache.shape[2])[:, None]
    return torch.nn.functional.scaled_dot_product_attention(heads, keys, keys, mask).transpose(1, 2).flatten(-2)


def counted(step: int) -> Callable[..., Tensor]:
    """Attention over a static cache that counts its own tokens; the mask is made from another layer's count, which
    grows by `LENGTH + step`."""

    def layer(x: Tensor, weight: Tensor, cache: Tensor, count: Tensor, other: Tensor) -> Tensor:
        heads = (x @ weight).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        places = torch.arange(LENGTH)
        keys = cache.index_copy_(2, count + places, heads)
        mask = torch.arange(cache.shape[2])[None, :] <= (other + places)[:, None]
        found = torch.nn.functional.scaled_dot_product_attention(heads, keys, keys, mask)
        count.add_(LENGTH)
        other.add_(LENGTH + step)
        return found.transpose(1, 2).flatten(-2)

    return layer


def model(layer: Callable[..., Tensor], num_layers: int = 3) -> Callable[..., Tensor]:
    def run(ids: Tensor, table: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
        x = forms.all_reduce(torch.nn.functional.embedding(ids, table))
        for _ in range(num_layers):
            x = x + forms.all_reduce(layer(x, weight, *others))
        return x

    return run


def graph_of(
    layer: Callable[..., Tensor] = local, length: int = LENGTH, *others: Tensor, num_layers: int = 3
) -> CapturedGraph:
    ids = torch.zeros(BATCH, length, dtype=torch.int64)
    with equal_ranks(WORLD), torch.no_grad():
        [graph] = captured(
            model(layer, num_layers), ids, torch.zeros(VOCABULARY, HIDDEN), torch.zeros(HIDDEN, HIDDEN), *others
        )
    return graph


def context(graph: CapturedGraph, *, forced: bool = False, contention: float | None = None) -> Context:
    found = context_of(graph.groups, WORLD)
    machine = found.machine
    if contention is not None:
        measured = Contention(machine.origins[0][0], (ContentionRow(1, contention, contention),), library_ctas=1)
        machine = replace(machine, contention=measured)
    return replace(found, machine=machine, config=Config(force=("token_split",) if forced else ()))


def exposure(graph: CapturedGraph, gemm_us: float, exchange_us: float, ctas: int = 1, fixed: bool = False) -> Exposure:
    """All-reduces of one length after GEMMs of one; with `fixed` a GEMM takes as long for any number of tokens."""

    def share(us: float, is_fixed: bool) -> Callable[[float], float]:
        return lambda ratio: us if is_fixed else us * ratio

    work = []
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.mm.default:
            work.append(GraphWork(node, Stream.COMPUTE, share(gemm_us, fixed)))
        elif node.target is torch.ops._c10d_functional.all_reduce.default:
            work.append(GraphWork(node, Stream.COMMUNICATION, share(exchange_us, False), ctas))
    assert len(work) == 7, "an embedding and three layers"
    exposed_us = 4 * exchange_us
    return Exposure({graph.groups[0]: exposed_us}, exposed_us + 3 * gemm_us, tuple(work))


def codes(graph: CapturedGraph, shown: Exposure, known: Context, rule: TokenSplit = TokenSplit()) -> list[str]:  # noqa: B008
    return [each.code for variant in rule.variants(graph, shown, known) for each in variant.rejections]


def test_exchanges_as_long_as_computation_are_split() -> None:
    """The cut, the form and the order are in the variant, whose graph is another one."""
    graph = graph_of()
    [variant] = TokenSplit().variants(graph, exposure(graph, 1000.0, 1000.0), context(graph, contention=1.0))
    assert variant.rejections == () and variant.graph is not graph.graph
    assert dict(variant.parameters)["form"] == "library"
    assert str(dict(variant.parameters)["cut"]).startswith("sequence: ")
    assert len(variant.order.pairs) >= 7


def test_nothing_exposed() -> None:
    graph = graph_of()
    known = context(graph, contention=1.0)
    assert codes(graph, Exposure({}, 100.0), known) == ["nothing_exposed"]
    assert codes(graph, exposure(graph, 1000.0, 1.0), known) == ["nothing_exposed"]


def test_not_priced() -> None:
    graph = graph_of()
    assert codes(graph, Exposure({graph.groups[0]: 10.0}), context(graph)) == ["not_priced"]


def test_no_saving() -> None:
    """GEMMs that are bound by their weights take as long for half of the tokens."""
    graph = graph_of()
    shown = exposure(graph, 1000.0, 900.0, fixed=True)
    assert codes(graph, shown, context(graph, contention=1.0)) == ["no_saving"]


def test_not_measured() -> None:
    """Without contention in the profile the parts could as well run one after the other."""
    graph = graph_of()
    shown = exposure(graph, 1000.0, 1000.0)
    assert codes(graph, shown, context(graph)) == ["not_measured"]
    assert codes(graph, shown, context(graph, contention=1.9)) == ["no_saving"], "measured, and it does not pay"


def test_symbolic_tokens() -> None:
    """A graph that serves many lengths is cut where the rule is forced alone."""
    inputs = torch.zeros(BATCH, LENGTH, dtype=torch.int64), torch.zeros(VOCABULARY, HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    with equal_ranks(WORLD), torch.no_grad():
        [graph] = captured(model(local), *inputs, dynamic=True)
    shown = exposure(graph, 1000.0, 1000.0)
    assert codes(graph, shown, context(graph, contention=1.0)) == ["symbolic_tokens"]
    assert codes(graph, shown, context(graph, contention=1.0, forced=True)) == []


def test_few_tokens() -> None:
    graph = graph_of(local, 1)
    assert codes(graph, exposure(graph, 1000.0, 1000.0), context(graph, contention=1.0)) == ["few_tokens"]


def test_no_token_axis() -> None:
    """Rows `[tokens, hidden]` come from no ids and no embeddings `[batch, length, hidden]`."""
    with equal_ranks(WORLD), torch.no_grad():
        [graph] = captured(
            lambda x, weight: forms.all_reduce(x @ weight), torch.zeros(LENGTH, HIDDEN), torch.zeros(HIDDEN, HIDDEN)
        )
    shown = Exposure({graph.groups[0]: 1000.0}, 1000.0)
    assert codes(graph, shown, context(graph, contention=1.0)) == ["no_token_axis"]


def dropped(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight) * torch.rand_like(x) + torch.rand(LENGTH, 1)


@pytest.mark.parametrize("from_generator", [False, True])
def test_random_order(from_generator: bool) -> None:
    """Inductor draws by seeds, in any order, unless it is told to draw as eager does."""
    with inductor_config.patch(fallback_random=from_generator):
        graph = graph_of(dropped)
    found = codes(graph, exposure(graph, 1000.0, 1000.0), context(graph, forced=True))
    assert found == (["random_order"] if from_generator else [])


def test_saved_for_backward() -> None:
    graph = replace(graph_of(), phase="forward")
    assert codes(graph, exposure(graph, 1000.0, 1000.0), context(graph, forced=True)) == ["saved_for_backward"]


@pytest.mark.parametrize(
    ("layer", "others", "code"),
    [
        (mixed, (), "barrier"),
        (unmasked, (), "mask_not_proven"),
        (latent, (torch.zeros(BATCH, HIDDEN // HEAD, 3, HEAD),), "cache_form_not_known"),
    ],
    ids=["barrier", "mask_not_proven", "cache_form_not_known"],
)
def test_parts_that_need_one_another(layer: Callable[..., Tensor], others: tuple[Tensor, ...], code: str) -> None:
    """Also where the rule is forced: the graph runs as it was captured. The reason names the node."""
    graph = graph_of(layer, LENGTH, *others)
    shown = exposure(graph, 1000.0, 1000.0)
    [variant] = TokenSplit().variants(graph, shown, context(graph, forced=True))
    assert [each.code for each in variant.rejections] == [code] and variant.graph is graph.graph
    values = dict(variant.rejections[0].values)
    assert values["node"] in {node.name for node in graph.graph.nodes} and not math.isnan(float(values["waiting"] or 0))


@pytest.mark.parametrize(("step", "found"), [(0, []), (1, ["cache_form_not_known"])], ids=["alike", "unlike"])
def test_counters_of_a_static_cache(step: int, found: list[str]) -> None:
    """Counters of two layers are taken as equal only where the graph advances both by the same number."""
    counters = torch.tensor([3]), torch.tensor([3])
    graph = graph_of(counted(step), LENGTH, torch.zeros(BATCH, HIDDEN // HEAD, 32, HEAD), *counters, num_layers=1)
    rule = TokenSplit(axes=("sequence",))
    assert codes(graph, Exposure({graph.groups[0]: 1.0}), context(graph, forced=True), rule) == found
