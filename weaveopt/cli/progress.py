"""Progress of `weaveopt calibrate` on standard error: bars with the time left, or plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weaveopt.measure.session import ShowProgress


def left_s(started: float, now: float, done: int, total: int) -> float | None:
    """Seconds that the rest takes if it takes as long as what was done; None before anything was."""
    return (now - started) / done * (total - done) if done else None


def _left(started: float, done: int, total: int) -> str:
    found = left_s(started, time.monotonic(), done, total)
    return "" if found is None else f", about {found:.0f} s left"


@contextmanager
def progress(shown: bool) -> Iterator[ShowProgress]:
    """Yield what shows a step: a bar for the whole run and one for each kind, in a file a line a kind; on other ranks
    nothing."""
    from weaveopt.measure.session import OVERALL

    if not shown:
        yield lambda what, done, total: None
        return
    started = time.monotonic()
    if not sys.stderr.isatty():
        seen: set[str] = set()
        whole = [0, 0]

        def say(what: str, done: int, total: int) -> None:
            if what == OVERALL:
                whole[:] = done, total
            elif what not in seen:
                place = f" ({whole[0]} of {whole[1]}{_left(started, *whole)})" if whole[1] else ""
                print(f"weaveopt: measuring {what}{place}", file=sys.stderr, flush=True)
                seen.add(what)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, tuple[TaskID, int]] = {}

        def finish() -> None:
            for what, (task, total) in tasks.items():
                if what != OVERALL:
                    bars.update(task, completed=total)

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                finish()
                tasks[what] = bars.add_task(what, total=total), total
            words = f"{what}{_left(started, done, total)}" if what == OVERALL else what
            bars.update(tasks[what][0], completed=done, description=words)

        yield show
        finish()
