"""Memory of what ranks agreed on while they compiled a frame, for later compiles of the same frame.

A rank may compile a frame again alone: it then takes what was agreed before, and asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from weaveopt.inductor.dynamo import Compile

T = TypeVar("T")


class FrameMemory(Generic[T]):
    """One record of a frame, empty (`make()`) where Dynamo compiles the frame for the first time."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._records: dict[int, T] = {}
        self._last: tuple[int, int] | None = None

    def of(self, compile_: Compile) -> T:
        """The record of the frame that is compiled. What Dynamo does not compile has a new one every time."""
        this = (compile_.frame, compile_.attempt)
        if compile_.frame < 0 or (compile_.attempt == 0 and this != self._last):
            self._records.pop(compile_.frame, None)
        self._last = this
        return self._make() if compile_.frame < 0 else self._records.setdefault(compile_.frame, self._make())
