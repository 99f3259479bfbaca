"""Bind: ranks compare what they are about to run; the arena is allocated, exchanged and warmed once.

The comparison goes through the group's store with a timeout, not through a collective, so a rank that never
comes is an error too. What legitimately differs by rank (its own number) is no part of it.

An arena that cannot be had stops nobody: all ranks that share a group with a rank that has none leave the graph as it
was, in whatever groups. Its other groups count as well, though nothing is rewritten there: Inductor orders and buckets
the collectives of a graph as a whole, so ranks of one group must compile the same one.
"""

from __future__ import annotations

import hashlib
import json
import platform
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from weaveopt.errors import AgreementError, ArenaError, MulticastError, WeaveError
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.records.candidate import LEAVE, Candidate, Rejection
from weaveopt.records.memory import MemoryPlan
from weaveopt.records.report import Decision, Fallback, GraphReport, WorkFailure
from weaveopt.rule import Context

Document = dict[str, str]
"""What ranks compare, as `what -> value` in a fixed order; the first difference is the one that is named."""

_GROUPS = "groups of the graph"
"""Beside a document: how many groups a rank's graph communicates in. They need not be equally many."""


def bind(groups: Sequence[str], report: GraphReport, context: Context) -> str:
    """Agree in every group that the graph communicates in, then reserve its arenas.

    Returns why the graph has to stay as it was: an arena that could not be had, here or on a rank that this one shares
    groups with, directly or through others. Empty where all is in place. Raises `AgreementError` naming the rank and
    the first thing that differs, before any kernel runs.
    """
    timeout_s = context.config.compile_timeout_s
    real = [group for group in groups if not context.topologies[group].fake and context.topologies[group].world > 1]
    shared = [group for group in real if _compare(group, describe(group, report, context), len(real), timeout_s)]
    # A rank that has no arena in one group still takes part in the next: the others wait for it there.
    failures = [reserve(plan, context) for plan in report.plans if not context.topologies[plan.group].fake]
    why = next((failure for failure in failures if failure), "")
    return _spread(why, shared, timeout_s)


def compared_groups(groups: Sequence[str], report: GraphReport) -> tuple[str, ...]:
    """The groups whose ranks compare this graph and wait for each other: all that it communicates in, or none where no
    rule could take any of its communication (the sum of a metric, embeddings gathered for a loss).

    Ranks of such a group may hold batches of their own, so they compile graphs of other sizes and at other times.
    """
    could_differ = report.fallbacks or len(report.variants) > 1 or report.plans
    if could_differ or any(d.site.groups and not d.site.rejections for d in report.decisions):
        return tuple(groups)
    return ()


@dataclass(frozen=True)
class _Refused:
    """An arena that a process group could not have."""

    process_group: weakref.ReferenceType[dist.ProcessGroup]
    num_bytes: int
    why: str


_refused: dict[str, _Refused] = {}


def reserve(plan: MemoryPlan, context: Context) -> str:
    """Why there is no arena for `plan`, the same on all ranks of its group; empty where there is one.

    What a process group could not have it is not asked for again, nor for anything larger: trying may take long.
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
        return _named(error)
    except ArenaError as error:
        why = _named(error)
        _refused[plan.group] = _Refused(weakref.ref(topology.process_group(plan.group)), plan.num_bytes, why)
        return why
    return ""


def lost_multicast(why: str) -> bool:
    """True if `bind` said so because a group left NVLink multicast: deciding again finds what is next best. The same
    on all ranks that bound together."""
    return why.startswith(MulticastError.__name__)


def _named(error: WeaveError) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


_SPREADS = 2
"""Once around is enough where the groups are the rows and columns of a mesh: whoever shares a group with a rank that
has none hears of it, in whatever order, and in the second round those who share one with them."""


def _spread(why: str, groups: Sequence[str], timeout_s: float) -> str:
    """What one rank has to say, told to all that share groups with it. Names are sorted, so no two ranks wait for
    each other. Raises `AgreementError` where groups overlap in such a way that some would not hear of it."""
    for _ in range(_SPREADS):
        for group in groups:
            told = _gather(group, {"why": why}, "what could be reserved", timeout_s)
            why = min((each["why"] for each in told if each["why"]), default="")  # of several, the same on all ranks
    for group in groups:
        told = _gather(group, {"why": why}, "whether to leave the graph as it was", timeout_s)
        ranks = topology.discover(group, timeout_s).group.ranks
        without = [rank for rank, each in zip(ranks, told, strict=True) if each["why"]]
        if without and len(without) < len(ranks):
            found = next(each["why"] for each in told if each["why"])
            topology.exchange(group, timeout_s).settle()
            raise AgreementError(
                f"group {group!r}: ranks {without} of {ranks} have to leave a graph as it was ({found}), and the "
                'others did not hear of it in time: switch rewriting off with options={"disable": [...]}'
            )
    return why


def unrewritten(report: GraphReport, captured: DecidedGraph | None, error: str) -> GraphReport:
    """`report` of a graph that runs as it was captured after all, for `error` in this step."""
    why = Rejection("not_bound", "the graph runs as it was: memory that its rewrites share could not be had")
    failed = Fallback(report.name, "bind", error)
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


def await_peers(groups: Sequence[str], context: Context) -> None:
    """Wait until all ranks have compiled, so that a slow compiler on one is no timeout on the others."""
    for group in groups:
        known = context.topologies[group]
        if not known.fake and known.world > 1:
            _gather(group, {}, "the end of compilation", context.config.compile_timeout_s)


def describe(group: str, report: GraphReport, context: Context) -> Document:
    """Everything that must be the same on all ranks of `group`, in the order in which differences are told.

    Local sites communicate in no group: every group that the graph has compares them.
    """
    import weaveopt

    document: Document = {f"option {name}": value for name, value in context.config.agreed().items()}
    document["version of weaveopt"] = weaveopt.__version__
    document["version of torch"] = torch.__version__
    document["machine of the CPU"] = platform.machine()
    document["machine profile"] = context.machine.name
    document["constants of the machine profile"] = _digest(context.machine)
    document["phase of the graph"] = report.phase
    document["fallback"] = "; ".join(f"{f.step}: {f.error}" for f in report.fallbacks)
    document["variant of the graph"] = report.variant
    if context.config.strict:  # else nothing that runs rests on it
        document["failure to estimate the work outside the sites"] = str(report.work_failure or "")
    for decision in report.decisions:
        site = decision.site
        if group in site.groups or not site.groups:
            where = f"site {site.id} ({site.module or 'no module'})"
            document[f"{where}: computation"] = site.description
            for name, value in site.facts:
                document[f"{where}: {name}"] = json.dumps(value)
            for name, value in asdict(site.tokens).items():
                document[f"{where}: token count, {name}"] = json.dumps(value)
            document[f"{where}: choice"] = _text(decision.chosen)
    for plan in report.plans:
        if plan.group == group:
            document["arena plan"] = _text(plan)
    return document


def _text(record: object) -> str:
    return "nothing" if record is None else json.dumps(asdict(record))  # type: ignore[call-overload]


def _digest(record: object) -> str:
    return hashlib.sha256(repr(record).encode()).hexdigest()[:16]


def _compare(group: str, document: Document, num_groups: int, timeout_s: float) -> bool:
    """Whether some rank of the group takes part in others of the graph as well: it tells what becomes of those."""
    told = _gather(group, {**document, _GROUPS: str(num_groups)}, "agreement on the plan", timeout_s)
    counts = [each.pop(_GROUPS) for each in told]
    ranks = topology.discover(group, timeout_s).group.ranks
    for rank, other in zip(ranks[1:], told[1:], strict=True):
        difference = _first_difference(told[0], other)
        if difference is not None:
            what, ours, theirs = difference
            topology.exchange(group, timeout_s).settle()
            raise AgreementError(
                f"group {group!r}: ranks {ranks[0]} and {rank} differ in {what}: "
                f"rank {ranks[0]} has {ours}, rank {rank} has {theirs}. Start all ranks with the same "
                "options, versions and model."
            )
    return set(counts) != {"1"}


def _gather(group: str, document: Document, what: str, timeout_s: float) -> tuple[Document, ...]:
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


def _first_difference(ours: Document, theirs: Document) -> tuple[str, str, str] | None:
    for what in (*ours, *(key for key in theirs if key not in ours)):
        mine, other = ours.get(what, "nothing"), theirs.get(what, "nothing")
        if mine != other:
            return what, _short(mine), _short(other)
    return None


def _short(value: str, limit: int = 200) -> str:
    return value if len(value) <= limit else f"{value[:limit]}..."
