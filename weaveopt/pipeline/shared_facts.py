"""Facts that ranks of a group must share about a graph, as one document, and the verdict if documents differ.

Shared are the collectives of the group in their order, and of each rewritten site its computation, token counts and
chosen form, and the arena's plan. What one rank alone has (a bias that its GEMM adds, a narrower shard, more outputs)
is in no document. Pure: all ranks that compare the same documents come to the same verdict.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.fx as fx

from weaveopt.fabrics.rounds import digest
from weaveopt.graph.facts import events_of
from weaveopt.graph.pattern import is_call, target_name, tensor_of
from weaveopt.graph.values import hint
from weaveopt.records.candidate import Rejection
from weaveopt.records.memory import MemoryPlan
from weaveopt.records.report import Decision
from weaveopt.rule import CapturedGraph, Context

CODE = "ranks_differ"
_LONGEST = 200
"""Characters of a value in a reason."""


@dataclass(frozen=True)
class Document:
    """One rank's facts of one graph in one group."""

    rewrites: bool
    """True if this rank rewrites a site of the group, or runs a variant of the graph. If one rank does not, none
    does."""
    skeleton: str
    """Digest of `collectives`."""
    groups: int = 1
    """Groups of the graph in which this rank waits for others."""
    collectives: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    """Options, versions and the machine's profile: a difference is an error where both ranks rewrite."""
    failure: str = ""
    """The step that failed on this rank, and how."""
    variant: str = ""
    """Variant of the graph; empty for the captured one."""
    structure: str = ""
    """Digest of the graph, where its data dependencies alone do not order the group's collectives; else empty."""
    sites: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Site id -> its facts, in the order in which differences are reported."""
    rewritten: tuple[str, ...] = ()
    """Ids of the sites that this rank rewrites."""
    plan: str = ""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Document:
        record = json.loads(text)
        for name in ("collectives", "rewritten"):
            record[name] = tuple(record[name])
        return Document(**record)


@dataclass(frozen=True)
class Verdict:
    """Result of comparing the documents of a group."""

    error: str = ""
    """Difference that ranks with rewrites may not have; all of them raise it."""
    failure: str = ""
    """The step that failed on a rank: the graph is left by all."""
    all_left: Rejection | None = None
    """Why no site of the group is rewritten."""
    left: Mapping[str, Rejection] = field(default_factory=dict)
    """Site id -> why it is left by all ranks."""
    captured_only: bool = False
    """The ranks chose different variants of the graph: all take the captured one."""

    @property
    def is_agreed(self) -> bool:
        return not (self.error or self.failure or self.all_left or self.left or self.captured_only)


def document(
    group: str,
    captured: CapturedGraph,
    decisions: Sequence[Decision],
    plans: Sequence[MemoryPlan],
    context: Context,
    groups: int = 1,
    failure: str = "",
) -> Document:
    """This rank's document of a graph in one group."""
    own = [decision for decision in decisions if group in decision.site.groups]
    rewritten = tuple(decision.site.id for decision in own if decision.rewritten)
    skeleton = collectives_of(group, captured.graph)
    if failure or not (rewritten or captured.rule):
        sites = {each.site.id: _facts(each) for each in own}
        return Document(False, digest(skeleton), groups, skeleton, failure=failure, sites=sites)
    plan = next((json.dumps(asdict(each)) for each in plans if each.group == group), "")
    return Document(
        True,
        digest(skeleton),
        groups,
        skeleton,
        settings(context),
        variant="" if not captured.rule else captured.variant,
        structure="" if is_ordered(group, captured.graph) else structure_of(captured.graph),
        sites={each.site.id: _facts(each) for each in own},
        rewritten=rewritten,
        plan=plan,
    )


def settings(context: Context) -> dict[str, str]:
    """Settings outside the graph that decisions depend on."""
    import weaveopt

    found = {f"option {name}": value for name, value in context.config.agreed().items()}
    found["version of weaveopt"] = weaveopt.__version__
    found["version of torch"] = torch.__version__
    found["machine of the CPU"] = platform.machine()
    found["machine profile"] = context.machine.name
    found["constants of the machine profile"] = digest([repr(context.machine.untimed)])
    return found


def compare(ranks: Sequence[int], documents: Sequence[Document]) -> Verdict:
    """Compare the documents of a group's global ranks `ranks`, in the same order; returns the group's verdict."""
    failed = next(((rank, each) for rank, each in zip(ranks, documents, strict=True) if each.failure), None)
    if failed is not None:
        return Verdict(failure=f"rank {failed[0]}: {failed[1].failure}")
    first_index = next((index for index, each in enumerate(documents) if each.rewrites), None)
    if first_index is None:
        return Verdict(all_left=Rejection(CODE, "no rank of the group rewrites anything in this graph"))
    first_rank, first = ranks[first_index], documents[first_index]
    others = [(rank, each) for rank, each in zip(ranks, documents, strict=True) if each is not first]
    for rank, other in others:
        found = _first_difference(first.settings, other.settings) if other.rewrites else None
        if found is not None:
            what, ours, theirs = found
            return Verdict(
                error=f"ranks {first_rank} and {rank} differ in {what}: rank {first_rank} has {ours}, rank {rank} has "
                f"{theirs}. Start all ranks with the same options, versions and model."
            )
    # First: the collectives of variants differ, and so do their sites.
    if any(other.variant != first.variant for _, other in others):
        return Verdict(captured_only=True)
    for rank, other in others:
        reason = _against_all(first_rank, first, rank, other)
        if reason is not None:
            return Verdict(all_left=reason)
    left: dict[str, Rejection] = {}
    for site in dict.fromkeys(site for each in documents for site in each.rewritten):
        for rank, other in others:
            found = _first_difference(first.sites.get(site, {}), other.sites.get(site, {}))
            if found is not None and site not in left:
                left[site] = _reason(first_rank, rank, *found)
    if left:
        return Verdict(left=left)
    for rank, other in others:
        if other.plan != first.plan:
            return Verdict(all_left=_reason(first_rank, rank, "the arena's plan", first.plan, other.plan))
    return Verdict()


def _against_all(first_rank: int, first: Document, rank: int, other: Document) -> Rejection | None:
    """Reject all sites of a group for two ranks, whatever the sites are."""
    mine, theirs = first.collectives, other.collectives
    if mine != theirs:
        at = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        words = [each[at] if at < len(each) else "nothing" for each in (mine, theirs)]
        return _reason(first_rank, rank, f"collective {at} of the graph", *words)
    if not other.rewrites:
        for site in first.rewritten:
            found = _first_difference(first.sites[site], other.sites.get(site, {}))
            if found is not None:
                return _reason(first_rank, rank, *found)
        return Rejection(CODE, f"rank {rank} rewrites no site of the group in this graph")
    if first.structure != other.structure:
        message = "the graphs differ, and nothing but the whole graph orders the collectives"
        return Rejection(CODE, f"ranks {first_rank} and {rank}: {message}")
    return None


def _facts(decision: Decision) -> dict[str, str]:
    site = decision.site
    facts = {"computation": site.description.removesuffix(site.own_text)}
    facts.update((name, json.dumps(value)) for name, value in site.facts if name not in site.own_facts)
    facts.update((f"token count, {name}", json.dumps(value)) for name, value in asdict(site.tokens).items())
    chosen = decision.chosen
    facts["choice"] = json.dumps([chosen.choice, chosen.fabric, chosen.variant, chosen.parameters])
    facts["table of kernels"] = json.dumps([asdict(row) for row in chosen.table])
    return facts


def _first_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    for what in (*ours, *(key for key in theirs if key not in ours)):
        mine, other = ours.get(what, "nothing"), theirs.get(what, "nothing")
        if mine != other:
            return what, _short(mine), _short(other)
    return None


def _reason(first_rank: int, rank: int, what: str, ours: str, theirs: str) -> Rejection:
    values = ((f"rank {first_rank}", _short(ours)), (f"rank {rank}", _short(theirs)))
    return Rejection(CODE, f"ranks {first_rank} and {rank} differ in {what}", values)


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."


_SAME_SIZES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
"""Collectives that take and make equally many elements on every rank."""


def collectives_of(group: str, graph: fx.Graph) -> tuple[str, ...]:
    """The communication of a group in the order of the graph, a line each: operator, dtype, sizes, other arguments."""
    return tuple(_line(node) for node in events_of(graph, group))


def _line(node: fx.Node) -> str:
    value, name = tensor_of(node), str(node.target)
    words = [name]
    if value is not None:
        words.append(str(value.dtype))
        if any(each in name for each in _SAME_SIZES):
            words.append("x".join(str(hint(size)) for size in value.shape))
    words += [str(argument) for argument in node.args if isinstance(argument, str | int)]
    return " ".join(words)


def is_ordered(group: str, graph: fx.Graph) -> bool:
    """True if the data dependencies of the graph allow the group's communication in one order only."""
    number = {node: index for index, node in enumerate(events_of(graph, group))}
    latest: dict[fx.Node, int] = {}
    """The last communication that a node depends on, itself included."""
    for node in graph.nodes:
        before = max((latest[each] for each in node.all_input_nodes), default=-1)
        if node in number:
            if before != number[node] - 1:
                return False
            before = number[node]
        latest[node] = before
    return True


def structure_of(graph: fx.Graph) -> str:
    """Digest of the operators of a graph, what they read, and the sizes of what they make; scalars are left out, as
    some hold the number of a rank. So are offsets of ids: the first rank's rows of a sharded vocabulary begin at 0,
    and torch drops an offset of 0."""
    index: dict[fx.Node, int] = {}
    lines: list[str] = []
    for node in graph.nodes:
        if _is_offset(node):
            index[node] = index[node.all_input_nodes[0]]
            continue
        index[node] = len(lines)
        value = tensor_of(node)
        sizes = () if value is None else tuple(hint(size) for size in value.shape)
        lines.append(f"{node.op} {target_name(node) if node.op != 'placeholder' else ''} {sizes} "
                     f"{[index[each] for each in node.all_input_nodes]}")  # fmt: skip
    return digest(lines)


_OFFSETS = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor})


def _is_offset(node: fx.Node) -> bool:
    """True for integers plus or minus a number, which Inductor computes where they are read."""
    value = tensor_of(node)
    is_integer = value is not None and value.dtype in (torch.int32, torch.int64)
    return is_integer and is_call(node, _OFFSETS) and len(node.all_input_nodes) == 1 and isinstance(node.args[1], int)
