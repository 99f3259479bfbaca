"""Requests of rules to the compile of graphs that hold their operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class ReusePredicate(Protocol):
    def __call__(self, arguments: Sequence[object]) -> Sequence[int]:
        """Return the positions of the results, among a call's arguments, that Inductor must not change."""
        ...


@dataclass(frozen=True)
class ReuseHook:
    """Results of an operator that Inductor must not take for memory that it may use again."""

    op: torch._ops.OpOverload
    keeps: ReusePredicate


@dataclass(frozen=True)
class InputHook:
    """Inputs of a graph that are prepared before its first call, and whenever the operator found others."""

    op: torch._ops.OpOverload
    prepare: Callable[[Sequence[object], Callable[[], bool]], str]
    """Gets the arguments of each call of the operator whose tensors are inputs of the graph, and whether a CUDA graph
    may read them where they are, which takes a while to find out. It may give them other memory, and returns why it did
    not; empty if all is in place."""
    num_unprepared: Callable[[], int]
    """Calls of the operator in this process that found inputs unprepared."""


InductorHook = ReuseHook | InputHook
