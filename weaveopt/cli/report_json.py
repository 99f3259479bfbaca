"""The report as JSON, and back. Every field of the records is there; sums are added for readers without our code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TypeVar

from weaveopt.cli.json_reader import Json, Reader
from weaveopt.decision import (
    Algorithm,
    BufferPlan,
    Candidate,
    Decision,
    Estimate,
    Fabric,
    Fallback,
    Form,
    GraphReport,
    Lowering,
    MachineSummary,
    Placement,
    Product,
    Regime,
    RegionNeed,
    Rejection,
    Report,
    Site,
    Slot,
    Term,
    Workload,
)
from weaveopt.errors import WeaveError

SCHEMA = 1
"""Raised when a field changes its meaning or goes away; a new field does not raise it."""


def to_json(report: Report) -> str:
    """The report as indented JSON text. `predicted_us` and `unfused_us` are null where nothing was estimated."""
    machine = report.machine
    document: Json = {
        "schema": SCHEMA,
        "model": report.model,
        "group": {"world": report.world},
        "machine": None
        if machine is None
        else {"name": machine.name, "measured": machine.measured, "origins": dict(machine.origins)},
        "graphs": [_graph(graph) for graph in report.graphs],
        "fallbacks": [asdict(fallback) for fallback in report.fallbacks],
        "notes": list(report.notes),
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _graph(graph: GraphReport) -> Json:
    return {
        "name": graph.name,
        "phase": graph.phase,
        "tokens": graph.tokens,
        "regime": None if graph.regime is None else asdict(graph.regime),
        "num_collectives": sum(d.site.count * len(d.site.collectives) for d in graph.decisions),
        "sites": [_decision(decision) for decision in graph.decisions],
        "arena": {
            "bytes": sum(plan.bytes for plan in graph.plans),
            "slots": [
                {"group": plan.group, "offset": slot.offset, "bytes": slot.bytes, "owners": list(slot.owners)}
                for plan in graph.plans
                for slot in plan.slots
            ],
            "groups": [
                {
                    "group": plan.group,
                    "fabric": plan.fabric.value,
                    "bytes": plan.bytes,
                    "regions": None if plan.regions is None else asdict(plan.regions),
                    "placements": [asdict(p) for p in plan.placements],
                }
                for plan in graph.plans
            ],
        },
        "rounding": list(graph.rounding),
        "fallbacks": [asdict(fallback) for fallback in graph.fallbacks],
        "steps_us": dict(graph.steps_us),
        "unfused_us": graph.unfused_us,
        "predicted_us": graph.predicted_us,
    }


def _decision(decision: Decision) -> Json:
    site, chosen = decision.site, decision.chosen
    return {
        "id": site.id,
        "count": site.count,
        "module": site.module,
        "rule": site.rule,
        "form": site.form,
        "group": site.group,
        "collectives": list(site.collectives),
        "workload": None if site.workload is None else asdict(site.workload),
        "rejected": _rejections(site.rejections),
        **_candidate(chosen, rejected_key="choice_rejected"),
        "saving_us": decision.saving_us,
        "unfused_us": None if decision.unfused is None else decision.unfused.us,
        "unfused_terms": None if decision.unfused is None else _terms(decision.unfused),
        "unfused_relative_error": None if decision.unfused is None else decision.unfused.relative_error,
        "alternatives": [_candidate(candidate) for candidate in decision.alternatives],
    }


def _candidate(candidate: Candidate, rejected_key: str = "rejected") -> dict[str, Json]:
    estimate = candidate.estimate
    return {
        "choice": candidate.choice,
        "fabric": candidate.fabric.value,
        "algorithm": candidate.algorithm.value,
        "parameters": dict(candidate.parameters),
        "lowerings": [asdict(lowering) for lowering in candidate.lowerings],
        "predicted_us": None if estimate is None else estimate.us,
        "relative_error": None if estimate is None else estimate.relative_error,
        "terms": None if estimate is None else _terms(estimate),
        rejected_key: _rejections(candidate.rejections),
    }


def _terms(estimate: Estimate) -> Json:
    return [{"name": term.name, "us": term.us} for term in estimate.terms]


def _rejections(rejections: Iterable[Rejection]) -> Json:
    return [{"code": r.code, "message": r.message, "values": dict(r.values)} for r in rejections]


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
        else MachineSummary(machine["name"].text(), machine["measured"].flag(), machine["origins"].values()),
        graphs=tuple(_read_graph(graph) for graph in root["graphs"]),
        fallbacks=_read_fallbacks(root["fallbacks"]),
        notes=root["notes"].texts(),
    )


def _read_graph(graph: Reader) -> GraphReport:
    arena = graph["arena"]
    return GraphReport(
        name=graph["name"].text(),
        phase=graph["phase"].text(),
        tokens=graph["tokens"].integer(),
        decisions=tuple(_read_decision(site) for site in graph["sites"]),
        plans=tuple(
            BufferPlan(
                group=group["group"].text(),
                bytes=group["bytes"].integer(),
                slots=tuple(
                    Slot(slot["offset"].integer(), slot["bytes"].integer(), slot["owners"].texts())
                    for slot in arena["slots"]
                    if slot["group"].text() == group["group"].text()
                ),
                placements=tuple(_read_placement(placement) for placement in group["placements"]),
                fabric=Fabric.SHM if group.optional("fabric").missing else _member(Fabric, group["fabric"]),
                regions=_read_regions(group.optional("regions")),
            )
            for group in arena["groups"]
        ),
        rounding=graph["rounding"].texts(),
        fallbacks=_read_fallbacks(graph["fallbacks"]),
        steps_us=graph["steps_us"].values(),
        regime=_read_regime(graph.optional("regime")),
    )


def _read_regime(regime: Reader) -> Regime | None:
    if regime.missing:
        return None
    end = regime["max_tokens"]
    return Regime(regime["min_tokens"].integer(), None if end.missing else end.integer())


def _read_fallbacks(fallbacks: Reader) -> tuple[Fallback, ...]:
    return tuple(Fallback(f["graph"].text(), f["step"].text(), f["error"].text()) for f in fallbacks)


def _read_regions(regions: Reader) -> RegionNeed | None:
    if regions.missing:
        return None
    return RegionNeed(
        mailbox_bytes=regions["mailbox_bytes"].integer(),
        staging_bytes=regions["staging_bytes"].integer(),
        output_bytes=regions["output_bytes"].integer(),
        partial_bytes=regions["partial_bytes"].integer(),
    )


def _read_lowering(row: Reader) -> Lowering:
    return Lowering(
        max_tokens=row["max_tokens"].integer(),
        algorithm=_member(Algorithm, row["algorithm"]),
        form=_member(Form, row["form"]),
        num_ctas=row["num_ctas"].integer(),
    )


def _read_placement(placement: Reader) -> Placement:
    return Placement(
        site=placement["site"].text(),
        partial_offset=placement["partial_offset"].integer(),
        output_offset=placement["output_offset"].integer(),
        partial_bytes=placement["partial_bytes"].integer(),
        max_tokens=placement["max_tokens"].integer(),
        residual_sharded=placement["residual_sharded"].flag(),
        sum_sharded=placement["sum_sharded"].flag(),
    )


def _read_decision(site: Reader) -> Decision:
    return Decision(
        site=Site(
            id=site["id"].text(),
            rule=site["rule"].text(),
            group=site["group"].text(),
            module=site["module"].text(),
            collectives=site["collectives"].texts(),
            workload=None if site["workload"].missing else _read_workload(site["workload"]),
            form=site["form"].text(),
            rejections=_read_rejections(site["rejected"]),
            count=site["count"].integer(),
        ),
        chosen=_read_candidate(site, rejected_key="choice_rejected"),
        alternatives=tuple(_read_candidate(candidate) for candidate in site["alternatives"]),
        unfused=None
        if site["unfused_terms"].missing
        else Estimate(_read_terms(site["unfused_terms"]), site["unfused_relative_error"].number()),
    )


def _read_workload(workload: Reader) -> Workload:
    product = workload["product"]
    return Workload(
        tokens=workload["tokens"].integer(),
        max_tokens=workload["max_tokens"].integer(),
        hidden=workload["hidden"].integer(),
        dtype=workload["dtype"].text(),
        world=workload["world"].integer(),
        hosts=workload["hosts"].integer(),
        product=None
        if product.missing
        else Product(product["m"].integer(), product["k"].integer(), product["n"].integer()),
        num_partials=workload["num_partials"].integer(),
        num_norms=workload["num_norms"].integer(),
        has_residual=workload["has_residual"].flag(),
        sum_is_used=workload["sum_is_used"].flag(),
        sum_may_shard=workload["sum_may_shard"].flag(),
        out_dtype="" if workload.optional("out_dtype").missing else workload["out_dtype"].text(),
        min_tokens=0 if workload.optional("min_tokens").missing else workload["min_tokens"].integer(),
    )


def _read_candidate(candidate: Reader, rejected_key: str = "rejected") -> Candidate:
    lowerings = candidate.optional("lowerings")
    estimate = (
        None
        if candidate["terms"].missing
        else Estimate(_read_terms(candidate["terms"]), candidate["relative_error"].number())
    )
    return Candidate(
        choice=candidate["choice"].text(),
        fabric=_member(Fabric, candidate["fabric"]),
        algorithm=_member(Algorithm, candidate["algorithm"]),
        parameters=candidate["parameters"].values(),
        estimate=estimate,
        rejections=_read_rejections(candidate[rejected_key]),
        lowerings=() if lowerings.missing else tuple(map(_read_lowering, lowerings)),
    )


Member = TypeVar("Member", Fabric, Algorithm, Form)


def _member(kind: type[Member], value: Reader) -> Member:
    try:
        return kind(value.text())
    except ValueError:
        raise WeaveError(
            f"{value.path}: found {value.text()!r}, expected one of {', '.join(m.value for m in kind)}"
        ) from None


def _read_terms(terms: Reader) -> tuple[Term, ...]:
    return tuple(Term(term["name"].text(), term["us"].number()) for term in terms)


def _read_rejections(rejections: Reader) -> tuple[Rejection, ...]:
    return tuple(Rejection(r["code"].text(), r["message"].text(), r["values"].values()) for r in rejections)
