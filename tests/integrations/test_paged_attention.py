"""`causal_attention` in steps of continuous batching: each request reads its own rows, and the mask is not read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.fx as fx
from functorch.compile import make_boxed_func
from transformers import PreTrainedModel

import weaveopt
from tests.graphs.batching import batching, compiled, prompts, tokens
from tests.graphs.generating import build
from tests.graphs.nonempty import some
from weaveopt.inductor import seams
from weaveopt.rewrites.causal_attention import candidates

FORCED: dict[str, object] = {"strict": True, "force": ["causal_attention"]}
MODELS: dict[str, dict[str, object]] = {
    "llama": {"num_hidden_layers": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"num_hidden_layers": 2},
}
"""Full attention; both kinds of cache in one memory; attention with sinks that the model writes out."""


def graphs_of(run: Callable[[], list[list[int]]]) -> tuple[list[list[int]], list[fx.Graph]]:
    """Tokens of a run whose graphs are not compiled any further, and those graphs."""
    graphs: list[fx.Graph] = []

    def keep(module: fx.GraphModule, *_: object, **__: object) -> Callable[..., object]:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    with mock.patch.object(seams, "compile_graph", keep):
        return run(), graphs


def variants(model: PreTrainedModel) -> set[str]:
    report = weaveopt.report(model)
    assert report.breaks == () and report.graphs
    return {each.chosen.variant for graph in report.graphs for each in graph.decisions if each.site.kind == "attention"}


def called(graphs: Sequence[fx.Graph], name: str) -> int:
    return sum(name in str(node.args[:1]) for graph in graphs for node in graph.nodes if "functionalized" in node.name)


@pytest.mark.parametrize("family", MODELS)
def test_requests_read_their_own_rows(family: str) -> None:
    model = build(family, **MODELS[family])  # type: ignore[arg-type]
    inputs = prompts(4)
    eager = tokens(model, inputs, batching(), new=8)
    # Models this small pay for operators, not for scores.
    with mock.patch.object(candidates, "PAGED_OPERATORS", 0):
        found, graphs = graphs_of(lambda: tokens(model, inputs, compiled(FORCED), new=8))
    assert found == eager and variants(model) == {"paged"}
    assert called(graphs, "paged_attention") == model.config.num_hidden_layers * len(graphs)
    assert called(graphs, "paged_kv_update") == 0
    for graph in some(graphs):
        # One finds the rows of full attention; a mask takes two more.
        assert sum("searchsorted" in str(node.target) for node in some(graph.nodes)) <= 1, "the mask is made"


def test_another_mask_is_left() -> None:
    """A model that changes the mask of its layers: nothing is known of what it hides then."""
    model = build("llama", num_hidden_layers=1)
    inputs = prompts(3)
    attention = model.model.layers[0].self_attn
    own = attention.forward

    def changed(*args: object, attention_mask: torch.Tensor, **kwargs: object) -> object:
        return own(*args, attention_mask=attention_mask * 1.5, **kwargs)

    attention.forward = changed
    eager = tokens(model, inputs, batching())
    found, graphs = graphs_of(lambda: tokens(model, inputs, compiled(FORCED)))
    assert found == eager and variants(model) == {""}
    assert called(graphs, "paged_kv_update") == len(graphs)
    sites = [each.site for each in weaveopt.report(model).graphs[0].decisions if each.site.kind == "attention"]
    assert [each.code for each in sites[0].rejections][1:] == ["not_the_layers_mask"]


def test_price_decides() -> None:
    """One request has nothing to gain from reading its own rows alone."""
    model = build("llama", num_hidden_layers=1)
    graphs_of(lambda: tokens(model, prompts(1), compiled({"strict": True}), new=3))
    assert "paged" not in variants(model)
