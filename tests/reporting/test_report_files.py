"""The report as JSON (structure, round trip, errors) and as a Chrome trace."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from itertools import pairwise

import pytest

from tests.graphs.nonempty import some
from weaveopt.errors import WeaveError
from weaveopt.records.candidate import Estimate, Fabric, Measured, Rejection, Scalar, TableRow, Term
from weaveopt.records.memory import Channel, Lifetime, PlacedBuffer
from weaveopt.records.report import ChoiceRange, Regime, Report, Sensitivity, Variant, WorkFailure
from weaveopt.records.site import TokenCounts
from weaveopt.records.task import ScheduledTask, Stream
from weaveopt.reporting import document as report_json
from weaveopt.reporting import timeline, trace
from weaveopt.reporting.document_reader import from_json

FIELDS = {
    "": {"schema", "model", "group", "machine", "graphs", "fallbacks"},
    "machine": {"name", "measured"},
    "graph": {
        *("phase", "tokens", "sites", "arena", "unfused_us", "predicted_us"),
        *("exposed_us", "work", "work_failure", "layers", "whole", "sensitivity", "variant", "variants"),
    },
    "site": {
        *("id", "count", "module", "kind", "groups", "rule", "choice", "fabric", "variant", "parameters"),
        *("tokens", "facts", "table", "notes"),
        *("unfused_us", "predicted_us", "terms", "alternatives"),
        *("unfused_exposed_us", "exposed_us"),
    },
    "alternative": {"choice", "fabric", "variant", "predicted_us", "exposed_us", "rejected", "table", "notes"},
    "rejection": {"code", "message", "values"},
    "arena": {"bytes", "slots", "groups"},
    "slot": {"group", "name", "offset", "bytes", "owners", "lifetime"},
}
"""Fields that a reader may rely on; more may be there."""
BEFORE = (
    ScheduledTask("gemm", Stream.COMPUTE, 0.0, 4.0, "mlp"),
    ScheduledTask("all_reduce", Stream.COMMUNICATION, 4.0, 5.0, "mlp"),
)
AFTER = (
    ScheduledTask("gemm", Stream.COMPUTE, 0.0, 2.0, "mlp"),
    ScheduledTask("all_reduce", Stream.COMMUNICATION, 2.0, 3.0, "mlp"),
    ScheduledTask("gemm", Stream.COMPUTE, 2.0, 2.5, "mlp"),
)


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
        "slot": graph["arena"]["slots"][0],
    }
    missing = {name: FIELDS[name] - set(part) for name, part in parts.items()}
    assert not any(missing.values()), missing
    assert document["schema"] == report_json.SCHEMA
    assert graph["num_collectives"] == 17
    assert (left["choice"], left["rule"], left["unfused_us"]) == ("leave", None, None)
    assert (site["choice"], site["rule"], site["kind"]) == ("all_reduce_rms_norm", "all_reduce_rms_norm", "reduction")
    assert (site["groups"], site["tokens"]) == (["0"], {"hint": 512, "least": 0, "most": 512})
    assert (site["facts"]["hidden"], site["variant"]) == (1024, "two_shot")
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
        "module": "model.layers.0.self_attn.qkv_proj", "kind": "gemm", "us": 40.0, "after": 1, "count": 1,
    }  # fmt: skip


def test_json_of_sites_alone_has_no_whole(report: Report) -> None:
    (graph,) = json.loads(report_json.to_json(report))["graphs"]
    assert (graph["work"], graph["layers"], graph["whole"]) == ([], [], None)
    assert graph["exposed_us"] == {"before": 4800.0, "after": 960.0}


def test_json_names_each_buffer_of_the_arena(report: Report) -> None:
    (plan,) = report.graphs[0].plans
    arena = json.loads(report_json.to_json(report))["graphs"][0]["arena"]
    slots = arena["slots"]
    assert [(slot["group"], slot["name"], slot["lifetime"]) for slot in slots] == [
        ("0", "partial", "arena"), ("0", "output", "call"),
    ]  # fmt: skip
    assert [(slot["offset"], slot["bytes"]) for slot in slots] == [(0, 2 << 20), (2 << 20, 2 << 20)]
    assert [slot["owners"] for slot in slots] == [list(buffer.owners) for buffer in plan.buffers]
    assert arena["groups"] == [
        {"group": "0", "fabric": "shm", "bytes": 4 << 20, "channels": [{"name": "main", "index": 0}], "wiring": []}
    ]


SENSITIVITY = Sensitivity(
    ("a", "b"),
    512,
    "leave",
    (ChoiceRange(1, "shm two_shot"), ChoiceRange(400, "leave")),
    (("memory bandwidth -20 %", "leave"),),
)


def test_json_round_trip_loses_nothing(report: Report, whole: Report) -> None:
    assert from_json(report_json.to_json(report)) == report
    asked = replace(whole, graphs=(replace(whole.graphs[0], sensitivity=(SENSITIVITY,)),))
    assert from_json(report_json.to_json(asked)) == asked
    failed = replace(report, graphs=(replace(report.graphs[0], work_failure=WorkFailure("KeyError", "'val'")),))
    text = report_json.to_json(failed)
    assert from_json(text) == failed
    assert json.loads(text)["graphs"][0]["work_failure"] == {"exception": "KeyError", "message": "'val'"}
    empty = Report("m", 2, None)
    assert from_json(report_json.to_json(empty)) == empty


def _other(value: Scalar) -> Scalar:
    return not value if isinstance(value, bool) else f"{value} other" if isinstance(value, str) else value + 1


def _survives(report: Report) -> dict[str, object]:
    """Record of the only graph, after a check that the report is read as it was written."""
    text = report_json.to_json(report)
    assert from_json(text) == report
    (graph,) = json.loads(text)["graphs"]
    assert isinstance(graph, dict)
    return graph


@pytest.mark.parametrize("name", ["world", "hidden", "dtype", "out_dtype", "has_residual"])
def test_every_fact_of_a_site_survives(report: Report, name: str) -> None:
    graph, decision = report.graphs[0], report.graphs[0].decisions[1]
    facts = {key: _other(value) if key == name else value for key, value in decision.site.facts}
    site = replace(decision.site, facts=tuple(facts.items()))
    document = _survives(replace(report, graphs=(replace(graph, decisions=(replace(decision, site=site),)),)))
    assert document["sites"][0]["facts"] == facts  # type: ignore[index]


@pytest.mark.parametrize("groups", [(), ("0", "1")], ids=["local", "two groups"])
@pytest.mark.parametrize("tokens", [TokenCounts(64), TokenCounts(64, 2, 8192)], ids=["one count", "many counts"])
def test_groups_and_token_counts_survive(report: Report, groups: tuple[str, ...], tokens: TokenCounts) -> None:
    graph, decision = report.graphs[0], report.graphs[0].decisions[1]
    site = replace(decision.site, groups=groups, tokens=tokens, kind="attention")
    document = _survives(replace(report, graphs=(replace(graph, decisions=(replace(decision, site=site),)),)))
    assert document["sites"][0]["tokens"] == asdict(tokens)  # type: ignore[index]


BUFFER = PlacedBuffer("mailboxes", 4096, 512, Lifetime.ARENA, ("a", "b"), 1, 3, None, 256, 2048)
CHANGED_BUFFERS = {
    "name": "staging", "offset": 8192, "num_bytes": 768, "lifetime": Lifetime.UNTIL_READ, "owners": (), "first": 0,
    "last": 9, "fill": 0x80000000, "alignment": 4096, "zone_begin": 4096,
}  # fmt: skip


@pytest.mark.parametrize("field", [f.name for f in fields(PlacedBuffer)])
def test_every_field_of_a_buffer_survives(report: Report, field: str) -> None:
    graph, plan = report.graphs[0], report.graphs[0].plans[0]
    buffers = (BUFFER, replace(BUFFER, **{field: CHANGED_BUFFERS[field]}))
    other = replace(plan, group="1", fabric=Fabric.PEER, channels=(Channel("main", 0), Channel("experts", 1)))
    plans = (replace(plan, buffers=buffers), replace(other, buffers=buffers[1:]))
    _survives(replace(report, graphs=(replace(graph, plans=plans),)))


def test_tables_and_notes_survive(report: Report) -> None:
    graph, decision = report.graphs[0], report.graphs[0].decisions[1]
    rows = (TableRow(24, "one_shot ll_packet"), TableRow(8192, "two_shot bulk", (("num_ctas", 64),)))
    chosen = replace(decision.chosen, fabric=Fabric.PEER, table=rows, notes=("no copy: of rows", "gather: of all"))
    decisions = (replace(decision, chosen=chosen, alternatives=(chosen,)),)
    document = _survives(replace(report, graphs=(replace(graph, decisions=decisions),)))
    site = document["sites"][0]  # type: ignore[index]
    assert site["table"][1] == {"max_tokens": 8192, "variant": "two_shot bulk", "values": {"num_ctas": 64}}
    assert site["notes"] == ["no copy: of rows", "gather: of all"] == site["alternatives"][0]["notes"]


def test_variants_and_regimes_survive(report: Report) -> None:
    slower = Rejection("no_saving", "the predicted saving does not exceed the model's own error", (("error_us", 2.5),))
    variants = (
        Variant("captured", "", 10.0, 8.0),
        Variant(
            "halves",
            "split",
            9.5,
            None,
            (slower,),
            (("cut", "4 + 4"),),
            1.5,
            12.5,
            added_us=0.5,
            measured=Measured(9.1, 0.02),
        ),
        Variant("x", "y"),
    )
    graph = replace(
        report.graphs[0], variants=variants, variant="halves", regime=Regime(2, None), schedule_before=BEFORE,
        schedule=AFTER,
    )  # fmt: skip
    document = _survives(replace(report, graphs=(graph,)))
    assert document["variant"] == "halves"
    assert document["variants"][1] == {  # type: ignore[index]
        "name": "halves", "rule": "split", "unfused_us": 9.5, "predicted_us": None, "exposed_us": 1.5,
        "unfused_steady_us": 12.5, "steady_us": None, "added_us": 0.5, "parameters": {"cut": "4 + 4"},
        "measured": {"us": 9.1, "relative_error": 0.02},
        "rejected": [{"code": slower.code, "message": slower.message, "values": {"error_us": 2.5}}],
    }  # fmt: skip
    assert document["schedule"][1] == {  # type: ignore[index]
        "name": "all_reduce", "stream": "communication", "start_us": 2.0, "us": 3.0, "module": "mlp",
    }  # fmt: skip


def test_reports_without_fields_that_a_reader_does_not_need_are_read(report: Report) -> None:
    """Sums for readers without our code; fields of only some reports."""
    document = json.loads(report_json.to_json(report))
    graph = document["graphs"][0]
    for name in ("exposed_us", "work", "work_failure", "layers", "whole", "sensitivity", "regime"):
        del graph[name]
    for site in graph["sites"]:
        del site["exposed_us"], site["unfused_exposed_us"], site["rule"], site["saving_us"]
    assert from_json(json.dumps(document)) == report


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema=99), "schema 99"),
        (lambda d: d.update(schema=1), "report has schema 1; this weaveopt reads schema 2"),
        (lambda d: d["graphs"][0].pop("tokens"), r"\$\.graphs\[0\]: no field 'tokens'"),
        (lambda d: d["graphs"][0].update(tokens="x"), r'\$\.graphs\[0\]\.tokens: found "x", expected an integer'),
        (
            lambda d: d["graphs"][0]["sites"][1].update(fabric="wire"),
            r'\.sites\[1\]\.fabric: found "wire", expected a value that',
        ),
    ],
)
def test_reading_names_the_field_that_is_wrong(report: Report, edit: object, message: str) -> None:
    document = json.loads(report_json.to_json(report))
    assert callable(edit)
    edit(document)
    with pytest.raises(WeaveError, match=message):
        from_json(json.dumps(document))


def test_reading_what_is_not_json() -> None:
    with pytest.raises(WeaveError, match="not JSON"):
        from_json("{")


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


def test_trace_of_a_variant_shows_what_runs_at_once(report: Report) -> None:
    """Its schedule in place of the sites one after the other, before and after."""
    graph = replace(report.graphs[0], schedule_before=BEFORE, schedule=AFTER)
    document = json.loads(trace.to_trace(replace(report, graphs=(graph,))))
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    found = [(e["pid"], e["cat"], e["ts"], e["ts"] + e["dur"]) for e in complete]
    assert found == [
        (0, "compute", 0.0, 4.0), (0, "communication", 4.0, 9.0),
        (1, "compute", 0.0, 2.0), (1, "communication", 2.0, 5.0), (1, "compute", 2.0, 4.5),
    ]  # fmt: skip
    assert {e["args"]["module"] for e in complete} == {"mlp"}
    assert document["otherData"]["graphs"][0]["covers"] == "the layers that were captured"


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
    for track in some({(e["pid"], e["tid"]) for e in complete}):
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if (e["pid"], e["tid"]) == track)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in some(pairwise(mine)))


def test_overlap_moves_communication_under_computation() -> None:
    estimate = Estimate((Term("gemm", 30.0), Term("reduce", 22.0), Term("overlapped", -10.0), Term("norm", 5.0)))
    gemm, reduce, norm = timeline.spans(estimate, 100.0)
    assert (gemm.start_us, reduce.start_us, norm.start_us) == (100.0, 120.0, 142.0)
    assert (gemm.stream, reduce.stream) == ("compute", "communication")
    assert norm.start_us + norm.duration_us == pytest.approx(100.0 + estimate.us)


def test_a_stand_in_is_told_and_read_again(report: Report) -> None:
    assert report.machine is not None
    stand_in = replace(report, machine=replace(report.machine, stands_in_for=("NVIDIA L40S", "NVIDIA A10")))
    text = report_json.to_json(stand_in)
    assert from_json(text) == stand_in
    document = json.loads(text)
    del document["machine"]["stands_in_for"]
    assert from_json(json.dumps(document)) == report, "a report of before"
