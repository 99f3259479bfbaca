"""Exchange of kernel times between the ranks of a graph: all of them use the longest, whatever each measured.

It takes place in the groups in which a site of this rank may be rewritten, by rounds of its own (`fabrics.rounds`). A
rank that compiles alone hears within seconds that its peers are past this point. One that does not come, because an
option differs, costs the others a bounded wait and the times, and no compile: profiles decide then.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weaveopt.autotune.rank_agreement import SPREADS
from weaveopt.cost_model.timed import KernelShape, KernelTime
from weaveopt.errors import AgreementError
from weaveopt.fabrics import topology
from weaveopt.fabrics.rounds import KERNELS, Closed, Rounds, Why, digest
from weaveopt.inductor.dynamo import Compile
from weaveopt.pipeline.shared_facts import collectives_of
from weaveopt.rule import CapturedGraph, Context
from weaveopt.wording import listed

LONGEST_WAIT_S = 60.0
"""For a peer that is still tracing; beyond it the profile decides."""
_gave_up: weakref.WeakSet[Rounds] = weakref.WeakSet()
"""Groups some rank of which did not come in time: nobody asks there again."""


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


@dataclass(frozen=True)
class _Channel:
    """One group in which ranks exchange times of one graph."""

    ranks: tuple[int, ...]
    rounds: Rounds
    graph: str
    """Digest of the graph's collectives in the group."""
    guard: str

    def gather(self, document: Mapping[str, object], timeout_s: float) -> list[dict[str, Any]]:
        """The documents of all ranks. Raises `NoAgreementError` where they have none about the same."""
        text = json.dumps({**document, "graph": self.graph})
        try:
            found = self._round(text, timeout_s)
            while isinstance(found, Closed) and found.skeleton != self.graph:
                found = self._round(text, timeout_s)  # the round was of a graph that a peer compiled before
        except AgreementError as error:
            raise NoAgreementError(str(error)) from None
        if isinstance(found, Closed):
            if found.why is Why.LATE:
                _gave_up.add(self.rounds)
            raise NoAgreementError(_reason(found, timeout_s))
        told = [json.loads(text) for text in found]
        for rank, each in zip(self.ranks, told, strict=True):
            if (each["graph"], each["step"]) != (self.graph, document["step"]):
                raise NoAgreementError(f"rank {rank} compiled another graph")
        return told

    def _round(self, text: str, timeout_s: float) -> tuple[str, ...] | Closed:
        number = self.rounds.publish(text, self.graph, timeout_s, KERNELS)
        if isinstance(number, Closed):
            return number
        return self.rounds.collect(number, self.graph, self.guard, timeout_s, KERNELS)

    def decline(self, why: str, timeout_s: float) -> None:
        """Tell peers that wait for this rank's times of the graph why there are none."""
        with contextlib.suppress(AgreementError):
            self.rounds.decline(self.graph, why, timeout_s, KERNELS)


def _reason(closed: Closed, timeout_s: float) -> str:
    if closed.why is Why.DECLINED:
        return closed.reason
    late = f"did not come within {timeout_s:g} s"
    what = {Why.LATE: late, Why.ENDED: "ended"}.get(closed.why, "went on without compiling such a graph")
    return f"{listed('rank', closed.peers)} {what}"


class KernelExchange:
    """The ranks of those groups of one graph in which this rank may rewrite a site; without any, this rank alone."""

    def __init__(
        self, captured: CapturedGraph, groups: Iterable[str], compile_: Compile, context: Context
    ) -> None:  # fmt: skip
        self._longest_s = context.config.compile_timeout_s
        real = [
            name for name, known in context.topologies.items()
            if name in captured.groups and known.world > 1 and not known.fake
        ]  # fmt: skip
        asked = set(groups)
        channels = {name: self._channel(name, captured, compile_, context) for name in sorted(real)}
        self._channels = [channel for name, channel in channels.items() if name in asked]
        if compile_.attempt == 0:  # else it may be alone, and nobody waits
            for name in channels.keys() - asked:
                rank = channels[name].rounds.rank
                channels[name].decline(f"rank {rank} has no site to rewrite in the group", self._longest_s)

    def _channel(self, name: str, captured: CapturedGraph, compile_: Compile, context: Context) -> _Channel:
        graph = digest(collectives_of(name, captured.graph))
        rounds = topology.rounds(name, context.config.compile_timeout_s)
        return _Channel(context.topologies[name].group.ranks, rounds, graph, compile_.guard)

    def shared(self, times: Iterable[KernelTime], num_missing: int, more_s: float = 0.0) -> SharedTimes:
        """The longest time of each kernel over all ranks that have one, the same on all ranks.

        `more_s`: how much later than this rank another one may come, which times kernels. Raises `NoAgreementError`.
        """
        if any(channel.rounds in _gave_up for channel in self._channels):
            raise NoAgreementError("ranks of the group did not come to an earlier exchange")
        known, missing = {each.shape: each for each in times}, num_missing
        timeout_s = min(self._longest_s, LONGEST_WAIT_S) + more_s
        spreads: list[_Channel] = []
        """Groups of which a rank exchanges times in others too."""
        for number in range(SPREADS):
            channels = spreads if number else self._channels
            for channel in channels:
                document = {
                    "step": f"{'timed' if more_s else 'known'} {number}", "groups": len(self._channels),
                    "missing": missing, "times": _rows(known),
                }  # fmt: skip
                try:
                    told = channel.gather(document, timeout_s)
                except NoAgreementError as error:
                    for other in self._channels:
                        if other is not channel:
                            other.decline(str(error), timeout_s)
                    raise
                missing = max(each["missing"] for each in told)
                if number == 0 and max(each["groups"] for each in told) > 1:
                    spreads.append(channel)
                for each in told:
                    _take(known, each["times"])
        return SharedTimes(known, missing)


Row = tuple[str, str, int, list[int], str, float, float]


def _rows(times: Mapping[KernelShape, KernelTime]) -> list[Row]:
    return [
        (shape.kernel, shape.dtype, shape.size, [*shape.rest], shape.layout, each.us, each.spread)
        for shape, each in times.items()
    ]


def _take(known: dict[KernelShape, KernelTime], rows: Sequence[Row]) -> None:
    """Keep the longest time and the widest spread of each kernel."""
    for kernel, dtype, size, rest, layout, us, spread in rows:
        shape = KernelShape(kernel, dtype, size, tuple(rest), layout)
        mine = known.get(shape, KernelTime(shape, us, spread))
        known[shape] = KernelTime(shape, max(mine.us, us), max(mine.spread, spread))
