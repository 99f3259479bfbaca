"""Which host sends what to which host, round by round: all-reduces among hosts as plain data.

Rank `l` of a host reduces share `l` of the message with rank `l` of the other hosts, so a host's number names a peer.
The share is cut into equal parts (`num_parts`); element `i` of a share of `n` is in part `p` where
`p n // num_parts <= i < (p + 1) n // num_parts`. What is sent in a round is what was there before the round; a round is
over when all of it has arrived and was reduced or copied. Messages of a pair of hosts keep their order.

Every host ends with the same bits: additions of two sums commute, and each sum is made in one order on all hosts, or
made once and distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from weaveopt.errors import WeaveError


class Payload(StrEnum):
    """Contents of a message."""

    PARTIALS = "partials"
    """The partial results of each of the host's ranks, as they are: in the message's dtype."""
    SUMS = "sums"
    """Sums of some ranks' partial results: never rounded between rounds, fp32 (a wider dtype keeps its own)."""
    TOTALS = "totals"
    """Finished sums, rounded once: in the message's dtype."""


class Then(StrEnum):
    """Operation of the receiver on a message."""

    REDUCE = "reduce"
    """Added to what the receiver has of these parts; of several in one round in the order of the hosts."""
    COPY = "copy"
    """Put in place of what the receiver has of these parts."""


@dataclass(frozen=True)
class Send:
    """`[begin, end)` of the share's parts, to host `peer`."""

    peer: int
    begin: int
    end: int
    payload: Payload


@dataclass(frozen=True)
class Receive:
    """`[begin, end)` of the share's parts, from host `peer`."""

    peer: int
    begin: int
    end: int
    payload: Payload
    then: Then


@dataclass(frozen=True)
class Round:
    """Messages that do not wait for one another."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


@dataclass(frozen=True)
class HostSchedule:
    """Rounds of one host."""

    num_parts: int
    rounds: tuple[Round, ...]


def doublings(hosts: int) -> int:
    """`log2` of the largest power of two that is not above `hosts`."""
    return hosts.bit_length() - 1


def host_schedule(algorithm: str, host: int, hosts: int, ranks_per_host: int = 1) -> HostSchedule:
    """Schedule of `host` among `hosts`. `ranks_per_host` decides if the first messages hold partial results or sums.

    Raises `WeaveError` for an unknown algorithm and for a host that there is not.
    """
    if algorithm not in _SCHEDULES:
        raise WeaveError(f"no algorithm between hosts is called {algorithm!r}; there are {', '.join(_SCHEDULES)}")
    if not 0 <= host < hosts:
        raise WeaveError(f"host {host} of {hosts}: expected 0 to {hosts - 1}")
    if hosts == 1:
        return HostSchedule(1, ())
    first = Payload.PARTIALS if ranks_per_host == 1 else Payload.SUMS
    return _SCHEDULES[algorithm](host, hosts, first)


def _one_shot(host: int, hosts: int, first: Payload) -> HostSchedule:
    """Partial results to every host, which adds all of them."""
    others = _others(host, hosts)
    return HostSchedule(1, (_round(others, (0, 1), others, (0, 1), Payload.PARTIALS, Then.REDUCE),))


def _two_shot(host: int, hosts: int, first: Payload) -> HostSchedule:
    """Each host adds one part, then distributes the sums."""
    others = _others(host, hosts)
    reduce = Round(
        tuple(Send(peer, peer, peer + 1, Payload.PARTIALS) for peer in others),
        tuple(Receive(peer, host, host + 1, Payload.PARTIALS, Then.REDUCE) for peer in others),
    )
    gather = Round(
        tuple(Send(peer, host, host + 1, Payload.TOTALS) for peer in others),
        tuple(Receive(peer, peer, peer + 1, Payload.TOTALS, Then.COPY) for peer in others),
    )
    return HostSchedule(hosts, (reduce, gather))


def _others(host: int, hosts: int) -> tuple[int, ...]:
    """Each host begins with the next one, so that no two send to the same one at once."""
    return tuple((host + step) % hosts for step in range(1, hosts))


def _round(
    targets: tuple[int, ...],
    sent: tuple[int, int],
    sources: tuple[int, ...],
    received: tuple[int, int],
    payload: Payload,
    then: Then,
) -> Round:
    return Round(
        tuple(Send(peer, *sent, payload) for peer in targets),
        tuple(Receive(peer, *received, payload, then) for peer in sources),
    )


def _folded(
    host: int, hosts: int, first: Payload, num_parts: int, core: Callable[[int, Payload], list[Round]]
) -> HostSchedule:
    """`core` among the largest power of two of the hosts; the others send theirs to a partner and get the totals.

    Host `h` beyond the power `p` has partner `h - p` (Thakur and Gropp's form; NVRAR reference 40).
    """
    power, whole = 1 << doublings(hosts), (0, num_parts)
    if hosts == power:
        return HostSchedule(num_parts, tuple(core(host, first)))
    if host >= power:
        partner = (host - power,)
        sent = _round(partner, whole, (), whole, first, Then.REDUCE)
        returned = _round((), whole, partner, whole, Payload.TOTALS, Then.COPY)
        return HostSchedule(num_parts, (sent, returned))
    rounds = core(host, Payload.SUMS)
    if host + power < hosts:
        extra = (host + power,)
        rounds.insert(0, _round((), whole, extra, whole, first, Then.REDUCE))
        rounds.append(_round(extra, whole, (), whole, Payload.TOTALS, Then.COPY))
    return HostSchedule(num_parts, tuple(rounds))


def _doubling(host: int, hosts: int, first: Payload) -> HostSchedule:
    """Trades its whole sum with host `h XOR 2^i` in round `i` (NVRAR Algorithm 1, lines 14 to 22)."""

    def core(host: int, first: Payload) -> list[Round]:
        rounds, payload = [], first
        for index in range(doublings(hosts)):
            peer = (host ^ 1 << index,)
            rounds.append(_round(peer, (0, 1), peer, (0, 1), payload, Then.REDUCE))
            payload = Payload.SUMS
        return rounds

    return _folded(host, hosts, first, 1, core)


def _halving(host: int, hosts: int, first: Payload) -> HostSchedule:
    """Rabenseifner's: reduce-scatter by recursive halving, all-gather by recursive doubling."""
    power = 1 << doublings(hosts)

    def core(host: int, first: Payload) -> list[Round]:
        rounds, payload = [], first
        for index in reversed(range(doublings(hosts))):
            distance = 1 << index
            peer = host ^ distance
            kept, sent = (_block(each, distance) for each in (host, peer))
            rounds.append(_round((peer,), sent, (peer,), kept, payload, Then.REDUCE))
            payload = Payload.SUMS
        for index in range(doublings(hosts)):
            distance = 1 << index
            peer = host ^ distance
            own, theirs = (_block(each, distance) for each in (host, peer))
            rounds.append(_round((peer,), own, (peer,), theirs, Payload.TOTALS, Then.COPY))
        return rounds

    return _folded(host, hosts, first, power, core)


def _block(host: int, size: int) -> tuple[int, int]:
    """The aligned `size` parts that hold part `host`."""
    begin = host // size * size
    return begin, begin + size


def _ring(host: int, hosts: int, first: Payload) -> HostSchedule:
    """Reduce-scatter and all-gather around a ring: to the next host, from the one before."""
    after, before = ((host + 1) % hosts,), ((host - 1) % hosts,)
    rounds, payload = [], first
    for step in range(2 * (hosts - 1)):
        gathers = step >= hosts - 1
        sent, received = (_block((each - step) % hosts, 1) for each in (host, host - 1))
        if gathers:
            payload = Payload.TOTALS
        rounds.append(_round(after, sent, before, received, payload, Then.COPY if gathers else Then.REDUCE))
        payload = Payload.SUMS
    return HostSchedule(hosts, tuple(rounds))


ONE_SHOT, TWO_SHOT, DOUBLING, HALVING, RING = "one_shot", "two_shot", "doubling", "halving", "ring"
_SCHEDULES: dict[str, Callable[[int, int, Payload], HostSchedule]] = {
    ONE_SHOT: _one_shot,
    TWO_SHOT: _two_shot,
    DOUBLING: _doubling,
    HALVING: _halving,
    RING: _ring,
}
