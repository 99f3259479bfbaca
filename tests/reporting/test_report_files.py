"""The report as JSON (structure, round trip, errors) and as a Chrome trace."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise

import pytest

from weaveopt.errors import WeaveError
from weaveopt.records.candidate import Algorithm, Estimate, Fabric, Form, Lowering, Term
from weaveopt.records.memory import Placement, RegionNeed, Slot
from weaveopt.records.report import Report, Sensitivity, Stretch, WorkFailure
from weaveopt.records.site import Workload
from weaveopt.reporting import document as report_json
from weaveopt.reporting import timeline, trace

FIELDS = {
    "": {"schema", "model", "group", "machine", "graphs", "fallbacks"},
    "machine": {"name", "measured"},
    "graph": {
        *("phase", "tokens", "sites", "arena", "unfused_us", "predicted_us"),
        *("exposed_us", "work", "work_failure", "layers", "whole", "sensitivity"),
    },
    "site": {
        *("id", "count", "module", "rule", "choice", "fabric", "parameters"),
        *("unfused_us", "predicted_us", "terms", "alternatives"),
        *("unfused_exposed_us", "exposed_us"),
    },
    "alternative": {"choice", "fabric", "predicted_us", "exposed_us", "rejected"},
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


def test_json_tells_what_is_exposed_by_layer_and_in_all(whole: Report) -> None:
    (graph,) = json.loads(report_json.to_json(whole))["graphs"]
    assert (graph["sites"][1]["unfused_exposed_us"], graph["sites"][1]["exposed_us"]) == (300.0, 60.0)
    assert graph["sites"][0]["exposed_us"] is None
    assert graph["exposed_us"] == {"before": 4860.0, "after": 1020.0}
    assert graph["layers"][1] == {
        "name": "layers 0…1", "layers": [0, 1], "count": 8,
        "before_us": 1061.0, "after_us": 480.0, "exposed_before_us": 600.0, "exposed_after_us": 120.0,
    }  # fmt: skip
    assert (graph["whole"]["before_us"], graph["whole"]["after_us"]) == (8751.0, 4103.0)
    assert graph["work"][1] == {
        "module": "model.layers.0.self_attn.qkv_proj", "kind": "product", "us": 40.0, "after": 1, "count": 1,
    }  # fmt: skip


def test_json_of_sites_alone_has_no_whole(report: Report) -> None:
    (graph,) = json.loads(report_json.to_json(report))["graphs"]
    assert (graph["work"], graph["layers"], graph["whole"]) == ([], [], None)
    assert graph["exposed_us"] == {"before": 4800.0, "after": 960.0}


def test_json_names_each_slot_of_the_arena(report: Report) -> None:
    graph = report.graphs[0]
    slots = json.loads(report_json.to_json(report))["graphs"][0]["arena"]["slots"]
    assert [slot["name"] for slot in slots] == ["partial results (two buffers)", "output rows"]
    assert [(slot["offset"], slot["bytes"]) for slot in slots] == [(0, 2 << 20), (2 << 20, 2 << 20)]
    assert slots[0]["owners"] == list(graph.plans[0].slots[0].owners)
    regions = RegionNeed(mailbox_bytes=256, output_bytes=512)
    moved = (Slot(65536, 768, ()), Slot(66304, 512, ()))
    plan = replace(graph.plans[0], fabric=Fabric.PEER, regions=regions, slots=moved)
    document = json.loads(report_json.to_json(replace(report, graphs=(replace(graph, plans=(plan,)),))))
    assert [slot["name"] for slot in document["graphs"][0]["arena"]["slots"]] == ["2 mailboxes", "output"]


SENSITIVITY = Sensitivity(
    ("a", "b"),
    512,
    "leave",
    (Stretch(1, "shm two_shot"), Stretch(400, "leave")),
    (("memory bandwidth -20 %", "leave"),),
)


def test_json_round_trip_loses_nothing(report: Report, whole: Report) -> None:
    assert report_json.from_json(report_json.to_json(report)) == report
    asked = replace(whole, graphs=(replace(whole.graphs[0], sensitivity=(SENSITIVITY,)),))
    assert report_json.from_json(report_json.to_json(asked)) == asked
    failed = replace(report, graphs=(replace(report.graphs[0], work_failure=WorkFailure("KeyError", "'val'")),))
    text = report_json.to_json(failed)
    assert report_json.from_json(text) == failed
    assert json.loads(text)["graphs"][0]["work_failure"] == {"exception": "KeyError", "message": "'val'"}
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
    for name in ("exposed_us", "work", "work_failure", "layers", "whole", "sensitivity"):
        del graph[name]
    for group in graph["arena"]["groups"]:
        del group["fabric"], group["regions"]
    for site in graph["sites"]:
        del site["lowerings"], site["exposed_us"], site["unfused_exposed_us"]
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


def test_trace_of_the_whole_model_ends_with_its_totals(whole: Report) -> None:
    document = json.loads(trace.to_trace(whole))
    complete = [e for e in document["traceEvents"] if e["ph"] == "X"]
    (told,) = document["otherData"]["graphs"]
    assert told == {
        "name": "graph_0", "covers": "the whole model", "before_us": 8751.0, "after_us": 4103.0,
        "exposed_before_us": 4860.0, "exposed_after_us": 1020.0,
    }  # fmt: skip
    for process, expected_us in ((0, 8751.0), (1, 4103.0)):
        mine = [e for e in complete if e["pid"] == process]
        assert max(e["ts"] + e["dur"] for e in mine) == pytest.approx(expected_us)
        # Work is the same before and after: 1 + 8 layers of 4 + 2.
        assert sum("kind" in e["args"] for e in mine) == 35
    first = [e["args"]["module"] for e in complete if e["pid"] == 1][:3]
    assert first == ["model.embed_tokens", "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn"]
    repeated = [e for e in complete if e["pid"] == 0 and e["args"]["module"] == "model.layers.1.self_attn"]
    assert [e["args"]["repetition"] for e in repeated] == list(range(7))
    assert all(isinstance(e[key], int | float) for e in complete for key in ("ts", "dur", "pid", "tid"))


def test_trace_of_sites_alone_says_so(report: Report) -> None:
    document = json.loads(trace.to_trace(report))
    assert document["otherData"]["graphs"][0]["covers"] == "the sites alone"
    labels = [e["args"]["labels"] for e in document["traceEvents"] if e["name"] == "process_labels"]
    assert labels == [
        "4,800.0 us of communication exposed (67%)",
        "960.0 us of communication exposed (38%)",
    ]


def test_events_of_one_stream_never_overlap(whole: Report) -> None:
    complete = [e for e in json.loads(trace.to_trace(whole))["traceEvents"] if e["ph"] == "X"]
    for track in {(e["pid"], e["tid"]) for e in complete}:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if (e["pid"], e["tid"]) == track)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(mine))


def test_overlap_moves_communication_under_computation() -> None:
    estimate = Estimate((Term("gemm", 30.0), Term("reduce", 22.0), Term("overlapped", -10.0), Term("norm", 5.0)))
    gemm, reduce, norm = timeline.spans(estimate, 100.0)
    assert (gemm.start_us, reduce.start_us, norm.start_us) == (100.0, 120.0, 142.0)
    assert (gemm.stream, reduce.stream) == ("compute", "communication")
    assert norm.start_us + norm.duration_us == pytest.approx(100.0 + estimate.us)
