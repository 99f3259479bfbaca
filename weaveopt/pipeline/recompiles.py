"""Identity of the current compile: its frame and number, as Dynamo counts them, and the guard that asked for it."""

from __future__ import annotations

from dataclasses import dataclass

from torch._dynamo.utils import get_metrics_context
from torch._guards import CompileContext

_LONGEST = 300
"""Characters of a guard in a message."""


@dataclass(frozen=True)
class Compile:
    """One compile of a frame. Graphs of its forward and backward pass have the same."""

    frame: int
    """-1 where Dynamo does not compile (a graph that is compiled by itself)."""
    attempt: int
    """0: the first compile of the frame."""
    guard: str
    """Why Dynamo compiled the frame again, in its words; empty where it says nothing."""


def current() -> Compile:
    """The compile that is in progress."""
    found = CompileContext.current_compile_id()
    frame = None if found is None else found.frame_id
    if found is None or frame is None:
        return Compile(-1, 0, "")
    reason = get_metrics_context()._metrics.get("recompile_reason")
    guard = str(reason or "").strip('"').partition("User stack trace")[0]
    return Compile(frame, found.frame_compile_id or 0, " ".join(guard.split())[:_LONGEST])
