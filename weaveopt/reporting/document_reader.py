"""The report from its JSON, with the first field that is not as expected named."""

from __future__ import annotations

from typing import TypeVar

from weaveopt.errors import WeaveError
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Measured, Rejection, TableRow, Term
from weaveopt.records.memory import Channel, Lifetime, MemoryPlan, PlacedBuffer
from weaveopt.records.report import (
    Decision,
    Fallback,
    GraphBreak,
    GraphReport,
    MachineSummary,
    OutsideCommunication,
    Regime,
    Report,
    Sensitivity,
    Stretch,
    Uncompiled,
    Variant,
    Work,
    WorkFailure,
)
from weaveopt.records.site import Site, TokenCounts
from weaveopt.reporting import generation
from weaveopt.reporting.json_reader import Reader

SCHEMA = 2
"""Raised when a field changes its meaning or goes away; a new field does not raise it."""


def from_json(text: str) -> Report:
    """The report that `to_json` wrote. Raises `WeaveError` naming the first field that is not as expected."""
    root = Reader.of(text)
    schema = root["schema"].integer()
    if schema != SCHEMA:
        raise WeaveError(f"report has schema {schema}; this weaveopt reads schema {SCHEMA}")
    machine = root["machine"]
    return Report(
        model=root["model"].text(),
        world=root["group"]["world"].integer(),
        machine=None
        if machine.missing
        else MachineSummary(
            machine["name"].text(),
            machine["measured"].flag(),
            machine["origins"].values(),
            tuple(name.text() for name in machine.optional_list("stands_in_for")),
        ),
        graphs=tuple(_read_graph(graph) for graph in root["graphs"]),
        fallbacks=_read_fallbacks(root["fallbacks"]),
        notes=root["notes"].texts(),
        breaks=tuple(map(_read_break, root.optional_list("breaks"))),
        outside=tuple(map(_read_outside, root.optional_list("communication_outside"))),
        uncompiled=tuple(map(_read_uncompiled, root.optional_list("uncompiled"))),
        generation=generation.read(root.optional("generate")),
    )


def _read_break(found: Reader) -> GraphBreak:
    reason, where, hint = (found[name].text() for name in ("reason", "where", "hint"))
    return GraphBreak(reason, where, hint, found["count"].integer())


def _read_outside(found: Reader) -> OutsideCommunication:
    return OutsideCommunication(found["group"].text(), found["collectives"].integer(), found["after"].text())


def _read_uncompiled(found: Reader) -> Uncompiled:
    calls = found["calls"]
    what, reason, hint = (found[name].text() for name in ("what", "reason", "hint"))
    return Uncompiled(what, reason, hint, None if calls.missing else calls.integer())


def _read_graph(graph: Reader) -> GraphReport:
    arena = graph["arena"]
    return GraphReport(
        name=graph["name"].text(),
        phase=graph["phase"].text(),
        tokens=graph["tokens"].integer(),
        decisions=tuple(_read_decision(site) for site in graph["sites"]),
        plans=tuple(
            MemoryPlan(
                group=group["group"].text(),
                fabric=_member(Fabric, group["fabric"]),
                num_bytes=group["bytes"].integer(),
                buffers=tuple(
                    _read_buffer(slot) for slot in arena["slots"] if slot["group"].text() == group["group"].text()
                ),
                channels=tuple(Channel(each["name"].text(), each["index"].integer()) for each in group["channels"]),
                wiring=group["wiring"].texts(),
            )
            for group in arena["groups"]
        ),
        rounding=graph["rounding"].texts(),
        fallbacks=_read_fallbacks(graph["fallbacks"]),
        steps_us=graph["steps_us"].values(),
        work=tuple(map(_read_work, graph.optional_list("work"))),
        work_failure=_read_work_failure(graph.optional("work_failure")),
        sensitivity=tuple(map(_read_sensitivity, graph.optional_list("sensitivity"))),
        regime=_read_regime(graph.optional("regime")),
        variants=tuple(map(_read_variant, graph["variants"])),
        variant=graph["variant"].text(),
        timed=tuple(line.text() for line in graph.optional_list("timed")),
    )


def _read_regime(regime: Reader) -> Regime | None:
    if regime.missing:
        return None
    end = regime["max_tokens"]
    return Regime(regime["min_tokens"].integer(), None if end.missing else end.integer())


def _read_work(work: Reader) -> Work:
    return Work(
        module=work["module"].text(),
        kind=work["kind"].text(),
        us=work["us"].number(),
        after=work["after"].integer(),
        count=work["count"].integer(),
    )


def _read_work_failure(failure: Reader) -> WorkFailure | None:
    return None if failure.missing else WorkFailure(failure["exception"].text(), failure["message"].text())


def _read_sensitivity(found: Reader) -> Sensitivity:
    return Sensitivity(
        sites=found["sites"].texts(),
        tokens=found["tokens"].integer(),
        choice=found["choice"].text(),
        stretches=tuple(Stretch(row["tokens"].integer(), row["choice"].text()) for row in found["stretches"]),
        constants=found["constants"].values(),
    )


def _read_fallbacks(fallbacks: Reader) -> tuple[Fallback, ...]:
    return tuple(Fallback(f["graph"].text(), f["step"].text(), f["error"].text()) for f in fallbacks)


def _read_buffer(slot: Reader) -> PlacedBuffer:
    return PlacedBuffer(
        name=slot["name"].text(),
        offset=slot["offset"].integer(),
        num_bytes=slot["bytes"].integer(),
        lifetime=_member(Lifetime, slot["lifetime"]),
        owners=slot["owners"].texts(),
        first=slot["first"].integer(),
        last=slot["last"].integer(),
        fill=None if slot["fill"].missing else slot["fill"].integer(),
        alignment=slot["alignment"].integer(),
        zone_begin=slot["zone_begin"].integer(),
    )


def _read_variant(variant: Reader) -> Variant:
    before, after = variant["unfused_us"], variant["predicted_us"]
    return Variant(
        name=variant["name"].text(),
        rule=variant["rule"].text(),
        baseline_us=None if before.missing else before.number(),
        predicted_us=None if after.missing else after.number(),
        rejections=_read_rejections(variant["rejected"]),
    )


def _read_table_row(row: Reader) -> TableRow:
    return TableRow(row["max_tokens"].integer(), row["variant"].text(), row["values"].values())


def _read_decision(site: Reader) -> Decision:
    return Decision(
        site=Site(
            id=site["id"].text(),
            kind=site["kind"].text(),
            groups=site["groups"].texts(),
            module=site["module"].text(),
            collectives=site["collectives"].texts(),
            description=site["form"].text(),
            tokens=TokenCounts(
                site["tokens"]["hint"].integer(), site["tokens"]["least"].integer(), site["tokens"]["most"].integer()
            ),
            facts=site["facts"].values(),
            rejections=_read_rejections(site["rejected"]),
            count=site["count"].integer(),
        ),
        chosen=_read_candidate(site, rejected_key="choice_rejected"),
        alternatives=tuple(_read_candidate(candidate) for candidate in site["alternatives"]),
        baseline=None
        if site["unfused_terms"].missing
        else Estimate(
            _read_terms(site["unfused_terms"]),
            site["unfused_relative_error"].number(),
            _read_measured(site.optional("unfused_measured")),
        ),
    )


def _read_candidate(candidate: Reader, rejected_key: str = "rejected") -> Candidate:
    estimate = (
        None
        if candidate["terms"].missing
        else Estimate(
            _read_terms(candidate["terms"]),
            candidate["relative_error"].number(),
            _read_measured(candidate.optional("measured")),
        )
    )
    return Candidate(
        choice=candidate["choice"].text(),
        fabric=_member(Fabric, candidate["fabric"]),
        variant=candidate["variant"].text(),
        parameters=candidate["parameters"].values(),
        estimate=estimate,
        rejections=_read_rejections(candidate[rejected_key]),
        table=tuple(map(_read_table_row, candidate["table"])),
        notes=candidate["notes"].texts(),
    )


Member = TypeVar("Member", Fabric, Lifetime)


def _member(kind: type[Member], value: Reader) -> Member:
    try:
        return kind(value.text())
    except ValueError:
        raise WeaveError(
            f"{value.path}: found {value.text()!r}, expected one of {', '.join(m.value for m in kind)}"
        ) from None


def _read_terms(terms: Reader) -> tuple[Term, ...]:
    return tuple(Term(term["name"].text(), term["us"].number()) for term in terms)


def _read_measured(measured: Reader) -> Measured | None:
    return None if measured.missing else Measured(measured["us"].number(), measured["relative_error"].number())


def _read_rejections(rejections: Reader) -> tuple[Rejection, ...]:
    return tuple(Rejection(r["code"].text(), r["message"].text(), r["values"].values()) for r in rejections)
