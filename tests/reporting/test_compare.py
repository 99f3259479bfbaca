"""Two reports side by side, and what is said of files that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from weaveopt.cli.main import main
from weaveopt.records.report import Report, WorkFailure
from weaveopt.reporting import compare
from weaveopt.reporting import document as report_json


def _written(report: Report, path: Path) -> Path:
    path.write_text(report_json.to_json(report), encoding="utf-8")
    return path


def _with_left(report: Report) -> Report:
    """The same, but every o_proj is left, and half the kernels outside the sites."""
    graph = report.graphs[0]
    decisions = tuple(
        replace(d, chosen=d.alternatives[0]) if d.site.module.endswith("o_proj") else d for d in graph.decisions
    )
    work = tuple(replace(each, us=each.us / 2) for each in graph.work)
    return replace(report, model="other", graphs=(replace(graph, decisions=decisions, work=work),))


def _squeezed(left: Path, right: Path) -> list[str]:
    return [" ".join(line.split()) for line in compare.text(left, right, 200).splitlines()]


def test_a_report_differs_from_itself_in_nothing(whole: Report, tmp_path: Path) -> None:
    file = _written(whole, tmp_path / "a.json")
    lines = _squeezed(file, file)
    assert "3 kinds of sites: 0 decided otherwise (≠)" in lines
    assert "B/A, sites: before 1.00, after 1.00" in lines
    assert "B/A, whole model: before 1.00, after 1.00" in lines
    assert not any(" ≠ " in line for line in lines)


def test_what_is_decided_otherwise_is_marked_with_both_predictions(whole: Report, tmp_path: Path) -> None:
    left, right = _written(whole, tmp_path / "a.json"), _written(_with_left(whole), tmp_path / "b.json")
    lines = _squeezed(left, right)
    assert lines[0] == f"A: {left}: tiny on 2 ranks, cpu"
    assert lines[1] == f"B: {right}: other on 2 ranks, cpu"
    (marked,) = (line for line in lines if " ≠ " in line)
    assert marked.startswith("model.layers.*.self_attn.o_proj ≠ 8 8 all_reduce_rms_norm two_shot (shm)")
    assert marked.endswith("leave (library) 160.0 450.5 2.82")
    assert "3 kinds of sites: 1 decided otherwise (≠)" in lines
    assert "A sites: 7,208.0 -> 2,560.0 us" in lines
    assert "B sites: 7,208.0 -> 4,884.0 us" in lines
    assert any(line.startswith("A whole model: 8,751.0 -> 4,103.0 us, 2.13 times as fast") for line in lines)
    assert any(line.startswith("B whole model: 7,979.5 -> 5,655.5 us, 1.41 times as fast") for line in lines)
    assert "B/A, whole model: before 0.91, after 1.38" in lines


def test_a_failed_estimate_of_the_work_outside_the_sites_is_told(whole: Report, tmp_path: Path) -> None:
    failed = replace(whole.graphs[0], work=(), work_failure=WorkFailure("KeyError", "'val'"))
    right = _written(replace(whole, graphs=(failed,)), tmp_path / "b.json")
    lines = _squeezed(_written(whole, tmp_path / "a.json"), right)
    at = lines.index("whole model: not predicted in B")
    assert lines[at + 1] == "B: the work outside the sites of graph_0 could not be estimated: KeyError: 'val'"


def test_sites_and_graphs_of_one_side_only(report: Report, tmp_path: Path) -> None:
    graph = report.graphs[0]
    fewer = replace(report, graphs=(replace(graph, tokens=64, decisions=graph.decisions[1:]),))
    more = replace(report, graphs=(*report.graphs, replace(graph, phase="decode", tokens=8)))
    lines = _squeezed(_written(fewer, tmp_path / "a.json"), _written(more, tmp_path / "b.json"))
    assert "A: prefill, 64 tokens; B: prefill, 512 tokens" in lines
    assert "model.embed_tokens ≠ - 1 - leave (library) - -" in lines
    assert "only in B: decode, 8 tokens" in lines
    assert "whole model: not predicted in A and B" in lines


def test_kinds_of_one_module_are_paired_in_order(report: Report) -> None:
    graph = report.graphs[0]
    last = replace(graph.decisions[4], baseline=None)
    two_kinds = replace(graph, decisions=(*graph.decisions[:4], last))
    pairs = compare.pairs(two_kinds, graph)
    assert [(pair.module, pair.left is None, pair.right is None) for pair in pairs] == [
        ("model.embed_tokens", False, False),
        ("model.layers.*.self_attn.o_proj", False, False),
        ("model.layers.*.mlp.down_proj", False, False),
        ("model.layers.*.mlp.down_proj", False, True),
    ]
    assert [pair.differs for pair in pairs] == [False, False, False, True]


@pytest.mark.parametrize("width", [100, 120, 240])
def test_every_width_keeps_every_column(whole: Report, tmp_path: Path, width: int) -> None:
    left, right = _written(whole, tmp_path / "a.json"), _written(_with_left(whole), tmp_path / "b.json")
    text = compare.text(left, right, width)
    assert "2.82" in text and "4,884.0" in text and "450.5" in text
    table = [line for line in text.splitlines() if not line.startswith(("A", "B"))]
    assert all(len(line) <= width for line in table)


def test_from_the_command_line_to_a_file(whole: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = _written(whole, tmp_path / "a.json"), _written(_with_left(whole), tmp_path / "b.json")
    assert main(["explain", "--compare", str(left), str(right)]) == 0
    printed = capsys.readouterr().out
    assert "1 decided otherwise" in printed
    out = tmp_path / "c.txt"
    assert main(["explain", "--compare", str(left), str(right), "--output", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == printed


def _error(left: Path, right: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["explain", "--compare", str(left), str(right)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("weaveopt: error: --compare ")
    return captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe\x00", "cannot be read: not UTF-8 text"),
        (b"", "line 1, column 1: not JSON: Input data was truncated"),
        (b"{", "line 1, column 2: not JSON: Input data was truncated"),
        ('{"é": 1,\n "schema" 2}'.encode(), "line 2, column 11: not JSON: expected ':'"),
        (b"[" * 100_000, "not JSON that can be read: nested too deeply"),
        (b'{"schema": 2, "graphs": ' + b"[" * 990 + b"]" * 990 + b"}", "$"),
        (b'{"schema": 2,\n "model": ' + b'{"a": ' * 990 + b"1" + b"}" * 990 + b"}", "$"),
        (b'{"schema":\n ' + b"2" * 5000 + b"}", "line 2, column 2: found a number of 5000 digits, expected an integer"),
        (b'{"schema": ' + b"2" * 4000 + b"}", "$.schema: found 2222222222"),
        (b'{"schema": 2, "world": 1e999}', "$.world: found Infinity, expected a finite number"),
        (b'{"schema": 2, "schema": 2}', "not JSON that can be read: two fields 'schema'"),
        (b"[]", "$: found [], expected an object"),
        (b"3", "$: found 3, expected an object"),
        (b"{}", "$: no field 'schema'"),
        (b'{"schema": 99}', "schema 99"),
        (b'{"schema": 1}', "report has schema 1; this weaveopt reads schema 2"),
        (b'{"schema": "1"}', "$.schema: found"),
        (b'{"schema": 2}', "$: no field"),
    ],
)
def test_files_that_are_no_report(
    content: bytes | None, message: str, report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = _written(report, tmp_path / "good.json"), tmp_path / "bad.json"
    if content is not None:
        bad.write_bytes(content)
    for pair in ((good, bad), (bad, good)):
        error = _error(*pair, capsys)
        assert message in error or (message == "$" and "nested too deeply" in error), error
        assert str(bad) in error and str(good) not in error and len(error) < 400


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda g: g.update(tokens="x"), '$.graphs[0].tokens: found "x", expected an integer'),
        (lambda g: g.update(tokens=10**40), "expected an integer of 64 bits"),
        (lambda g: g.update(sites={}), "$.graphs[0].sites: found {}, expected a list"),
        (lambda g: g["work"][0].update(us="fast"), '$.graphs[0].work[0].us: found "fast", expected a number'),
        (lambda g: g["work"][0].update(us=float("nan")), ": not JSON: invalid character"),
        (lambda g: g["work"][0].pop("kind"), "$.graphs[0].work[0]: no field 'kind'"),
        (lambda g: g.update(work=7), "$.graphs[0].work: found 7, expected a list"),
        (lambda g: g.update(sensitivity=[1]), "$.graphs[0].sensitivity[0]: found 1, expected an object"),
        (lambda g: g["sites"][1]["terms"][0].update(us=None), "terms[0].us: found null, expected a number"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(
    edit: Callable[[dict[str, object]], object],
    message: str,
    whole: Report,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = json.loads(report_json.to_json(whole))
    edit(document["graphs"][0])
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(document), encoding="utf-8")
    assert message in _error(_written(whole, tmp_path / "good.json"), bad, capsys)
