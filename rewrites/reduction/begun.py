"""Begun exchanges: their tasks, and the placement of their end in the graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
import torch.fx as fx

from weaveopt.graph.pattern import SHAPE_ONLY, is_call
from weaveopt.graph.splice import call_after
from weaveopt.inductor.calls import ATTENTION, GEMM, kind_of
from weaveopt.records.candidate import Candidate
from weaveopt.records.task import Stream, Task
from weaveopt.rewrites.reduction.candidates import FusedReductionPlan
from weaveopt.rule import FoundSite
from weaveopt.sites.reduction.matcher import Reduction

IN_LINE = frozenset({"gemm", "add", "copy", "host"})
"""Terms of an estimate that are no part of the exchange."""
WAIT = frozenset({torch.ops._c10d_functional.wait_tensor.default})


def begun_tasks(candidate: Candidate, lowered: FusedReductionPlan, structure: Reduction) -> tuple[Task, ...]:
    """The exchange on the communication stream, from its collective to the first reader of a result. Empty for a
    candidate in line."""
    if not lowered.begun or candidate.estimate is None:
        return ()
    us = sum(term.us for term in candidate.estimate.terms if term.name not in IN_LINE)
    reader = _first_reader(structure)
    ends_before = "" if reader is None else reader.name
    ctas = next((row.num_ctas for row in lowered.rows if lowered.workload.tokens <= row.max_tokens), 0)
    begin = structure.reduced.collectives[0].name
    return (Task(us, Stream.COMMUNICATION, name="exchange", ctas=ctas, begins_after=begin, ends_before=ends_before),)


def _first_reader(structure: Reduction) -> fx.Node | None:
    """The first node that reads a result of the site; None if there is none."""
    reduced = structure.reduced
    results = [reduced.total, *((reduced.norm.output,) if reduced.norm is not None else ())]
    inside = structure.interior | reduced.passed
    return min((reader for result in results for reader in result.users if reader not in inside), default=None)


def may_overlap(found: FoundSite) -> bool:
    """True if GEMMs or attention are between the collective of a site and the first reader of its results: kernels
    that are long enough to hide an exchange."""
    structure = found.structure
    assert isinstance(structure, Reduction), f"{found.site.id}: no reduction"
    inside, collectives, first = structure.interior, structure.reduced.collectives, _first_reader(structure)
    if first is None or len(collectives) > 1:
        return False
    node = collectives[0].next
    while node is not first:
        if node.op == "call_function" and node not in inside and kind_of(node.target) in (GEMM, ATTENTION):
            return True
        node = node.next
    return False


def names_of(collective: fx.Node) -> tuple[str, str]:
    """Names of a collective of the library and of its wait, which have to be asked for before both are erased."""
    (wait,) = (reader for reader in collective.users if is_call(reader, WAIT))
    return collective.name, wait.name


def end_before_readers(graph: fx.Graph, begun: fx.Node, names: tuple[str, str]) -> fx.Node:
    """Insert `weave::all_reduce_norm_end` before the first reader of a result of `begun`.

    The two operators get `names`, those of the collective that they stand in place of and of its wait, so that an order
    of the graph's communication (`weaveopt.records.order`) that names those holds for them. Both are erased by then,
    and so is whatever else read results only to be replaced.
    """
    known = {reader.args[1]: reader for reader in begun.users}
    results = [
        known.get(index) or call_after(graph, begun, operator.getitem, (begun, index), like=begun)
        for index in range(len(begun.meta["val"]))
    ]
    *operands, call = begun.args
    in_use = [operand for operand in operands if isinstance(operand, fx.Node)]
    first = min(reader for result in results for reader in _readers(result))
    end = torch.ops.weave.all_reduce_norm_end.default
    ended = call_after(graph, first.prev, end, (results, in_use, [], call), like=begun)
    begun.name, ended.name = names
    return ended


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """Nodes that read the memory of `value`, or of a view of it."""
    for user in value.users:
        if is_call(user, SHAPE_ONLY):
            yield from _readers(user)
        else:
            yield user
