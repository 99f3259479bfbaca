"""`weaveopt explain` on machines that nobody measured: the page's table of what is split, and by how much."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.graphs.preview import without_sensitivity
from weaveopt import cost_model
from weaveopt.cli.main import main
from weaveopt.records.report import GraphReport, Report
from weaveopt.reporting import why
from weaveopt.reporting.document_reader import from_json

PAGE = Path(__file__).resolve().parents[2] / "docs" / "small-machines.md"
ROW = re.compile(r"^\| `(\S+)` \| `(--tp [^`]*)` \| (\d+) % \| ([\d.]*) ?\| `?(\w+)`? \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


@cache
def _explained(words: str) -> GraphReport:
    with tempfile.TemporaryDirectory() as folder, without_sensitivity():
        file = Path(folder) / "report.json"
        given = ["llama-3.3-70b", *words.split(), "--layers", "2", "--format", "json", "--output", str(file)]
        assert main(["explain", *given]) == 0
        [graph] = from_json(file.read_text(encoding="utf-8")).graphs
    return graph


def test_the_page_has_the_machines() -> None:
    machines = ["rtx4090x4", "rtx4090x8", "l40sx4", "l40sx8", "a800x4", "a100x4-slingshot"]
    assert [machine for machine, *_ in ROWS] == machines


@pytest.mark.parametrize(("machine", "options", "exposed", "times", "found"), ROWS, ids=[row[0] for row in ROWS])
def test_the_page_says_what_explain_predicts(machine: str, options: str, exposed: str, times: str, found: str) -> None:
    graph = _explained(f"--machine {machine} {options} --seq 4096")
    captured, split = graph.variants
    assert captured.predicted_us is not None and captured.exposed_us is not None
    assert f"{100 * captured.exposed_us / captured.predicted_us:.0f}" == exposed
    if found == "split":
        assert graph.variant == split.name == "token_split by sequence" and split.predicted_us is not None
        assert f"{captured.predicted_us / split.predicted_us:.2f}" == times
    else:
        assert graph.variant == captured.name
        [against] = split.rejections
        values = {name: float(us) for name, us in against.values if name != "cut"}
        given = f"{values['captured_us'] / values['predicted_us']:.2f}" if "predicted_us" in values else ""
        assert (against.code, given) == (found, times)


@pytest.mark.parametrize(("machine", "turns"), [("l40sx4 --tp 4", (4.0, 2.0)), ("rtx4090x8 --tp 8", (1.5, None))])
def test_what_would_turn_the_choice(machine: str, turns: tuple[float, float | None]) -> None:
    """A faster link leaves less to hide, or is no longer the bound; GEMMs that are slowed down more save nothing."""
    graph = _explained(f"--machine {machine} --seq 4096")
    values = dict(graph.variants[1].parameters or graph.variants[1].rejections[0].values)
    assert (values["turns_at_link"], values.get("turns_at_contention")) == turns
    report = Report("llama", 4, None, (graph,))
    text = why.text(report, "token_split", width=200)
    assert "captured: " in text and f"with {turns[0]} times the link's bandwidth another graph is best" in text
    assert ("where GEMMs take 2.0 times as long" in text) is (turns[1] is not None)


def test_a_step_of_decode_is_left_whole() -> None:
    graph = _explained("--machine l40sx4 --tp 4 --phase decode --batch 8")
    assert graph.variant == "captured"
    assert [each.code for each in graph.variants[1].rejections] == ["nothing_exposed"]


@pytest.mark.parametrize("machine", [machine for machine, *_ in ROWS if machine != "a800x4"])
def test_assumed_contention_is_named_as_assumed(machine: str) -> None:
    assert "assumed" in dict(cost_model.load(machine).summary().origins)["contention"]
