"""The report outside of a terminal: plain values, JSON, a notebook, the log, and torch's structured trace."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch

import weaveopt
from weaveopt.records.report import Fallback, Report
from weaveopt.reporting import document, events
from weaveopt.reporting.document_reader import from_json
from weaveopt.reporting.printed_report import printed


def test_dict_and_json_are_what_explain_writes(report: Report) -> None:
    shown = printed(report)
    assert shown.to_json() == document.to_json(report)
    assert json.loads(shown.to_json()) == shown.to_dict()
    assert from_json(shown.to_json()) == report


class _Page(HTMLParser):
    """The text of a page, and the tags that were not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_both_forms_escaped(report: Report) -> None:
    named = printed(Report("<b>model</b>", 2, report.machine, report.graphs))
    page = _Page()
    page.feed(named._repr_html_())
    assert page.open == [] and "<b>model</b>" in page.text
    for text in (str(named), named.full()):
        for line in text.splitlines():
            assert line in page.text, line


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_decisions_are_logged(report: Report, caplog: pytest.LogCaptureFixture) -> None:
    (graph,) = report.graphs
    with caplog.at_level(logging.WARNING, logger="weaveopt"):
        events.log(graph)
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger="weaveopt"):
        events.log(graph)
    (line,) = caplog.messages
    assert line.startswith(f"{graph.name} ({graph.phase}, 512 tokens): {graph.num_rewritten} of ")
    assert "all_reduce_rms_norm on shm ×" in line and f"-> {graph.predicted_us:,.1f} us" in line
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="weaveopt"):
        events.log(graph)
    num_sites = len(graph.decisions)
    assert [record.levelname for record in caplog.records] == ["INFO", *["DEBUG"] * (1 + 2 * num_sites)]
    head, *rows = caplog.messages[1 : 2 + num_sites]
    assert head.split() == " ".join(events.COLUMNS).split()
    for decision, row in zip(graph.decisions, rows, strict=True):
        assert row.split()[0] == decision.site.id and decision.chosen.choice in row
    for decision, message in zip(graph.decisions, caplog.messages[2 + num_sites :], strict=True):
        assert decision.site.id in message and decision.chosen.choice in message
        assert all(each.rejections[0].message in message for each in decision.alternatives if each.rejections)
    assert {record.name for record in caplog.records} == {"weaveopt"}


def test_a_step_that_failed_is_logged(report: Report, caplog: pytest.LogCaptureFixture) -> None:
    graph = report.graphs[0]
    failed = type(graph)(graph.name, graph.phase, 1, fallbacks=(Fallback(graph.name, "price", "KeyError: 'val'"),))
    with caplog.at_level(logging.INFO, logger="weaveopt"):
        events.log(failed)
    first, second = caplog.messages
    assert first == f"{graph.name} ({graph.phase}, 1 token): 0 of 0 sites rewritten"
    assert second == f"{graph.name} runs unrewritten, step price: KeyError: 'val'"


def test_each_compile_has_an_artifact_in_the_structured_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    trace, kept = logging.getLogger("torch.__trace"), _Kept()
    monkeypatch.setattr(torch._logging._internal, "trace_log", trace)  # off in other tests
    level = trace.level
    trace.addHandler(kept)
    trace.setLevel(logging.DEBUG)
    try:
        model = torch.compile(torch.nn.Linear(4, 4), backend="weave")
        with torch.no_grad():
            model(torch.ones(2, 4))
    finally:
        trace.removeHandler(kept)
        trace.setLevel(level)
    (graph,) = weaveopt.report(model).to_dict()["graphs"]
    found = {record.metadata["artifact"]["name"]: record for record in kept.records if "artifact" in record.metadata}
    record = found[f"weaveopt_{graph['name']}"]
    assert record.metadata["artifact"]["encoding"] == "json" and json.loads(record.payload) == graph
    assert {"frame_id", "frame_compile_id"} <= record.metadata.keys(), "tlparse files it with its compile"


@pytest.fixture(scope="module")
def elsewhere() -> subprocess.CompletedProcess[str]:
    """A process of its own that compiles a model, with weaveopt's log, and without what reads files.

    msgspec and jsonschema read files of users; GPU hosts without a network may lack them.
    """
    code = """
import sys
sys.modules["msgspec"] = sys.modules["jsonschema"] = None
import torch
model = torch.compile(torch.nn.Linear(4, 4), backend="weave")
with torch.no_grad():
    model(torch.ones(2, 4))
import weaveopt
print(len(weaveopt.report(model).to_dict()["graphs"]), weaveopt.report(model))
"""
    environment = {**os.environ, "TORCH_LOGS": "weaveopt", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=True)


def test_a_model_compiles_and_reports_without_what_reads_files(elsewhere: subprocess.CompletedProcess[str]) -> None:
    assert elsewhere.stdout.startswith("1 Linear on 1 rank"), elsewhere.stdout


def test_torch_logs_names_the_logger(elsewhere: subprocess.CompletedProcess[str]) -> None:
    """Which the backend makes known: the program imports torch alone before it compiles."""
    lines = [line for line in elsewhere.stderr.splitlines() if "0 of 0 sites rewritten" in line]
    assert len(lines) == 1 and lines[0].startswith("I"), elsewhere.stderr
