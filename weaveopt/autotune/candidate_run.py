"""One candidate of one site, rewritten as it would be in the model, as a function to be called and timed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.fx as fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily

from weaveopt.autotune.graph_part import GraphPart, HintedSizes, NotTimedError, part_of, readers_of
from weaveopt.measure.clock import Launch
from weaveopt.pipeline.decide import DecidedGraph, settle
from weaveopt.pipeline.plan import plan
from weaveopt.pipeline.price import PricedGraph
from weaveopt.pipeline.recognize import recognize
from weaveopt.pipeline.rewrite import rewrite
from weaveopt.records.memory import MemoryPlan
from weaveopt.rule import Chosen, Context, FoundSite, PricedSite, RuleSet

COLD_BYTES = 64 << 20
"""Inputs take turns, up to so many bytes of them: today's GPUs keep less in their caches (50 MB and below)."""
MOST_SETS = 4


Call = Callable[[list[torch.Tensor]], object]


class Make(Protocol):
    """Compiles a graph that is called by itself."""

    def __call__(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Call:
        """`inputs` are real; what comes back takes such tensors, as one list that it may clear."""
        ...


@dataclass(frozen=True)
class CandidateRun:
    call: Call
    sets: tuple[list[torch.Tensor], ...]
    plans: tuple[MemoryPlan, ...]
    """The memory that it needs, not reserved yet."""

    @property
    def launch(self) -> Launch:
        return lambda index: self.call(list(self.sets[index % len(self.sets)]))


@contextmanager
def running() -> Iterator[None]:
    """Run operations on real tensors within a compile, dispatched as they are in the model.

    While torch traces, it dispatches in Python, which takes longer, and issues collectives with the interpreter's lock
    held, which Gloo's thread may be waiting for to release the last one: a deadlock.
    """
    with unset_fake_temporarily(), no_python_dispatcher(), torch.no_grad():
        yield


def candidate_run_of(
    priced: PricedGraph, index: int, position: int | None, rules: RuleSet, context: Context, make: Make
) -> CandidateRun:
    """Build the run of the proposal at `position` of site `index`, alone in its graph; None: of the unmodified site.

    The graph itself is not touched. Raises whatever a step raises, and `NotTimedError`.
    """
    site = priced.problem.sites[index]
    sizes = HintedSizes.of(
        priced.captured.symbolic_tokens if site.found.is_symbolic else None, site.found.site.tokens.hint
    )
    plans: tuple[MemoryPlan, ...] = ()
    if position is None:
        graph, nodes = priced.captured.graph, _timed(site.found, site)
        part = part_of(graph, frozenset(graph.nodes) - nodes, readers_of(graph, nodes), sizes)
    else:
        part, plans = _rewritten(priced, index, position, rules, context, sizes)
    with unset_fake_temporarily(), torch.no_grad():
        sets = _sets(part)
        call = make(part.module, sets[0])
    return CandidateRun(call, sets, plans)


def _timed(found: FoundSite, site: PricedSite) -> frozenset[fx.Node]:
    """Nodes that run: the site, and its consumers too if one of its candidates replaces those."""
    return found.nodes | found.consumers if site.replaces_consumers else found.nodes


def _sets(part: GraphPart) -> tuple[list[torch.Tensor], ...]:
    count = min(MOST_SETS, math.ceil(COLD_BYTES / max(part.num_bytes, 1)))
    return tuple(part.real_inputs() for _ in range(max(count, 1)))


def _rewritten(
    priced: PricedGraph, index: int, position: int, rules: RuleSet, context: Context, sizes: HintedSizes
) -> tuple[GraphPart, tuple[MemoryPlan, ...]]:
    captured = replace(priced.captured, graph=copied(priced.captured.graph))
    every = recognize(captured, rules, context)
    if [each.site.id for each in every] != [each.site.id for each in priced.frame.sites]:
        raise NotTimedError("a copy of the graph has other sites")
    found = replace(every[index], site=priced.problem.sites[index].found.site)
    proposal = priced.frame.proposals(found)[position]
    nodes = _timed(found, priced.problem.sites[index])
    outside = frozenset(captured.graph.nodes) - nodes
    readers = readers_of(captured.graph, nodes)
    chosen = settle((Chosen(found, proposal),), rules, context)
    decided = DecidedGraph(replace(priced, captured=captured), (), chosen, None)
    planned = plan(decided, rules, context)
    rewrite(decided, planned, rules, context)
    return part_of(captured.graph, outside, readers, sizes), planned.plans


def copied(original: fx.Graph) -> fx.Graph:
    """A copy whose nodes have the names and values of the original's."""
    graph = fx.Graph()
    output = graph.graph_copy(original, val_map={}, return_output_node=True)
    assert isinstance(output, tuple)
    value, output_node = output
    graph.output(value).meta.update(output_node.meta)
    graph._codegen = copy.copy(original._codegen)
    return graph
