"""Matcher of the kind `projections`: GEMMs of one input by weights of their own.

    q, k, v = x @ wq^T + bq, x @ wk^T + bk, x @ wv^T + bv         # biases: all of them, or none
    gate, up = x @ w_gate^T, x @ w_up^T

Weights are inputs of the graph as linear layers keep them, [n, k] by rows. GEMMs of gathered rows are part of their
all-gather's site. CPU ranks have no such sites: their GEMMs take no longer to start than to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.graph.facts import DTYPE_NAMES, count_tokens, module_of
from weaveopt.graph.pattern import is_call, skip_shapes, tensor_of
from weaveopt.graph.values import tensors_of
from weaveopt.records.candidate import Rejection, Values
from weaveopt.records.site import Site, TokenCounts
from weaveopt.rule import Context, FoundSite
from weaveopt.sites.shared.epilogue import WAIT
from weaveopt.sites.shared.linear import MatchedGemm, gemm_at

KIND = "projections"
TRAINING = ("forward", "backward")
"""Phases of a training step: their weights are read by GEMMs of both passes."""


@dataclass(frozen=True)
class ProjectionFacts:
    """The GEMMs of a site."""

    k: int
    widths: tuple[int, ...]
    """Columns of each GEMM."""
    dtype: str
    has_bias: bool

    def values(self) -> Values:
        columns = " + ".join(map(str, self.widths))
        return (("k", self.k), ("columns", columns), ("dtype", self.dtype), ("has_bias", self.has_bias))


@dataclass(frozen=True)
class Projections:
    """The nodes of a site by their role."""

    gemms: tuple[MatchedGemm, ...]
    weights: tuple[fx.Node, ...]
    """[n, k] of each GEMM, inputs of the graph."""


@dataclass(frozen=True)
class ProjectionMatcher:
    """See the module's docstring."""

    devices: tuple[str, ...] = ("cuda",)
    kind: str = KIND

    def find(self, graph: fx.Graph, context: Context) -> Sequence[FoundSite]:
        if context.machine.device not in self.devices:
            return ()
        by_input: dict[object, dict[fx.Node, MatchedGemm]] = {}
        for node in graph.nodes:
            gemm = gemm_at(node)
            weight = None if gemm is None else _weight_of(gemm)
            if gemm is not None and weight is not None and not _is_gathered(gemm.a):
                value = tensor_of(gemm.a)
                assert value is not None, f"{gemm.a.name} is no tensor"
                key = (skip_shapes(gemm.a), tuple(map(str, value.shape)), value.dtype, gemm.bias is None)
                by_input.setdefault(key, {}).setdefault(weight, gemm)
        groups = (Projections(tuple(each.values()), tuple(each)) for each in by_input.values() if len(each) > 1)
        return tuple(_found(each, context) for each in groups)


def _weight_of(gemm: MatchedGemm) -> fx.Node | None:
    """The weight of a linear layer's GEMM, if it is an input of the graph; None for any other GEMM."""
    weight = gemm.transposed_b
    if gemm.is_scaled or gemm.has_factors or gemm.addend is not None or weight is None or weight.op != "placeholder":
        return None
    if gemm.bias is not None and (gemm.bias.op != "placeholder" or len(_shape(gemm.bias)) != 1):
        return None
    values = [each for node in (gemm.a, weight) for each in tensors_of(node)]
    is_plain = len({each.dtype for each in values}) == 1 and values[0].dtype in DTYPE_NAMES
    static = all(isinstance(size, int) for size in values[1].shape)
    return weight if is_plain and static and values[1].is_contiguous() and min(values[1].shape) > 0 else None


def _shape(node: fx.Node) -> Sequence[object]:
    value = tensor_of(node)
    return () if value is None else value.shape


def _is_gathered(node: fx.Node) -> bool:
    """True if a collective makes the rows, whatever moves them in between."""
    while len(node.all_input_nodes) == 1 and node.op == "call_function" and not is_call(node, WAIT):
        node = node.all_input_nodes[0]
    return is_call(node, WAIT)


def _found(structure: Projections, context: Context) -> FoundSite:
    gemms, first = structure.gemms, structure.gemms[0]
    rows = tensor_of(first.a)
    assert rows is not None, f"{first.a.name} is no tensor"
    tokens, most = count_tokens(rows, context.config.max_tokens)
    facts = ProjectionFacts(
        first.sizes[2], tuple(each.sizes[1] for each in gemms), DTYPE_NAMES[rows.dtype], first.bias is not None
    )
    bias = " + bias" if facts.has_bias else ""
    site = Site(
        id=first.node.name,
        kind=KIND,
        groups=(),
        module=module_of(first.node).rpartition(".")[0] or module_of(first.node),
        description=f"{len(gemms)} x (x @ w^T{bias})",
        tokens=TokenCounts(tokens, most=most),
        facts=facts.values(),
        rejections=(_IN_TRAINING,) if context.phase in TRAINING else (),
    )
    return FoundSite(site, frozenset(each.node for each in gemms), facts, structure, token_value=first.a)


_IN_TRAINING = Rejection("training", "weights of a training step stay where they are")
