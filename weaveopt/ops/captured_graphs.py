"""CUDA graphs that live in this process: each reads its inputs where they were when it was captured."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import torch

_followed: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()


def note_followed(graph: torch.cuda.CUDAGraph) -> None:
    """Takes a graph whose owner looks where the weights are, and captures anew where they moved."""
    _followed.add(graph)


def may_read_weights() -> bool:
    """True while a CUDA graph lives of which nobody knows what it reads.

    Not counted are graphs of `note_followed`, and those that Inductor manages, which compares addresses before it
    replays. All objects of the process are looked through, so it takes some tenths of a second in large programs.
    """
    if not torch.cuda.is_initialized() or not _is_any_unknown():
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


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
