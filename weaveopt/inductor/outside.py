"""Communication between the graphs of a model, counted by the process groups themselves.

A process group numbers its collectives. Its number is read where the compile of a graph ends and where that of the
next graph begins; in between only graphs that were compiled before ran, and what Python does between them. While no
graph of this process communicates in a group, whatever that group counted ran outside of them. Nothing is read or
wrapped once the graphs are compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
import torch.fx as fx

from weaveopt.graph.facts import groups_in
from weaveopt.inductor.seams import GraphPass
from weaveopt.records.report import OutsideCommunication

InnerCompile = Callable[..., object]


@dataclass(frozen=True)
class _Mark:
    """Mark at the end of a graph's compile."""

    call: tuple[object, ...]
    ended_at: str
    counts: dict[str, int]


_last: _Mark | None = None
_used_by_graphs: set[str] = set()


def watched(
    inner_compile: InnerCompile, caller: int | None, ended_at: str, found: list[OutsideCommunication]
) -> InnerCompile:
    """`inner_compile` that adds to `found` what ran between the graph before and this one, in one call of a model.

    `caller` identifies the model that is being called; `ended_at` is the place of the break that ends the forward
    graph, empty if it ends with a return.
    """

    # Inductor's own signature: its arguments are passed on unchanged.
    def compile_and_watch(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        global _last
        is_backward = GraphPass.of(arguments) is GraphPass.BACKWARD
        call = (threading.get_ident(), caller, is_backward)
        if _last is not None and _last.call == call:
            # Only a break says that the same call goes on; after a return anything may have run. Backward graphs
            # run in the opposite order.
            place = ended_at if is_backward else _last.ended_at
            found.extend(_since(_last.counts, place) if place else ())
        groups = groups_in(module.graph)  # a rewritten graph has them in operations that go by other names
        compiled = inner_compile(module, inputs, **arguments)
        _used_by_graphs.update(groups)
        _last = _Mark(call, ended_at, _counts())
        return compiled

    return compile_and_watch


def _since(before: dict[str, int], place: str) -> list[OutsideCommunication]:
    now = _counts()
    ran = {group: now[group] - count for group, count in before.items() if group in now}
    return [
        OutsideCommunication(group, number, place)
        for group, number in ran.items()
        if number > 0 and group not in _used_by_graphs
    ]


def _counts() -> dict[str, int]:
    """Count the collectives that each process group has begun, except those whose backend does not count."""
    found: dict[str, int] = {}
    if not dist.is_available() or not dist.is_initialized():
        return found
    for group in dist.distributed_c10d._world.pg_map:
        try:
            found[group.group_name] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        except RuntimeError:
            continue
    return found


def summed(found: Sequence[OutsideCommunication]) -> tuple[OutsideCommunication, ...]:
    """One entry for each group and place."""
    totals: dict[tuple[str, str], int] = {}
    for each in found:
        totals[each.group, each.after] = totals.get((each.group, each.after), 0) + each.collectives
    return tuple(OutsideCommunication(group, number, after) for (group, after), number in totals.items())
