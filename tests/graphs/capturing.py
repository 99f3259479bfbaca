"""Graphs as the backend sees them, and their sequence-parallel sites: fake ranks, no kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.fx as fx

from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.fabrics import topology
from weaveopt.inductor import seams
from weaveopt.pipeline.capture import capture
from weaveopt.rule import CapturedGraph, Context, FoundSite
from weaveopt.sites import SEQUENCE_PARALLEL
from weaveopt.sites.sequence.gather_consumers import Gathered
from weaveopt.sites.sequence.gather_matcher import GatherFacts
from weaveopt.sites.sequence.scatter_epilogue import Scattered
from weaveopt.sites.sequence.scatter_matcher import ScatterFacts


def recording(graphs: list[CapturedGraph]) -> Callable[..., object]:
    """A dynamo backend that keeps every graph, and whose results are zeros."""

    def inner_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        graphs.append(capture(module, f"g{len(graphs)}", seams.GraphPass.of(arguments), inputs))
        outputs = module.graph.output_node().args[0]
        values = fx.map_arg(outputs, lambda node: node.meta["val"])

        def returns_zeros(arguments: list[object]) -> object:
            arguments.clear()
            return [torch.zeros_like(value, device="cpu") if _is_plain(value) else value for value in values]

        returns_zeros._boxed_call = True  # type: ignore[attr-defined]
        return returns_zeros

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> object:
        return seams.compile_with(inner_compile, graph_module, example_inputs)

    return backend


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def captured(fn: Callable[..., object], *inputs: object, dynamic: bool = False) -> list[CapturedGraph]:
    """The graphs of one call of `fn`: the only one, or forward and backward where its results need gradients."""
    torch._dynamo.reset()
    graphs: list[CapturedGraph] = []
    result = torch.compile(fn, backend=recording(graphs), fullgraph=True, dynamic=dynamic)(*inputs)
    results = result if isinstance(result, tuple) else (result,)
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in results):
        sum(each.float().sum() for each in results).backward()
    return graphs


def context_of(groups: Sequence[str], world: int) -> Context:
    return Context(Config(), cost_model.load("cpu"), {group: topology.fake(world) for group in groups})


def sites_in(graph: CapturedGraph, world: int) -> list[FoundSite]:
    """Gathers, then scatters, each in graph order."""
    context = context_of(graph.groups, world)
    return [found for matcher in SEQUENCE_PARALLEL for found in matcher.find(graph.graph, context)]


def scatters(found: Sequence[FoundSite]) -> list[ScatterFacts]:
    return [each.facts for each in found if isinstance(each.facts, ScatterFacts)]


def gathers(found: Sequence[FoundSite]) -> list[GatherFacts]:
    return [each.facts for each in found if isinstance(each.facts, GatherFacts)]


def scattered(found: FoundSite) -> Scattered:
    assert isinstance(found.structure, Scattered), found.site.rejections
    return found.structure


def gathered(found: FoundSite) -> Gathered:
    assert isinstance(found.structure, Gathered), found.site.rejections
    return found.structure


def codes(found: FoundSite) -> list[str]:
    """Why a site may not be rewritten; such a site has no facts."""
    assert (found.facts is None) == bool(found.site.rejections), found
    return [each.code for each in found.site.rejections]
