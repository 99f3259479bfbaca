"""The report as JSON (structure, round trip, errors) and as a Chrome trace."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise

import pytest

from weaveopt.cli import report_json, trace
from weaveopt.decision import (
    Algorithm,
    Estimate,
    Fabric,
    Form,
    Lowering,
    Placement,
    RegionNeed,
    Report,
    Term,
    Workload,
)
from weaveopt.errors import WeaveError

FIELDS = {
    "": {"schema", "model", "group", "machine", "graphs", "fallbacks"},
    "machine": {"name", "measured"},
    "graph": {"phase", "tokens", "sites", "arena", "unfused_us", "predicted_us"},
    "site": {
        *("id", "count", "module", "rule", "choice", "fabric", "parameters"),
        *("unfused_us", "predicted_us", "terms", "alternatives"),
    },
    "alternative": {"choice", "fabric", "predicted_us", "rejected"},
    "rejection": {"code", "message", "values"},
    "arena": {"bytes", "slots"},
}
"""What a reader may rely on; more may be there."""


def test_json_has_the_promised_fields(report: Report) -> None:
    document = json.loads(report_json.to_json(report))
    graph = document["graphs"][0]
    left, site = graph["sites"][0], graph["sites"][1]
    alternative = site["alternatives"][2]
    parts = {
        "": document,
        "machine": document["machine"],
        "graph": graph,
        "site": site,
        "alternative": alternative,
        "rejection": alternative["rejected"][0],
        "arena": graph["arena"],
    }
    missing = {name: FIELDS[name] - set(part) for name, part in parts.items()}
    assert not any(missing.values()), missing
    assert document["schema"] == report_json.SCHEMA
    assert graph["num_collectives"] == 17
    assert (left["choice"], left["unfused_us"]) == ("leave", None)
    assert site["predicted_us"] == pytest.approx(sum(term["us"] for term in site["terms"]))
    assert graph["arena"]["bytes"] == 4 << 20


def test_json_round_trip_loses_nothing(report: Report) -> None:
    assert report_json.from_json(report_json.to_json(report)) == report
    empty = Report("m", 2, None)
    assert report_json.from_json(report_json.to_json(empty)) == empty


@pytest.mark.parametrize("field", [f.name for f in fields(Workload) if f.name not in ("dtype", "product")])
def test_every_field_of_a_workload_survives(report: Report, field: str) -> None:
    graph, decision = report.graphs[0], report.graphs[0].decisions[1]
    assert decision.site.workload is not None
    before = getattr(decision.site.workload, field)
    after = "float32" if field == "out_dtype" else not before if isinstance(before, bool) else before + 1
    workload = replace(decision.site.workload, **{field: after})
    changed = replace(graph, decisions=(replace(decision, site=replace(decision.site, workload=workload)),))
    altered = replace(report, graphs=(changed,))
    assert report_json.from_json(report_json.to_json(altered)) == altered


@pytest.mark.parametrize("field", [f.name for f in fields(Placement) if f.name != "site"])
def test_every_field_of_a_placement_survives(report: Report, field: str) -> None:
    graph, plan = report.graphs[0], report.graphs[0].plans[0]
    before = getattr(plan.placements[0], field)
    placement = replace(plan.placements[0], **{field: not before if isinstance(before, bool) else before + 1})
    altered = replace(report, graphs=(replace(graph, plans=(replace(plan, placements=(placement,)),)),))
    assert report_json.from_json(report_json.to_json(altered)) == altered


@pytest.mark.parametrize("field", [f.name for f in fields(RegionNeed)])
def test_regions_and_tables_survive(report: Report, field: str) -> None:
    graph, plan, decision = report.graphs[0], report.graphs[0].plans[0], report.graphs[0].decisions[1]
    plan = replace(plan, fabric=Fabric.PEER, regions=replace(RegionNeed(), **{field: 512}))
    rows = (
        Lowering(24, Algorithm.ONE_SHOT, Form.MAIL),
        Lowering(8192, Algorithm.TWO_SHOT, Form.BULK, 64),
    )
    chosen = replace(decision.chosen, fabric=Fabric.PEER, lowerings=rows)
    altered = replace(report, graphs=(replace(graph, plans=(plan,), decisions=(replace(decision, chosen=chosen),)),))
    text = report_json.to_json(altered)
    assert report_json.from_json(text) == altered
    document = json.loads(text)["graphs"][0]
    assert document["arena"]["groups"][0]["regions"][field] == 512
    assert document["sites"][0]["lowerings"][1] == {
        "max_tokens": 8192, "algorithm": "two_shot", "form": "bulk", "num_ctas": 64,
    }  # fmt: skip


def test_reports_without_the_later_fields_are_read(report: Report) -> None:
    document = json.loads(report_json.to_json(report))
    graph = document["graphs"][0]
    for group in graph["arena"]["groups"]:
        del group["fabric"], group["regions"]
    for site in graph["sites"]:
        del site["lowerings"]
        for alternative in site["alternatives"]:
            del alternative["lowerings"]
        if site["workload"]:
            del site["workload"]["out_dtype"]
    assert report_json.from_json(json.dumps(document)) == report


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema=99), "schema 99"),
        (lambda d: d["graphs"][0].pop("tokens"), r"\$\.graphs\[0\]: no field 'tokens'"),
        (lambda d: d["graphs"][0].update(tokens="x"), r'\$\.graphs\[0\]\.tokens: found "x", expected an integer'),
        (lambda d: d["graphs"][0]["sites"][1].update(fabric="wire"), r"fabric: found 'wire', expected one of multimem"),
    ],
)
def test_reading_names_the_field_that_is_wrong(report: Report, edit: object, message: str) -> None:
    document = json.loads(report_json.to_json(report))
    assert callable(edit)
    edit(document)
    with pytest.raises(WeaveError, match=message):
        report_json.from_json(json.dumps(document))


def test_reading_what_is_not_json() -> None:
    with pytest.raises(WeaveError, match="not JSON"):
        report_json.from_json("{")


def test_trace_is_valid_and_adds_up(report: Report) -> None:
    events = json.loads(trace.to_trace(report))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"M", "X"}
    assert all(e["ts"] >= 0 and e["dur"] > 0 and names[e["pid"], e["tid"]] == e["cat"] for e in complete)
    for process, expected_us in ((0, report.graphs[0].unfused_us), (1, report.graphs[0].predicted_us)):
        ends = [e["ts"] + e["dur"] for e in complete if e["pid"] == process]
        assert max(ends) == pytest.approx(expected_us)
    # 16 sites with an estimate, three terms before, two and an overlap after.
    assert sum(e["pid"] == 0 for e in complete) == 16 * 3
    assert sum(e["pid"] == 1 for e in complete) == 16 * 2


def test_events_of_one_stream_never_overlap(report: Report) -> None:
    complete = [e for e in json.loads(trace.to_trace(report))["traceEvents"] if e["ph"] == "X"]
    for track in {(e["pid"], e["tid"]) for e in complete}:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if (e["pid"], e["tid"]) == track)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(mine))


def test_overlap_moves_communication_under_computation() -> None:
    estimate = Estimate((Term("gemm", 30.0), Term("reduce", 22.0), Term("overlapped", -10.0), Term("norm", 5.0)))
    gemm, reduce, norm = trace.spans(estimate, 100.0)
    assert (gemm.start_us, reduce.start_us, norm.start_us) == (100.0, 120.0, 142.0)
    assert (gemm.stream, reduce.stream) == ("compute", "communication")
    assert norm.start_us + norm.duration_us == pytest.approx(100.0 + estimate.us)
