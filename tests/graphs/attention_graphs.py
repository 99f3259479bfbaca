"""Attention as models write it, in one function a form: masks, repeated keys and values, GEMMs with a softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor

from weaveopt.backend import optimize
from weaveopt.config import Config
from weaveopt.inductor import seams
from weaveopt.records.candidate import Candidate
from weaveopt.records.report import Decision, GraphReport
from weaveopt.records.site import TokenCounts
from weaveopt.reporting import registry
from weaveopt.rewrites import RULES
from weaveopt.rewrites.causal_attention import CausalAttention
from weaveopt.rewrites.causal_attention.candidates import RULE
from weaveopt.rule import Context, FoundSite, Proposal, RuleSet

Compute = Callable[..., Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one attention."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 24
    keys: int = 24
    head_dim: int = 16
    value_dim: int = 16

    def operands(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value: queries as rows of a projection, keys and values as in a cache."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        return (
            normal(self.batch, self.queries, self.heads, self.head_dim).transpose(1, 2),
            normal(self.batch, self.kv_heads, self.keys, self.head_dim),
            normal(self.batch, self.kv_heads, self.keys, self.value_dim),
        )


# --- masks, each made within the graph --------------------------------------------------------------------------------


def seen(queries: int, keys: int, offset: int = 0, window: int = 0, chunk: int = 0) -> Tensor:
    """Key j for query i where `j <= i + offset`, within a window or chunk where there is one; as transformers does."""
    position = torch.arange(offset, offset + queries)[None, None, :, None]
    key = torch.arange(keys)[None, None, None, :]
    admitted = key <= position
    if window:
        admitted = admitted & (key > position - window)
    if chunk:
        admitted = admitted & (key // chunk == position // chunk)
    return admitted


def bias(admitted: Tensor, dtype: torch.dtype, never: float) -> Tensor:
    return torch.where(admitted, torch.tensor(0.0, dtype=dtype), torch.tensor(never, dtype=dtype))


# --- keys and values for every query head ----------------------------------------------------------------------------


def repeat(x: Tensor, groups: int) -> Tensor:
    """As transformers does."""
    batch, heads, length, dim = x.shape
    if groups == 1:
        return x
    return x[:, :, None].expand(batch, heads, groups, length, dim).reshape(batch, heads * groups, length, dim)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Repeated keys and values through the library, and the rows that a projection takes."""
    groups = query.shape[1] // key.shape[1]
    out = F.scaled_dot_product_attention(query, repeat(key, groups), repeat(value, groups), mask, is_causal=causal)
    return rows(out)


def rows(out: Tensor) -> Tensor:
    """[batch, queries, heads * value_dim]"""
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def attend_written(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None = None, softcap: float = 0.0
) -> Tensor:
    """Two GEMMs and a softmax, with a soft cap as gemma2 or sinks as gpt-oss have them."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat(key, groups), repeat(value, groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is None:
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    else:
        sink = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
        logits = torch.cat([scores, sink], dim=-1)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        weights = F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1].to(value.dtype)
    return rows(torch.matmul(weights, value))


# --- running them -----------------------------------------------------------------------------------------------------


class Only(CausalAttention):
    """The rule with one of its forms."""

    def __init__(self, form: str) -> None:
        self.form = form

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        every = super().propose(found, tokens, context, usable_only)
        return tuple(each for each in every if each.candidate.variant == self.form)


def rules_of(form: str) -> RuleSet:
    return RuleSet(RULES.matchers, (Only(form),))


@dataclass(frozen=True)
class Ran:
    """Result of a compiled function, with its report and its rewritten graph."""

    result: Tensor
    report: GraphReport
    graph: fx.Graph
    """After the rewrite."""

    @property
    def decisions(self) -> list[Decision]:
        return [decision for decision in self.report.decisions if decision.site.kind == "attention"]

    @property
    def decision(self) -> Decision:
        (found,) = self.decisions
        return found

    @property
    def chosen(self) -> Candidate:
        return self.decision.chosen

    @property
    def codes(self) -> dict[str, list[str]]:
        """Why each form of the rule is not taken."""
        return {c.variant: [r.code for r in c.rejections] for c in self.decision.alternatives if c.rejections}

    def count(self, target: object) -> int:
        return sum(node.target is target for node in self.graph.nodes)


@dataclass(frozen=True)
class As:
    """For which machine, by which rules, and whether what the model predicts counts."""

    machine: str = "cpu"
    rules: RuleSet = RULES
    force: bool = True


def ran_each(compute: Compute, operands: Sequence[Tensor], ways: Sequence[As]) -> list[Ran]:
    """`compute` on CPU tensors, traced once and optimized in each way: what GPUs run has a form for CPUs."""
    torch._dynamo.reset()
    made: list[tuple[GraphReport, fx.GraphModule]] = []
    results: list[list[Tensor]] = []

    def inner_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        for way in ways:
            config = Config(force=(RULE,) if way.force else (), machine=way.machine, strict=True)
            entry = registry.open_entry(())
            mine = fx.GraphModule(module, module.graph)
            optimize(mine, inputs, seams.GraphPass.of(arguments), config, entry, way.rules)
            mine.graph.lint()
            mine.recompile()
            made.append((entry.graphs[0], mine))

        def run(arguments: list[object]) -> object:
            given = list(arguments)
            arguments.clear()
            for _, mine in made:
                results.append(list(mine.forward(*given)))
            return results[0]

        return make_boxed_func(lambda *given: run(list(given)))

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> object:
        return seams.compile_with(inner_compile, graph_module, example_inputs)

    with torch.no_grad():
        torch.compile(compute, backend=backend, fullgraph=True)(*operands)
    assert len(made) == len(ways), "more than one graph"
    return [Ran(result[0], report, mine.graph) for (report, mine), result in zip(made, results, strict=True)]


def ran(compute: Compute, operands: Sequence[Tensor], way: As = As()) -> Ran:
    (found,) = ran_each(compute, operands, [way])
    return found
