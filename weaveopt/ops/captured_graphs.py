"""CUDA graphs that live in this process: each reads its inputs where they were when it was captured."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import torch

_followed: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
_frozen: int | None = None
"""Objects that `gc.freeze` had hidden at the first capture; None before it."""


def note_followed(graph: torch.cuda.CUDAGraph) -> None:
    """Takes a graph whose owner looks where the weights are, and captures anew where they moved."""
    _followed.add(graph)


def note_capture() -> None:
    """Takes notice that a CUDA graph captures a call of a compiled graph, whose weights it will read."""
    global _frozen
    _frozen = gc.get_freeze_count() if _frozen is None else _frozen


def may_read_weights() -> bool:
    """True while a CUDA graph lives of which nobody knows what it reads.

    Not counted are graphs of `note_followed`, and those that Inductor manages, which compares addresses before it
    replays. All objects of the process are looked through, which takes the longer the more there are; those of
    `gc.freeze` cannot be, and count where there are more since the first capture.
    """
    if not torch.cuda.is_initialized():
        return False
    if _frozen is not None and gc.get_freeze_count() > _frozen:
        return True
    if not _is_any_unknown():
        return False
    gc.collect()  # what only cycles hold is gone
    return _is_any_unknown()


def _is_any_unknown() -> bool:
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    managers = {getattr(trees, name, None) for name in ("CUDAGraphNode", "CUDAGraphTreeManager")}
    kinds = {torch.cuda.CUDAGraph, *_subclasses(torch.cuda.CUDAGraph)}
    found, known = list[int](), {id(each) for each in _followed}
    for each in gc.get_objects():
        if type(each) in kinds:
            found.append(id(each))
        elif type(each) in managers:
            known.add(id(getattr(each, "graph", None)))
    return any(graph not in known for graph in found)


def _subclasses(kind: type[object]) -> Iterator[type[object]]:
    found: list[type[object]] = kind.__subclasses__()
    for each in found:
        yield each
        yield from _subclasses(each)
