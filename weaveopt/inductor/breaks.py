"""Reasons for graph breaks, from what Dynamo recorded at each graph."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import FrameSummary

import torch
import torch.fx as fx
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import graph_break_reasons

from weaveopt.records.report import GraphBreak

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
_TORCH = str(Path(torch.__file__).parent)


def noted(graph_module: fx.GraphModule | None) -> GraphCompileReason | None:
    """Return the graph break that Dynamo attached to a graph for the backend; None if the function returned there."""
    reason: GraphCompileReason | None = getattr(graph_module, "compile_subgraph_reason", None)
    return reason if reason is not None and reason.graph_break else None


def since(before: GraphCompileReason, end: GraphCompileReason | None) -> tuple[GraphBreak, ...]:
    """Return the breaks between those of two graphs, or after `before`: there was nothing to compile in front of
    them."""
    places = {id(reason): index for index, reason in enumerate(graph_break_reasons)}
    if id(before) not in places:  # Dynamo was reset meanwhile
        return ()
    last = places.get(id(end), len(graph_break_reasons))
    return tuple(map(graph_break, graph_break_reasons[places[id(before)] + 1 : last]))


def graph_break(reason: GraphCompileReason) -> GraphBreak:
    """The break in one line each of reason, place and hint."""
    lines = [line.strip() for line in str(reason.reason).splitlines() if line.strip()]
    explanation = next(_after("Explanation:", lines), "")
    title = lines[0] if lines else "no reason given"
    words = f"{title.rstrip('.')}: {explanation}" if explanation else title
    return GraphBreak(words, place(reason.user_stack or ()), "; ".join(_after("Hint:", lines)))


def _after(label: str, lines: Sequence[str]) -> Iterator[str]:
    found = (line.removeprefix(label).strip() for line in lines if line.startswith(label))
    return (words for words in found if words)


def place(stack: Sequence[FrameSummary]) -> str:
    """`file:line in function` of the innermost frame outside torch, the file relative to where it is imported from."""
    own = [frame for frame in stack if not frame.filename.startswith(_TORCH)] or list(stack)
    if not own:
        return ""
    frame = own[-1]
    resumed = _RESUMED.fullmatch(frame.name)
    return f"{short(frame.filename)}:{frame.lineno} in {resumed[1] if resumed else frame.name}"


def short(filename: str) -> str:
    folders = [f"{folder.rstrip('/')}/" for folder in sys.path if folder]
    above = max((folder for folder in folders if filename.startswith(folder)), key=len, default="")
    return filename.removeprefix(above)


def counted(breaks: Iterable[GraphBreak]) -> tuple[GraphBreak, ...]:
    """Count each break once, in order of first appearance, with how many graphs it ended."""
    return tuple(replace(found, count=times) for found, times in Counter(breaks).items())
