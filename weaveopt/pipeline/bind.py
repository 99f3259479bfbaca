"""Bind: arenas are allocated, exchanged and warmed once, and ranks say whether they could carry out the plan.

An arena that cannot be reserved stops no rank: all ranks that share rewritten sites with a rank that has none leave the
graph as it was. Groups in which nothing is rewritten are not asked: their collectives stay where they are in the graph.
Everything goes through the groups' stores with a timeout, not through a collective, so a rank that never comes is an
error too.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from weaveopt.errors import AgreementError, ArenaError, ExportError, MulticastError
from weaveopt.fabrics import exported, topology
from weaveopt.fabrics.arena import transport
from weaveopt.pipeline.agree import Agreed
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.records.candidate import LEAVE, Candidate, Rejection
from weaveopt.records.memory import MemoryPlan
from weaveopt.records.report import Decision, Fallback, GraphReport, WorkFailure
from weaveopt.rule import Context
from weaveopt.wording import named

Compiled = Callable[..., object]


def bind(agreed: Agreed, why: str, context: Context) -> str:
    """Reserve the arenas of a graph that was rewritten as the ranks agreed, or failed to be, for `why`.

    Returns why the graph has to stay as it was: a step that failed or an arena that could not be had, here or on a rank
    that this one shares groups with, directly or through others. Empty where all is in place. Raises `AgreementError`
    where a rank does not come, before any kernel runs.
    """
    # A rank that has no arena in one group still takes part in the next: the others wait for it there.
    failures = [reserve(plan, context) for plan in agreed.planned.plans if not context.topologies[plan.group].fake]
    failures += [share(group, context) for group in agreed.planned.exporting if not context.topologies[group].fake]
    return shared_reason(agreed, why or next((failure for failure in failures if failure), ""), context)


def shared_reason(agreed: Agreed, why: str, context: Context) -> str:
    """Return why the graph has to stay as it was, here (`why`) or on a rank that shares groups with this one; empty if
    on none. All ranks that agreed together on the graph call it at the same point, and get one answer.

    Raises `AgreementError` as `bind` does.
    """
    timeout_s = context.config.compile_timeout_s
    for group in agreed.waiting_groups:
        if group not in agreed.several:
            answers = _gather(group, {"why": why}, "what could be reserved", timeout_s)
            why = min((each["why"] for each in answers if each["why"]), default="")  # of several, the same on all ranks
    return _spread(why, agreed.several, timeout_s)


@dataclass(frozen=True)
class _Refused:
    """An arena that a process group could not have."""

    process_group: weakref.ReferenceType[dist.ProcessGroup]
    num_bytes: int
    why: str


_refused: dict[str, _Refused] = {}


def reserve(plan: MemoryPlan, context: Context) -> str:
    """Reserve the arena for `plan`; returns the reason if there is none, the same on all ranks of its group, else
    empty.

    A request that failed in a process group is not repeated, nor a larger one: trying may take long.
    """
    config, known = context.config, context.topologies[plan.group]
    before = _refused.get(plan.group)
    if before is not None and before.process_group() is not topology.process_group(plan.group):
        before = None
    if before is not None and plan.num_bytes >= before.num_bytes:
        return f"{before.why} (not tried again)"
    try:
        with unset_fake_temporarily():  # the arena is real memory, though the graph is traced with fake tensors
            transport(plan.fabric).reserve(known, plan, config.arena_bytes, config.compile_timeout_s)
    except MulticastError as error:  # nothing against an arena without it
        return named(error)
    except ArenaError as error:
        why = named(error)
        _refused[plan.group] = _Refused(weakref.ref(topology.process_group(plan.group)), plan.num_bytes, why)
        return why
    return ""


def share(group: str, context: Context) -> str:
    """Share the weights of the group that peers read, once; returns the reason if that cannot be, the same on all its
    ranks, else empty."""
    if exported.is_shared(group):
        return ""
    try:
        with unset_fake_temporarily():
            exported.share(group, context.config.compile_timeout_s)
    except ExportError as error:
        return named(error)
    return ""


def decides_again(why: str) -> bool:
    """True if `bind` said so because a group left NVLink multicast, or cannot share its weights: deciding again finds
    what is next best. The same on all ranks that bound together."""
    return why.startswith((MulticastError.__name__, ExportError.__name__))


_SPREADS = 2
"""Rounds of propagation. One is enough if the groups are the rows and columns of a mesh: a rank that shares a group
with a rank without an arena learns of it, in whatever order, and in the second round the ranks that share one with
those."""


def _spread(why: str, groups: Sequence[str], timeout_s: float) -> str:
    """Propagate one rank's reason to all ranks that share groups with it. Names are sorted, so no two ranks wait for
    each other. Raises `AgreementError` if groups overlap such that some ranks would not receive it."""
    for _ in range(_SPREADS):
        for group in groups:
            answers = _gather(group, {"why": why}, "what could be reserved", timeout_s)
            why = min((each["why"] for each in answers if each["why"]), default="")  # of several, the same on all ranks
    for group in groups:
        answers = _gather(group, {"why": why}, "whether to leave the graph as it was", timeout_s)
        ranks = topology.discover(group, timeout_s).group.ranks
        without = [rank for rank, each in zip(ranks, answers, strict=True) if each["why"]]
        if without and len(without) < len(ranks):
            found = next(each["why"] for each in answers if each["why"])
            topology.exchange(group, timeout_s).settle()
            raise AgreementError(
                f"group {group!r}: ranks {without} of {ranks} have to leave a graph as it was ({found}), and the "
                'others did not hear of it in time: switch rewriting off with options={"disable": [...]}'
            )
    return why


NOT_BOUND = Rejection("not_bound", "the graph runs as it was: memory that its rewrites share could not be had")


def unrewritten(
    report: GraphReport, captured: DecidedGraph | None, error: str, why: Rejection = NOT_BOUND, step: str = "bind"
) -> GraphReport:
    """`report` of a graph that runs as it was captured after all, for `error` in `step`; `why` at each of its sites."""
    failed = Fallback(report.name, step, error)
    report = replace(report, plans=(), rounding=(), regime=None, fallbacks=(*report.fallbacks, failed))
    if captured is None:
        return report
    work = captured.priced.work
    return replace(
        report,
        decisions=tuple(_left(decision, why) for decision in captured.decisions),
        work=() if isinstance(work, WorkFailure) else work,
        work_failure=work if isinstance(work, WorkFailure) else None,
        sensitivity=(),
        schedule_before=(),
        schedule=(),
        variants=tuple(
            replace(each, predicted_us=each.baseline_us)
            if not each.rule
            else (replace(each, rejections=(why,)) if each.name == report.variant else each)
            for each in report.variants
        ),
        variant=captured.priced.captured.variant,
    )


def _left(decision: Decision, why: Rejection) -> Decision:
    if not decision.rewritten:
        return decision
    others = tuple(each for each in decision.alternatives if each.choice != LEAVE)
    refused = replace(decision.chosen, rejections=(*decision.chosen.rejections, why))
    return replace(decision, chosen=Candidate(LEAVE, estimate=decision.baseline), alternatives=(refused, *others))


@contextmanager
def compiling(agreed: Agreed, context: Context) -> Iterator[None]:
    """Around Inductor's compile of a graph: at its end all ranks that compile it have, so that a slow compiler on one
    is no timeout on the others. A rank that compiles a plan again that was agreed before may be alone with it."""
    timeout_s = context.config.compile_timeout_s
    known = [topology.rounds(group, timeout_s) for group in agreed.known]
    for rounds in known:
        rounds.begin_compiling()
    try:
        yield
    finally:
        for rounds in known:
            rounds.end_compiling()
    await_peers(agreed, context)


def await_peers(agreed: Agreed, context: Context) -> None:
    """Waits until all ranks that compile the graph have."""
    timeout_s = context.config.compile_timeout_s
    for group in agreed.waiting_groups:
        _gather(group, {}, "the end of compilation", timeout_s)
    for group in agreed.known:
        topology.rounds(group, timeout_s).await_compiling(timeout_s)


def count_calls(compiled: Compiled, groups: Sequence[str], timeout_s: float) -> Compiled:
    """`compiled`, with each of its calls counted in the groups that it has rewritten sites of: ranks that wait for this
    one while they compile ask for the count."""
    every = tuple(topology.rounds(group, timeout_s) for group in groups)
    if not every:
        return compiled

    @functools.wraps(compiled)
    def run(*args: object) -> object:
        for rounds in every:
            rounds.calls += 1
        return compiled(*args)

    return run


def _gather(group: str, document: dict[str, str], what: str, timeout_s: float) -> tuple[dict[str, str], ...]:
    channel = topology.exchange(group, timeout_s)
    payload = {"step": what, "document": json.dumps(document)}
    records = channel.gather(payload, what, timeout_s)
    for rank, record in zip(channel.group.ranks, records, strict=True):
        if record["step"] != what:
            channel.settle()
            raise AgreementError(
                f"group {group!r}: rank {channel.group.ranks[channel.group.rank]} is at {what!r} while rank {rank} is "
                f"at {record['step']!r}: the ranks compiled different numbers of graphs"
            )
    return tuple(json.loads(str(record["document"])) for record in records)
