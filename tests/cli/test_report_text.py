"""The report as text: the golden table, and that nothing of it is lost at any width."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weaveopt.cli import reasons, render, why
from weaveopt.decision import Candidate, MachineSummary, Rejection, Report
from weaveopt.errors import OptionError

GOLDEN = Path(__file__).parent / "golden"


def test_the_table_is_the_golden_one(report: Report) -> None:
    assert render.text(report) == (GOLDEN / "report.txt").read_text(encoding="utf-8")


def test_why_is_the_golden_one(report: Report) -> None:
    assert why.text(report, "model.layers.1.mlp.down_proj") == (GOLDEN / "why.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [100, 120, 160, 240])
def test_no_column_and_no_reason_is_lost(report: Report, width: int) -> None:
    text = render.text(report, width)
    squeezed = "".join(text.split())
    header = next(line for line in text.splitlines() if line.startswith("site"))
    assert header.split() == ["site", "×", *["form", "choice", "fabric", "unfused", "us", "predicted", "us", "saved"]]
    for decision in report.graphs[0].decisions:
        rejected = [r for c in (decision.chosen, *decision.alternatives) for r in c.rejections]
        for rejection in (*decision.site.rejections, *rejected):
            assert rejection.code in squeezed
    assert "64%" in text
    assert all(len(line) <= width for line in text.splitlines())


def test_layers_of_a_kind_are_one_row_with_their_places_added_up(report: Report) -> None:
    rows = render.rows_of(report.graphs[0])
    assert [(row.module, row.count) for row in rows] == [
        ("model.embed_tokens", 1),
        ("model.layers.*.self_attn.o_proj", 8),
        ("model.layers.*.mlp.down_proj", 8),
    ]


def test_a_reason_is_told_once_with_the_range_of_its_values(report: Report) -> None:
    decision = report.graphs[0].decisions[1]

    def rejected(us: float, fabric_index: int) -> Candidate:
        candidate = decision.alternatives[fabric_index]
        return replace(candidate, rejections=(Rejection("no_saving", "too slow", (("us", us), ("tokens", 3))),))

    first = replace(decision, alternatives=(rejected(2.0, 1), rejected(7.5, 2)))
    second = replace(first, site=replace(first.site, id="other", count=5))
    (found,) = reasons.collect((first, second))
    assert found.num_places == 6
    assert found.sentence() == "too slow (us=2.0…7.5, tokens=3)"
    assert found.where({"shm": ["one_shot", "two_shot"], "peer": ["two_shot"]}) == "shm one_shot, peer"


def test_why_finds_by_id_module_and_kind_and_names_the_nearest_otherwise(report: Report) -> None:
    decisions = report.graphs[0].decisions
    assert [d for _, d in why.find(report, decisions[1].site.id)] == [decisions[1]]
    assert [d for _, d in why.find(report, "model.layers.*.mlp.down_proj")] == [decisions[2], decisions[4]]
    assert [d for _, d in why.find(report, "o_proj")] == [decisions[1], decisions[3]]
    with pytest.raises(OptionError, match=r"did you mean 'model\.embed_tokens'"):
        why.find(report, "model.embed_token_")


def test_fallbacks_and_missing_parts_are_said(report: Report) -> None:
    assert "ValueError: odd" in render.text(report)
    bare = Report("m", 2, MachineSummary("h", True))
    assert "every constant measured" in render.text(bare)
    assert "no graph was compiled yet" in render.text(bare)
