"""Faults between hosts, and the errors that ranks may raise for each.

The last host is struck, except where a fault says that it is the first, which has the store. A fault strikes at its
moment, by the first rank of that host.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum

from tests.emulation.emulated_hosts import Link, Network

SHORT_S = 1.5
"""`timeout_s` of a call where somebody has to wait for it."""
MEETING_S = 3.0
"""The timeout of reserving and connecting, where somebody has to wait for it."""
LONG_S = 30.0
"""Both timeouts, if no rank has to wait for them."""
STORE_S = 5.0
"""Time that a store which does not answer has beyond the timeout."""
SLACK_S = 3.0
"""Time of everything else on two busy cores."""
_NEAR = Link(delay_us=20)


class Moment(StrEnum):
    RESERVING = "before the hosts are connected"
    CONNECTING = "while the hosts are connected"
    CALL = "within a call"
    TRANSFER = "while megabytes are in flight"


class Saying(Enum):
    """Errors that a rank may end with: the pattern of the whole text, and the table's words for it."""

    RIGHT = ("", "the right result")
    SILENT = ("did not signal within [0-9.]+ s", "`PeerTimeoutError`: a rank did not signal")
    EXITED = ("exited", "`PeerTimeoutError`: a rank exited")
    GAVE_UP = ("gave up waiting itself", "`PeerTimeoutError`: a rank gave up")
    ABSENT = (
        r"AgreementError: group '\S+': ranks? [\d, ]+ of \([\d, ]+\) did not come within [\d.]+ s for .+",
        "`AgreementError`: ranks did not come",
    )
    UNREACHED = (
        r"ArenaError: group '\S+': ranks \[[\d, ]+\] could not connect to all others( \(rank \d+ did not reach .+\))?",
        "`ArenaError`: ranks could not be reached",
    )
    STORE_LOST = (
        r"AgreementError: group '\S+': the store failed while ranks synchronized for .+",
        "`AgreementError`: the store failed",
    )
    STORE_SILENT = (
        r"AgreementError: group '\S+': the store did not answer within [\d.]+ s for .+",
        "`AgreementError`: the store did not answer",
    )

    @property
    def phrase(self) -> str:
        return self.value[1]

    def matches(self, error: str, rank: int) -> bool:
        pattern = self.value[0]
        if self in (Saying.SILENT, Saying.EXITED, Saying.GAVE_UP):
            where = rf"weave::all_reduce_norm at site .+, group '\S+', rank {rank}"
            pattern = rf"PeerTimeoutError: {where}: peer rank \d+ {pattern} \(slot \w+, expected epoch \d+, seen \d+\)"
        return re.fullmatch(pattern, error) is not None


class Stranger(StrEnum):
    """Who comes to the port of a rank from a host that has nothing to do with it."""

    SILENT = "says nothing"
    GARBAGE = "says garbage"
    NO_KEY = "has the right greeting and a wrong key"
    STAYS = "has the right greeting, says no more, and stays"
    MANY = "are 200, say nothing, and stay"


@dataclass(frozen=True)
class Fault:
    how: str
    moment: Moment
    others: frozenset[Saying]
    itself: frozenset[Saying] | None
    """Errors of the struck host's ranks. None: they are killed."""
    waits_s: float = 0.0
    """For which of the timeouts ranks wait at most."""
    strike: Callable[[Network, int], None] | None = None
    pauses_s: float = 0.0
    """Pause of the struck host's ranks after the strike."""
    strikes_first: bool = False
    stranger: Stranger | None = None
    link: Link = _NEAR
    counted: str = ""
    """Counter of the links that must have increased, if ranks do not notice."""
    shapes: tuple[tuple[int, int], ...] = ((2, 1),)
    """Hosts, and ranks on each."""

    @property
    def call_timeout_s(self) -> float:
        return SHORT_S if self.waits_s == SHORT_S else LONG_S

    @property
    def meeting_timeout_s(self) -> float:
        return MEETING_S if self.waits_s >= MEETING_S else LONG_S


def _cut(network: Network, host: int) -> None:
    network.down(host)


def _cut_for_a_moment(network: Network, host: int) -> None:
    network.down(host)
    threading.Timer(0.3, network.up, (host,)).start()


def _cut_soon(network: Network, host: int) -> None:
    threading.Timer(0.15, network.down, (host,)).start()


def _cut_soon_for_a_moment(network: Network, host: int) -> None:
    threading.Timer(0.15, _cut_for_a_moment, (network, host)).start()


def _kill(network: Network, host: int) -> None:
    network.kill(host)


def _cut_and_kill(network: Network, host: int) -> None:
    network.down(host)
    network.kill(host)


def _lose_much(network: Network, host: int) -> None:
    network.lose(25.0)


RIGHT = frozenset({Saying.RIGHT})
SILENT = frozenset({Saying.SILENT, Saying.GAVE_UP, Saying.EXITED})
"""The first to notice say that a peer was silent; ranks of their hosts, and hosts that they leave, hear from them."""
EXITED = frozenset({Saying.EXITED, Saying.GAVE_UP})
ABSENT = frozenset({Saying.ABSENT})
UNREACHED = frozenset({Saying.ABSENT, Saying.UNREACHED, Saying.STORE_SILENT})
BOTH: tuple[tuple[int, int], ...] = ((2, 2), (3, 1))
SLOW = Link(delay_us=20, gbit_per_s=0.05)

FAULTS: dict[str, Fault] = {
    "link cut": Fault(
        "no packet leaves or reaches a host any more, and no rank is notified", Moment.CALL, SILENT, SILENT, SHORT_S,
        _cut, shapes=BOTH,
    ),
    "link cut in mid-transfer": Fault(
        "as \"link cut\", at 0.05 Gbit/s, 0.15 s after the call began", Moment.TRANSFER, SILENT, SILENT, SHORT_S,
        _cut_soon, link=SLOW,
    ),
    "link cut for a moment": Fault(
        "as \"link cut\", for 0.3 s", Moment.CALL, RIGHT, RIGHT, strike=_cut_for_a_moment, counted="cut_off",
        shapes=BOTH,
    ),
    "link cut in mid-transfer for a moment": Fault(
        "the same, for 0.3 s", Moment.TRANSFER, RIGHT, RIGHT, strike=_cut_soon_for_a_moment, link=SLOW,
        counted="cut_off",
    ),
    "link cut before connecting": Fault(
        "as \"link cut\"", Moment.RESERVING, ABSENT | {Saying.STORE_SILENT}, UNREACHED, MEETING_S, _cut,
    ),
    "link cut while connecting": Fault(
        "the same, when ranks know each other's ports and have not connected yet", Moment.CONNECTING, UNREACHED,
        UNREACHED, 2 * MEETING_S, _cut,
    ),
    "a quarter lost": Fault("every link loses 25 % of its packets from then on", Moment.RESERVING, RIGHT, RIGHT,
                            strike=_lose_much, counted="lost"),
    "host late": Fault("its ranks sleep for 1 s", Moment.CALL, RIGHT, RIGHT, pauses_s=1.0),
    "host late to connect": Fault("its ranks sleep for 1 s", Moment.RESERVING, RIGHT, RIGHT, pauses_s=1.0),
    "host too late": Fault(
        "its ranks sleep for longer than `timeout_s`", Moment.CALL, SILENT, SILENT, SHORT_S, pauses_s=SHORT_S + 1.0,
    ),
    "host does not come": Fault(
        "its ranks sleep for longer than `compile_timeout_s`", Moment.RESERVING, ABSENT, UNREACHED, MEETING_S,
        pauses_s=MEETING_S + 1.0,
    ),
    "host killed": Fault("SIGKILL to all its ranks at once", Moment.CALL, EXITED, None, strike=_kill, shapes=BOTH),
    "host killed before connecting": Fault("as \"host killed\"", Moment.RESERVING, ABSENT, None, MEETING_S, _kill),
    "host lost": Fault(
        "its link is cut, then its ranks are killed: nothing reports it", Moment.CALL, SILENT, None, SHORT_S,
        _cut_and_kill, shapes=BOTH,
    ),
    "host lost before connecting": Fault("as \"host lost\"", Moment.RESERVING, ABSENT, None, MEETING_S, _cut_and_kill),
    "first host killed before connecting": Fault(
        "SIGKILL to all ranks of the host that has the store", Moment.RESERVING, frozenset({Saying.STORE_LOST}), None,
        strike=_kill, strikes_first=True,
    ),
    "first host lost before connecting": Fault(
        "its link is cut, then its ranks are killed", Moment.RESERVING,
        frozenset({Saying.STORE_LOST, Saying.STORE_SILENT}), None, MEETING_S, _cut_and_kill, strikes_first=True,
    ),
    **{
        f"strangers: {stranger.name.lower().replace('_', ' ')}": Fault(
            f"from another host they come to every port and {stranger}" if stranger is Stranger.MANY else
            f"from another host somebody comes to every port, and {stranger}",
            Moment.RESERVING, RIGHT, RIGHT, pauses_s=1.0, stranger=stranger,
        )
        for stranger in Stranger
    },
}  # fmt: skip
