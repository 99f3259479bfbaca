"""The first calls by NVLink multicast, which every arena that is mapped by it has to get right before it is used.

No kernel that uses multicast has run on hardware yet. So each operation that has such kernels registers a `FirstCall`,
and a new arena runs all of them on all ranks against their references, before a plan may use it. Ranks exchange the
outcome through the store, as for the arena's memory: a kernel that is wrong on one rank is used by none.

Nothing runs on a device before all ranks are prepared, so that no kernel waits for a rank that has failed already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from weaveopt.errors import MulticastError
from weaveopt.fabrics import topology as topologies
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.topology import Group, RecordExchange
from weaveopt.wording import named

TIMEOUT_S = 30.0
"""Longest wait of a kernel of the first calls for its peers."""
Run = Callable[[], str]
"""Runs prepared calls and compares: what is wrong, or an empty text."""


class Mapped(Protocol):
    """An arena that is mapped by multicast."""

    @property
    def group(self) -> Group: ...


A = TypeVar("A", bound=Mapped, contravariant=True)


class FirstCall(Protocol[A]):
    """Small calls of one operation, of every kind that it has, in an arena of type `A`."""

    def layout(self, group: Group) -> Layout:
        """Return the buffers that the calls need in the arena."""
        ...

    def prepare(self, arena: A) -> Run:
        """Prepare everything up to the launches. Raises any obstacle to them."""
        ...


_first_calls: list[FirstCall[Any]] = []


def register(first_call: FirstCall[Any]) -> None:
    """Register `first_call` to be checked in every arena that is mapped by multicast."""
    _first_calls.append(first_call)


def with_first_calls(layout: Layout, group: Group) -> Layout:
    """`layout` with room for the first calls."""
    for each in _first_calls:
        layout = layout.union(each.layout(group))
    return layout


def expect_allowed(group: Group, timeout_s: float) -> None:
    """Check that the ranks can use multicast. Raises `MulticastError` on all ranks of the group if not, or if they
    left it."""
    against = topologies.discover(group.name, timeout_s).no_multicast
    if against is not None:
        raise MulticastError(f"group {group.name!r}: {against.message} ({_words(against.values)})")


def check(arena: Mapped, channel: RecordExchange, timeout_s: float) -> None:
    """Runs all first calls in a new arena. All ranks of its group call it; afterwards none waits for another.

    Raises `MulticastError` on all ranks where one of them fails or is wrong on some rank.
    """
    runs: list[Run] = []

    def prepare() -> str:
        runs.extend([each.prepare(arena) for each in _first_calls])
        return ""

    def run() -> str:
        return next((wrong for each in runs if (wrong := each())), "")

    for step, what in ((prepare, "what a first call by multicast needs"), (run, "a first call by multicast")):
        expect(arena.group, channel, _said(step), what, timeout_s)


def expect(group: Group, channel: RecordExchange, why: str, what: str, timeout_s: float) -> None:
    """Check that no rank has a reason `why` not. Raises `MulticastError` on all ranks if one has; no plan uses it
    again then."""
    answers = channel.gather({"error": why}, what, timeout_s)
    wrong = [f"rank {rank}: {each['error']}" for rank, each in zip(group.ranks, answers, strict=True) if each["error"]]
    if wrong:
        text = "; ".join(wrong)
        topologies.leave_multicast(group.name, text, timeout_s)
        raise MulticastError(f"group {group.name!r}: NVLink multicast cannot be used: {text}")


def _said(step: Callable[[], str]) -> str:
    try:
        return step()
    except Exception as error:  # whatever it is, the others must hear of it
        return named(error)


def _words(values: Sequence[tuple[str, object]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values)
