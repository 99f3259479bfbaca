"""Tasks: pieces of work of a lowering, each on one stream. Price, plan, rewrite and report read the same tasks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Stream(StrEnum):
    """Stream that a task runs on. Tasks of one stream follow one another."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPIES = "copies"
    """Copy engines: they take no CTAs."""


@dataclass(frozen=True)
class Task:
    """One kernel, collective or copy.

    A task with neither `begins_after` nor `ends_before` is enqueued at the place of its site in the graph, and what the
    graph enqueues next waits for it: one blocking call is one such task. Tasks of one lowering are ordered by
    `waits_for` and by their streams alone.
    """

    us: float
    """Microseconds alone, with nothing on the other streams."""
    stream: Stream = Stream.COMPUTE
    waits_for: tuple[int, ...] = ()
    """Positions of earlier tasks, of the same lowering or schedule, whose results it reads."""
    name: str = ""
    """Name of its term in an estimate."""
    ctas: int = 0
    """CTAs that it occupies, of a kernel that communicates; 0: as many as fit, or none."""
    begins_after: str = ""
    """Node of the graph after which it is enqueued; empty: the site's own place."""
    ends_before: str = ""
    """Node of the graph that waits for it first; empty: whatever is enqueued after the site."""
    module: str = ""
    """Path of the module that it computes; empty where the graph does not name one."""

    @property
    def is_open(self) -> bool:
        """True if other work of the graph may run between its begin and its end."""
        return bool(self.begins_after or self.ends_before)


@dataclass(frozen=True)
class ScheduledTask:
    """A task in the schedule of a whole graph, in microseconds from the start of the first one."""

    name: str
    stream: Stream
    start_us: float
    us: float
    """How long it runs there: longer than alone where streams slow each other down."""
    module: str = ""
