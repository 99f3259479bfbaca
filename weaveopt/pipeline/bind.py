"""Bind: ranks compare what they are about to run; the arena is allocated, exchanged and warmed once.

The comparison goes through the group's store with a timeout, not through a collective, so a rank that never
comes is an error too. What legitimately differs by rank (its own number) is no part of it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from weaveopt.errors import AgreementError
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.records.report import GraphReport
from weaveopt.rule import Context

Document = dict[str, str]
"""What ranks compare, as `what -> value` in a fixed order; the first difference is the one that is named."""


def bind(groups: Sequence[str], report: GraphReport, context: Context) -> None:
    """Agree in every group that the graph communicates in, then reserve its arena.

    Raises `AgreementError` naming the rank and the first thing that differs, before any kernel runs.
    """
    for group in groups:
        known = context.topologies[group]
        if known.fake or known.world < 2:
            continue
        document = describe(group, report, context)
        _compare(group, document, context.config.compile_timeout_s)
    for plan in report.plans:
        known = context.topologies[plan.group]
        if not known.fake:
            config = context.config
            with unset_fake_temporarily():  # the arena is real memory, though the graph is traced with fake tensors
                transport(plan.fabric).reserve(known, plan, config.arena_bytes, config.compile_timeout_s)


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


def _compare(group: str, document: Document, timeout_s: float) -> None:
    told = _gather(group, document, "agreement on the plan", timeout_s)
    ranks = topology.discover(group, timeout_s).group.ranks
    for rank, other in zip(ranks[1:], told[1:], strict=True):
        difference = _first_difference(told[0], other)
        if difference is not None:
            what, ours, theirs = difference
            raise AgreementError(
                f"group {group!r}: ranks {ranks[0]} and {rank} differ in {what}: "
                f"rank {ranks[0]} has {ours}, rank {rank} has {theirs}. Start all ranks with the same "
                "options, versions and model."
            )


def _gather(group: str, document: Document, what: str, timeout_s: float) -> tuple[Document, ...]:
    channel = topology.exchange(group, timeout_s)
    payload = {"step": what, "document": json.dumps(document)}
    records = channel.gather(payload, what, timeout_s)
    for rank, record in zip(channel.group.ranks, records, strict=True):
        if record["step"] != what:
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
