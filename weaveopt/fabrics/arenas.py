"""The arenas of one fabric, by process group: an arena lives no longer than its process group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist

from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics.topology import process_group


class Closable(Protocol):
    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...


A = TypeVar("A", bound=Closable)


class _GroupArenas(Generic[A]):
    """Arenas of one process group, the one in use last. They are closed when the process group goes away."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        arenas: list[A] = []
        self.arenas = arenas
        self.process_group = weakref.ref(pg)
        weakref.finalize(pg, _close_all, arenas).atexit = False


class Arenas(Generic[A]):
    """See the module's docstring. `what` names an arena of the fabric in errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._entries: dict[str, _GroupArenas[A]] = {}

    def current(self, group_name: str) -> A | None:
        """The one in use; None where there is none of the process group that has this name now."""
        kept = self.kept(group_name)
        return kept[-1] if kept and not kept[-1].closed else None

    def of(self, group_name: str) -> A:
        """The one in use, or `ArenaError`."""
        found = None
        if group_name in self._entries:
            with suppress(WeaveError):  # its process group is gone, and the arenas with it
                found = self.current(group_name)
        if found is None:
            raise ArenaError(
                f"no {self._what} was reserved for group {group_name!r}: reserve() comes before the first call"
            )
        return found

    def kept(self, group_name: str) -> tuple[A, ...]:
        """Arenas of a group that still exist, the current one last."""
        entry = self._entry(group_name)
        return tuple(entry.arenas) if entry is not None else ()

    def put(self, group_name: str, arena: A, retire: Callable[[A], None]) -> None:
        """Make `arena` the current one. `retire` closes the previous one, or leaves it to the process group.

        All ranks have synchronized to make it, so none is inside a call of the previous one any more.
        """
        entry = self._entry(group_name)
        if entry is None:
            entry = self._entries[group_name] = _GroupArenas(process_group(group_name))
        before = entry.arenas[-1] if entry.arenas else None
        entry.arenas.append(arena)
        if before is not None:
            retire(before)
            if before.closed:
                entry.arenas.remove(before)

    def release(self, group_name: str) -> None:
        """Closes the group's arenas, if there are any."""
        entry = self._entries.pop(group_name, None)
        if entry is not None:
            _close_all(entry.arenas)

    def release_all(self) -> None:
        for name in tuple(self._entries):
            self.release(name)

    def __iter__(self) -> Iterator[A]:
        """Iterate over all arenas of all groups."""
        return (arena for entry in self._entries.values() for arena in entry.arenas)

    def _entry(self, group_name: str) -> _GroupArenas[A] | None:
        """Return the arenas of a process group. Raises `WeaveError` if there is no such group."""
        pg, entry = process_group(group_name), self._entries.get(group_name)
        return entry if entry is not None and entry.process_group() is pg else None


def _close_all(arenas: list[A]) -> None:
    for arena in arenas:
        arena.close()
    arenas.clear()
