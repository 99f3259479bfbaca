"""README and docs show `weaveopt explain` as the command prints it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from weaveopt.cli import explain, question
from weaveopt.cli.main import parser
from weaveopt.cli.question import ExplainArguments
from weaveopt.reporting import terminal

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "explain.md")
BLOCK = re.compile(r"^```\n\$ weaveopt (explain [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ONE_SCREEN = 24
"""Lines of a terminal as it opens."""
LEFT_OUT = "[…]"
SHOWN = [(page.name, *found) for page in PAGES for found in BLOCK.findall(page.read_text())]


def test_both_pages_show_the_command() -> None:
    assert {page for page, _, _ in SHOWN} == {page.name for page in PAGES}


def _question(command: str) -> ExplainArguments:
    args = parser().parse_args(shlex.split(command))
    del args.command
    return question.question(args)


def _captured(asked: ExplainArguments) -> ExplainArguments:
    """The question that a capture depends on: every form of the report is a part of its full report."""
    plain = replace(asked, why=None, full=False)
    others = (_question(command) for _, command, _ in SHOWN)
    return replace(plain, full=any(each.shows_all and replace(each, why=None, full=False) == plain for each in others))


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """The text of every command that is shown; models are captured once for all forms of their report."""
    reports = {}
    texts = {}
    with pytest.MonkeyPatch.context() as plain:
        plain.setenv("COLUMNS", str(terminal.DEFAULT_WIDTH))
        plain.setenv("NO_COLOR", "1")
        plain.delenv("WEAVE_MACHINE", raising=False)
        for _, command, _ in SHOWN:
            asked = _question(command)
            captured = _captured(asked)
            if captured not in reports:
                steps: list[str] = []
                reports[captured] = explain.explain(captured, steps.append)
                assert len(steps) == explain.NUM_STEPS - 1, f"the bar ends before its end, or after it: {steps}"
            rendered = explain.rendered(reports[captured], asked)
            assert isinstance(rendered, str)
            texts[command] = rendered
    return texts


def _pieces(block: str) -> Iterator[list[str]]:
    """Lines that follow one another, between what was left out."""
    piece: list[str] = []
    for line in block.splitlines():
        if line == LEFT_OUT:
            yield piece
            piece = []
        else:
            piece.append(line)
    yield piece


@pytest.mark.parametrize(("page", "command", "block"), SHOWN, ids=[f"{page}: {command}" for page, command, _ in SHOWN])
def test_a_page_shows_what_the_command_prints(page: str, command: str, block: str, printed: dict[str, str]) -> None:
    lines = printed[command].splitlines()
    at = 0
    for number, piece in enumerate(_pieces(block)):
        starts = [start for start in range(at, len(lines) + 1) if lines[start : start + len(piece)] == piece]
        found = "\n".join(piece)
        assert starts, (
            f"{page}: `weaveopt {command}` does not print, after line {at}:\n{found}\nbut\n{printed[command]}"
        )
        assert number or starts[0] == 0, f"{page}: the block does not begin as the output does"
        at = starts[0] + len(piece)
    short = not {"--full", "--why"} & set(command.split())
    assert len(lines) <= ONE_SCREEN or not short, f"{len(lines)} lines are more than one screen"
    assert block.endswith(f"{LEFT_OUT}\n") or at == len(lines), f"{page}: the output goes on after the block"
