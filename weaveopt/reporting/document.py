"""The report as JSON. Every field of the records is there; sums are added for readers without our code.

`document_reader` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from weaveopt.plain_json import Json
from weaveopt.records.candidate import Candidate, Estimate, Rejection
from weaveopt.records.memory import MemoryPlan
from weaveopt.records.price import Reading, errors_of
from weaveopt.records.report import Decision, GraphReport, Report, Sensitivity, Variant
from weaveopt.reporting import generation
from weaveopt.reporting.headline import headline
from weaveopt.reporting.parts import ReportPart, parts
from weaveopt.reporting.timeline import Times, total

SCHEMA = 2
"""Raised when a field changes its meaning or goes away; a new field does not raise it."""


def to_json(report: Report) -> str:
    """The report as indented JSON text."""
    return _text(to_dict(report))


def graph_to_json(graph: GraphReport) -> str:
    """One of `graphs` by itself."""
    return _text(_graph(graph))


def _text(document: Json) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def to_dict(report: Report) -> dict[str, Json]:
    """Convert a report to the plain values that `to_json` writes. `predicted_us` and `unfused_us` are None if
    nothing was estimated."""
    machine = report.machine
    return {
        "schema": SCHEMA,
        "model": report.model,
        "group": {"world": report.world},
        "machine": None
        if machine is None
        else {
            "name": machine.name,
            "measured": machine.measured,
            "origins": dict(machine.origins),
            "stands_in_for": list(machine.stands_in_for),
            "note": machine.note,
        },
        "graphs": [_graph(graph) for graph in report.graphs],
        "fallbacks": [asdict(fallback) for fallback in report.fallbacks],
        "notes": list(report.notes),
        "graphs_count": report.num_graphs,
        "breaks": [asdict(found) for found in report.breaks],
        "communication_outside": [asdict(found) for found in report.outside],
        "uncompiled": [asdict(found) for found in report.uncompiled],
        "generate": generation.document(report.generation),
    }


def _graph(graph: GraphReport) -> Json:
    before, after = total(graph, fused=False), total(graph, fused=True)
    return {
        "name": graph.name,
        "phase": graph.phase,
        "tokens": graph.tokens,
        "regime": None if graph.regime is None else asdict(graph.regime),
        "variant": graph.variant,
        "variants": [
            {
                "name": variant.name,
                "rule": variant.rule,
                "unfused_us": variant.baseline_us,
                "predicted_us": variant.predicted_us,
                "exposed_us": variant.exposed_us,
                "unfused_steady_us": variant.baseline_steady_us,
                "steady_us": variant.steady_us,
                "added_us": variant.added_us,
                "measured": _measured(variant),
                "parameters": dict(variant.parameters),
                "rejected": _rejections(variant.rejections),
            }
            for variant in graph.variants
        ],
        "num_collectives": sum(d.site.count * len(d.site.collectives) for d in graph.decisions),
        "sites": [_decision(decision) for decision in graph.decisions],
        "arena": {
            "bytes": sum(plan.num_bytes for plan in graph.plans),
            "slots": [slot for plan in graph.plans for slot in _slots(plan)],
            "groups": [
                {
                    "group": plan.group,
                    "fabric": plan.fabric.value,
                    "bytes": plan.num_bytes,
                    "channels": [asdict(channel) for channel in plan.channels],
                    "wiring": list(plan.wiring),
                }
                for plan in graph.plans
            ],
        },
        "rounding": list(graph.rounding),
        "fallbacks": [asdict(fallback) for fallback in graph.fallbacks],
        "steps_us": dict(graph.steps_us),
        "unfused_us": graph.unfused_us,
        "predicted_us": graph.predicted_us,
        "exposed_us": {"before": before.exposed_us, "after": after.exposed_us},
        "work": [asdict(work) for work in graph.work],
        "work_failure": None if graph.work_failure is None else asdict(graph.work_failure),
        "layers": [_part(part) for part in parts(graph)] if graph.work else [],
        "headline": _headline(graph),
        "whole": _before_and_after(before, after) if graph.work else None,
        "timed": list(graph.timed),
        "kernels": [asdict(kernel) for kernel in graph.kernels],
        "tuned": graph.tuned,
        "doubts": [asdict(doubt) for doubt in graph.doubts],
        "sensitivity": [_sensitivity(found) for found in graph.sensitivity],
        "schedule_before": [asdict(task) for task in graph.schedule_before],
        "schedule": [asdict(task) for task in graph.schedule],
    }


def _headline(graph: GraphReport) -> Json:
    found = headline(graph)
    return {
        "before_us": found.before.us,
        "after_us": found.counting.us,
        "chosen_us": found.chosen.us,
        "never_ran": list(found.never_ran),
        "within_error": found.num_within_error,
    }


def _slots(plan: MemoryPlan) -> list[Json]:
    return [
        {
            "group": plan.group,
            "name": buffer.name,
            "offset": buffer.offset,
            "bytes": buffer.num_bytes,
            "owners": list(buffer.owners),
            "lifetime": buffer.lifetime.value,
            "first": buffer.first,
            "last": buffer.last,
            "fill": buffer.fill,
            "alignment": buffer.alignment,
            "zone_begin": buffer.zone_begin,
        }
        for buffer in plan.buffers
    ]


def _part(part: ReportPart) -> Json:
    times = _before_and_after(part.before, part.after)
    return {"name": part.name, "layers": list(part.layers), "count": part.count, **times}


def _before_and_after(before: Times, after: Times) -> dict[str, Json]:
    return {
        "before_us": before.us,
        "after_us": after.us,
        "exposed_before_us": before.exposed_us,
        "exposed_after_us": after.exposed_us,
    }


def _sensitivity(found: Sensitivity) -> Json:
    return {
        "sites": list(found.sites),
        "tokens": found.tokens,
        "choice": found.choice,
        "stretches": [asdict(stretch) for stretch in found.stretches],
        "constants": dict(found.constants),
    }


def _decision(decision: Decision) -> Json:
    site, chosen = decision.site, decision.chosen
    return {
        "id": site.id,
        "count": site.count,
        "module": site.module,
        "kind": site.kind,
        "rule": chosen.choice if decision.rewritten else None,
        "form": site.description,
        "groups": list(site.groups),
        "collectives": list(site.collectives),
        "tokens": asdict(site.tokens),
        "facts": dict(site.facts),
        "rejected": _rejections(site.rejections),
        **_candidate(chosen, rejected_key="choice_rejected"),
        "saving_us": decision.saving_us,
        "unfused_us": None if decision.baseline is None else decision.baseline.us,
        "unfused_exposed_us": None if decision.baseline is None else decision.baseline.exposed_us,
        "unfused_terms": None if decision.baseline is None else _terms(decision.baseline),
        "unfused_measured": None if decision.baseline is None else _measured(decision.baseline),
        "unfused_relative_error": None if decision.baseline is None else decision.baseline.relative_error,
        "alternatives": [_candidate(candidate) for candidate in decision.alternatives],
    }


def _candidate(candidate: Candidate, rejected_key: str = "rejected") -> dict[str, Json]:
    estimate = candidate.estimate
    return {
        "choice": candidate.choice,
        "fabric": candidate.fabric.value,
        "variant": candidate.variant,
        "parameters": dict(candidate.parameters),
        "table": [
            {"max_tokens": row.max_tokens, "variant": row.variant, "values": dict(row.values)}
            for row in candidate.table
        ],
        "notes": list(candidate.notes),
        "predicted_us": None if estimate is None else estimate.us,
        "exposed_us": None if estimate is None else estimate.exposed_us,
        "relative_error": None if estimate is None else estimate.relative_error,
        "saving_error_us": None if estimate is None else estimate.saving_error_us,
        "terms": None if estimate is None else _terms(estimate),
        "measured": None if estimate is None else _measured(estimate),
        rejected_key: _rejections(candidate.rejections),
    }


def _terms(estimate: Estimate) -> Json:
    """Terms, each with the error that each reading of the profile brings in: readings are numbered within the estimate,
    so that it is seen which terms are off together."""
    places: dict[Reading, str] = {}
    found: list[Json] = []
    for term in estimate.terms:
        errors: dict[str, Json] = {
            places.setdefault(reading, str(len(places))): us for reading, us in errors_of(term.us).items() if us
        }
        found.append({
            "name": term.name, "us": float(term.us), "source": term.source.value, "error_us": term.error_us,
            "errors_us": errors,
        })  # fmt: skip
    return found


def _measured(timed: Estimate | Variant) -> Json:
    found = timed.measured
    return None if found is None else {"us": found.us, "relative_error": found.relative_error}


def _rejections(rejections: Iterable[Rejection]) -> Json:
    return [{"code": r.code, "message": r.message, "values": dict(r.values)} for r in rejections]
