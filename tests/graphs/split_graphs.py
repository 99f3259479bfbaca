"""Graphs of models split by tokens, and run along with the graphs as they were: equal ranks, no code generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx as fx
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from tests.graphs.capturing import context_of
from tests.graphs.models import VOCABULARY
from weaveopt.inductor import seams
from weaveopt.integrations.transformers.cache_argument import with_cache
from weaveopt.pipeline.capture import capture
from weaveopt.rewrites.token_split.axis import token_axes
from weaveopt.rewrites.token_split.split import SplitGraph, split
from weaveopt.rewrites.token_split.values import Cut, fraction
from weaveopt.rule import Context, FoundSite
from weaveopt.sites.attention.matcher import AttentionMatcher
from weaveopt.sites.mixture.matcher import MixtureMatcher

BATCH, LENGTH, CACHED, WORLD = 3, 11, 32, 2
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Compared:
    """A split graph, and where its results differ from those of the graph that was captured."""

    axis: str
    num_parts: int
    made: SplitGraph
    sites: tuple[FoundSite, ...]
    """Attention and mixtures of the split graph."""
    before: tuple[FoundSite, ...]
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """A call of a model."""

    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def call_of(model: PreTrainedModel, kind: str) -> Call:
    """`none`, `grown`, `static`, `padded`, `packed` or `last`: the cache, the mask, or which logits are asked for."""
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    if kind in ("grown", "static"):
        growing = kind == "grown"
        cache = DynamicCache(config=model.config) if growing else StaticCache(model.config, max_cache_len=CACHED)
        model(input_ids=ids[:, :4], use_cache=True, **with_cache(cache))
        return Call(lambda x: model(input_ids=x, use_cache=True, **with_cache(cache)).logits, (ids,))
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        return Call(lambda x, m: model(input_ids=x, attention_mask=m, use_cache=False).logits, (ids, mask))
    if kind == "packed":
        positions = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)])[None].repeat(BATCH, 1)
        return Call(lambda x, p: model(input_ids=x, position_ids=p, use_cache=False).logits, (ids, positions))
    if kind == "last":
        return Call(lambda x: model(input_ids=x, use_cache=False, logits_to_keep=1).logits, (ids,))
    assert kind == "none", kind
    return Call(lambda x: model(input_ids=x, use_cache=False).logits, (ids,))


def compared(call: Call, num_parts: Sequence[int] = (2,), dynamic: bool = False) -> list[Compared]:
    """Every axis of the call's graph in so many parts."""
    found: list[Compared] = []
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(call.run, backend=_comparing(found, num_parts), fullgraph=True, dynamic=dynamic)(*call.inputs)
    return found


def cut_evenly(axis_name: str, length: object, num_parts: int) -> Cut:
    bounds = [fraction(length, part, num_parts) for part in range(num_parts)]  # type: ignore[arg-type]
    return Cut(axis_name, (*bounds, length))  # type: ignore[arg-type]


def sites_of(graph: fx.Graph, context: Context) -> tuple[FoundSite, ...]:
    return (*AttentionMatcher().find(graph, context), *MixtureMatcher().find(graph, context))


def _comparing(found: list[Compared], num_parts: Sequence[int]) -> Callable[..., object]:
    def inner_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        captured = capture(module, "g", seams.GraphPass.of(arguments), inputs)
        context = context_of(captured.groups, WORLD)
        before = sites_of(captured.graph, context)
        for axis in token_axes(captured.graph):
            for num in num_parts:
                if axis.hint >= num:
                    made = split(captured.graph, cut_evenly(axis.name, axis.length, num), axis.seeds, before)
                    found.append(Compared(axis.name, num, made, sites_of(made.graph, context), before))
        whole = fx.GraphModule(module, captured.graph)

        def run(arguments: list[object]) -> object:
            original = _copied(arguments)
            wanted = whole(*original)
            for each in found:
                own = _copied(arguments)
                got = fx.GraphModule(module, each.made.graph)(*own)
                each.differences.extend(_differences([*wanted, *original], [*got, *own]))
            arguments.clear()
            return wanted

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> object:
        return seams.compile_with(inner_compile, graph_module, example_inputs)

    return backend


def _copied(arguments: Sequence[object]) -> list[object]:
    return [each.clone() if isinstance(each, Tensor) else each for each in arguments]


def _differences(wanted: Sequence[object], got: Sequence[object]) -> list[str]:
    """Results, and inputs that the graph changed, that are not those of the other graph."""
    problems = []
    for index, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                problems.append(f"{index}: {tuple(b.shape)} {b.dtype} in place of {tuple(a.shape)} {a.dtype}")
            elif not torch.allclose(a.float(), b.float(), rtol=TOLERANCE, atol=TOLERANCE):
                problems.append(f"{index}: differs by {(a.float() - b.float()).abs().max():.2e}")
    return problems
