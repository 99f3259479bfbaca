"""The command on a terminal: a progress bar on stderr, and a width and colors that can be asked for."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from weaveopt.cli import explain, question
from weaveopt.cli.main import parser


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that asks for nothing."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


@pytest.mark.parametrize("watched", [True, False])
def test_steps_are_shown_where_somebody_watches(watched: bool, plain: pytest.MonkeyPatch) -> None:
    stream = Terminal() if watched else io.StringIO()
    plain.setattr(sys, "stderr", stream)
    with explain._progress() as on_step:
        on_step("tracing the forward pass")
    assert ("tracing the forward pass" in stream.getvalue()) is watched
    assert bool(stream.getvalue()) is watched


def _console(*words: str) -> tuple[int, bool]:
    args = parser().parse_args(["explain", "llama-3.3-70b", *words])
    del args.command
    return explain._console(question.question(args))


def test_columns_and_no_color_reach_the_report(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain.setattr(sys, "stdout", Terminal())
    plain.setenv("COLUMNS", "72")
    assert _console() == (72, True)
    assert _console("--output", str(tmp_path / "report.txt")) == (72, False)
    plain.setenv("NO_COLOR", "1")
    assert _console() == (72, False)
    plain.delenv("NO_COLOR")
    plain.setattr(sys, "stdout", io.StringIO())
    assert _console() == (72, False)
