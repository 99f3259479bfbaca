"""`WEAVE_DEBUG`: decisions as a table, the graph after each step that changed it, each operator call."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterator

import pytest
import torch

import weaveopt
from tests.graphs import forms
from tests.graphs.preview import previewed
from tests.ranks import run_ranks
from weaveopt import debug
from weaveopt.errors import WeaveError
from weaveopt.reporting.events import COLUMNS, LOGGER


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    before = LOGGER.level, LOGGER.propagate, [*LOGGER.handlers]
    yield monkeypatch
    LOGGER.level, LOGGER.propagate, LOGGER.handlers = before
    LOGGER.manager._clear_cache()  # type: ignore[attr-defined]


def _told(level: pytest.MonkeyPatch, value: str, capsys: pytest.CaptureFixture[str]) -> str:
    level.setenv(debug.VARIABLE, value)
    level.delenv("RANK", raising=False)
    weights = forms.make_weights(torch.float32)
    x, residual = torch.ones(1, 5, forms.INNER), torch.ones(1, 5, forms.HIDDEN)
    previewed(lambda x, r: forms.pre_norm(weights, x, r), (x, residual))
    return capsys.readouterr().err


def test_one_shows_decisions_as_a_table(level: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _told(level, "1", capsys).splitlines()
    assert all(line.startswith("[weaveopt] ") for line in lines) and lines
    (head,) = (line for line in lines if line.split()[1:] == " ".join(COLUMNS).split())
    row = lines[lines.index(head) + 1]
    assert "all_reduce_rms_norm on shm" in row and "reduction" in row
    assert re.search(r"not .*: \w+: ", "\n".join(lines)), "no reason against any candidate"
    assert not any("step" in line for line in lines)


def test_two_shows_the_graph_after_each_step_that_changed_it(
    level: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _told(level, "2", capsys)
    steps = re.findall(r"step (\w+): [\d.]+ us", text)
    assert steps == ["capture", "context", "recognize", "tune", "regime", "price", "decide", "variants", "choose",
                     "plan", "agree", "rewrite"]  # fmt: skip
    changed = re.findall(r"graph 0 after step (\w+)", text)
    assert changed == ["capture", "rewrite"]
    before, after = text.split("after step capture")[1].split("after step rewrite")
    assert "all_reduce" in before and "weave." not in before
    assert "weave." in after


def test_nothing_is_said_unasked(level: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _told(level, "0", capsys) == "" and _told(level, "", capsys) == ""


def test_another_value_is_refused(level: pytest.MonkeyPatch) -> None:
    level.setenv(debug.VARIABLE, "verbose")
    with pytest.raises(WeaveError, match="WEAVE_DEBUG=verbose: expected 0, 1, 2 or 3"):
        torch.compile(lambda x: x + 1, backend="weave")(torch.ones(2))


def _calls(rank: int) -> list[str]:
    os.environ[debug.VARIABLE] = "3"
    sys.stderr = io.StringIO()
    weights = forms.make_weights(torch.float32)
    x, residual = torch.ones(1, 5, forms.INNER), torch.ones(1, 5, forms.HIDDEN)
    options = {"force": ["all_reduce_rms_norm"]}
    compiled = torch.compile(lambda x, r: forms.pre_norm(weights, x, r), backend="weave", options=options)  # type: ignore[call-overload]
    with torch.no_grad():
        for _ in range(2):
            compiled(x, residual)
    assert weaveopt.report().graphs[0].num_rewritten == 1
    assert LOGGER.level == debug.CALLS < logging.DEBUG
    return [line for line in sys.stderr.getvalue().splitlines() if "] weave." in line]


def test_three_shows_each_operator_call() -> None:
    for rank, calls in enumerate(run_ranks(_calls, 2, own=True)):
        assert len(calls) == 2, calls
        assert all(line.startswith(f"[weaveopt rank {rank}] weave.mm_all_reduce_norm") for line in calls), calls
        assert all(f"float32[5, {forms.INNER}]" in line or f"float32[1, 5, {forms.HIDDEN}]" in line for line in calls)
        assert all('"fabric"' in line or "shm" in line for line in calls), calls
