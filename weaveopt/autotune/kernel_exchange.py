"""Exchange of kernel times between the ranks of a graph: all of them use the longest, whatever each measured.

A rank that does not come, because a step failed there or an option differs, costs the others a bounded wait and the
times, and no compile: profiles decide then, in this group from then on. Every exchange has keys of its own, so a rank
that gave up and one that came late never read each other's answers as those to another question.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weaveopt.autotune.rank_agreement import SPREADS
from weaveopt.cost_model.timed import KernelShape, KernelTime
from weaveopt.errors import AgreementError
from weaveopt.fabrics.topology import Group, RecordExchange, Topology

WHAT = "times of local kernels (option tune_budget_s)"
LONGEST_WAIT_S = 60.0
"""For a peer that is still tracing; beyond it the profile decides."""
_gave_up: set[tuple[str, tuple[int, ...]]] = set()
_num_graphs: dict[tuple[str, tuple[int, ...]], int] = {}


def forget() -> None:
    """Ask groups again whose ranks did not come."""
    _gave_up.clear()


class NoAgreementError(Exception):
    """Reason why ranks have no common times."""


@dataclass(frozen=True)
class SharedTimes:
    """Times that all ranks use, and if some rank wants more."""

    times: Mapping[KernelShape, KernelTime]
    num_missing: int
    """Most kernels that a rank has no time of."""


class KernelExchange:
    """The ranks of all groups that one graph communicates in; without any, this rank alone."""

    def __init__(self, topologies: Iterable[Topology], timeout_s: float) -> None:
        self._timeout_s = min(timeout_s, LONGEST_WAIT_S)
        groups = sorted((each.group for each in topologies if each.world > 1), key=lambda group: group.name)
        self._channels = []
        for group in groups:
            key = (group.name, group.ranks)
            number = _num_graphs[key] = _num_graphs.get(key, 0) + 1
            self._channels.append(RecordExchange(Group(f"{group.name}/kernels/{number}", group.ranks, group.rank)))
        self._keys = [(group.name, group.ranks) for group in groups]

    def shared(self, times: Iterable[KernelTime], num_missing: int, more_s: float = 0.0) -> SharedTimes:
        """The longest time of each kernel over all ranks that have one, the same on all ranks.

        `more_s`: how much later than this rank another one may come. Raises `NoAgreementError`.
        """
        if _gave_up.intersection(self._keys):
            raise NoAgreementError("ranks of the group did not come to an earlier exchange")
        known, missing = {each.shape: each for each in times}, num_missing
        for _ in range(SPREADS if len(self._channels) > 1 else 1):
            for channel, key in zip(self._channels, self._keys, strict=True):
                payload: dict[str, str | int] = {"times": json.dumps(_rows(known)), "missing": missing}
                try:
                    told = channel.gather(payload, WHAT, self._timeout_s + more_s)
                except AgreementError as error:
                    _gave_up.add(key)
                    raise NoAgreementError(str(error)) from None
                missing = max(int(each["missing"]) for each in told)
                for each in told:
                    _take(known, json.loads(str(each["times"])))
        return SharedTimes(known, missing)


Row = tuple[str, str, int, list[int], str, float, float]


def _rows(times: Mapping[KernelShape, KernelTime]) -> list[Row]:
    return [
        (shape.kernel, shape.dtype, shape.size, [*shape.rest], shape.layout, each.us, each.spread)
        for shape, each in times.items()
    ]


def _take(known: dict[KernelShape, KernelTime], rows: Iterable[Row]) -> None:
    """Keep the longest time and the widest spread of each kernel."""
    for kernel, dtype, size, rest, layout, us, spread in rows:
        shape = KernelShape(kernel, dtype, size, tuple(rest), layout)
        mine = known.get(shape, KernelTime(shape, us, spread))
        known[shape] = KernelTime(shape, max(mine.us, us), max(mine.spread, spread))
