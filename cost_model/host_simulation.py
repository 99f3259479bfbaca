"""An all-reduce among hosts on a clock: every rank runs its schedule, message by message. No formula of its time.

A rank works on one message at a time, `o` to send one and `o` to take one in; it posts what a round sends before it
takes in what has come. A link sends one message after the other in the order in which they were posted, `bytes / β`
each; `α` later the receiving side takes them in at the same rate, those of an earlier round of its schedule first: an
early message delays no other. Ranks of a host may share a link.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import IntEnum
from heapq import heappop, heappush

from weaveopt.cost_model.alpha_beta import two_shot
from weaveopt.cost_model.host_algorithms import HostAllReduce, host_algorithm
from weaveopt.cost_model.host_schedules import HostSchedule, Payload, host_schedule
from weaveopt.cost_model.machine import Link


@dataclass(frozen=True)
class Simulated:
    """Result of a simulation. Of per-rank numbers, the largest."""

    us: float
    """Until the last rank has the result, the exchange within the hosts included."""
    messages: int
    """Messages that a rank sent."""
    sent_bytes: float
    received_bytes: float
    peers: int
    """Hosts that a rank exchanged messages with."""
    memory_bytes: float
    """Memory of a slot for each message that a rank received; and of its own sum, if one is sent."""
    total_messages: int
    """Messages of all ranks."""


class _EventKind(IntEnum):
    POSTED = 0
    ARRIVES = 1
    """Its first byte is at the receiver's link."""
    TAKEN_IN = 2
    """Its last byte is through the receiver's link, unless that has changed its mind since."""


@dataclass(frozen=True, slots=True)
class _Message:
    sender: int
    receiver: int
    num_bytes: float
    turn: int = 0
    """Turn on the link, for events `TAKEN_IN`."""


@dataclass(slots=True)
class _Inlet:
    """A link's receiving side: what has come in part, by the receiver's round, and what is taken in now."""

    waiting: list[tuple[int, int, float, _Message]] = field(default_factory=list)
    """(round, number, microseconds that are left, message)."""
    now: tuple[int, int, float, _Message] | None = None
    since_us: float = 0.0
    turn: int = 0


@dataclass(slots=True)
class _Rank:
    free_us: float = 0.0
    """From when on it may work on the next message."""
    round: int = -1
    waits_for: Counter[int] = field(default_factory=Counter)
    """Messages of this round that it has not taken in, by host."""
    arrived: Counter[int] = field(default_factory=Counter)
    """Messages of later rounds that are here already, by host."""
    num_received: Counter[int] = field(default_factory=Counter)
    """Messages that were at its link so far, by host."""
    messages: int = 0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    peers: set[int] = field(default_factory=set)


def _rounds_by_peer(schedule: HostSchedule) -> dict[int, list[int]]:
    """For each peer the rounds in which its messages are awaited, in their order."""
    found: dict[int, list[int]] = {}
    for index, each in enumerate(schedule.rounds):
        for receive in each.receives:
            found.setdefault(receive.peer, []).append(index)
    return found


class _Clock:
    """The state of one run. Ranks are numbered host by host."""

    def __init__(self, algorithm: str, problem: HostAllReduce, inter: Link, ranks_per_link: int) -> None:
        local = problem.ranks_per_host
        self._problem, self._inter, self._local = problem, inter, local
        self._schedules = [host_schedule(algorithm, host, problem.hosts, local) for host in range(problem.hosts)]
        self.ranks = [_Rank() for _ in range(problem.hosts * local)]
        num_links = problem.hosts * -(-local // ranks_per_link)
        self._link_of = [
            host * -(-local // ranks_per_link) + rank // ranks_per_link
            for host in range(problem.hosts)
            for rank in range(local)
        ]
        self._rounds_of = [_rounds_by_peer(schedule) for schedule in self._schedules]
        self._out_free_us = [0.0] * num_links
        self._inlets = [_Inlet() for _ in range(num_links)]
        self._events: list[tuple[float, int, _EventKind, _Message]] = []
        """(time, number, what, message): equal times in the order in which they were planned."""
        self._num_events = 0

    def run(self) -> float:
        for rank in range(len(self.ranks)):
            self._begin_rounds(rank)
        while self._events:
            now_us, _, kind, message = heappop(self._events)
            if kind is _EventKind.POSTED:
                self._leave(now_us, message)
            elif kind is _EventKind.ARRIVES:
                self._arrive(now_us, message)
            else:
                self._take_in(now_us, message)
        stuck = [rank for rank, state in enumerate(self.ranks) if state.waits_for]
        assert not stuck, f"ranks {stuck} wait for messages that no rank sends"
        return max(state.free_us for state in self.ranks)

    def _plan(self, at_us: float, kind: _EventKind, message: _Message) -> None:
        self._num_events += 1
        heappush(self._events, (at_us, self._num_events, kind, message))

    def _leave(self, now_us: float, message: _Message) -> None:
        """Queues a message on the sender's link, after those already there."""
        link = self._link_of[message.sender]
        begin_us = max(now_us, self._out_free_us[link])
        self._out_free_us[link] = begin_us + self._inter.us(message.num_bytes)
        self._plan(begin_us + self._inter.latency_us, _EventKind.ARRIVES, message)

    def _arrive(self, now_us: float, message: _Message) -> None:
        """At the receiver's link, ahead of what belongs to a later round."""
        receiver, host = message.receiver, message.sender // self._local
        state, inlet = self.ranks[receiver], self._inlets[self._link_of[receiver]]
        at = self._rounds_of[receiver // self._local][host][state.num_received[host]]
        state.num_received[host] += 1
        self._num_events += 1
        heappush(inlet.waiting, (at, self._num_events, self._inter.us(message.num_bytes), message))
        if inlet.now is None:
            self._next_turn(now_us, inlet)
        elif at < inlet.now[0]:
            round_, number, left_us, held = inlet.now
            heappush(inlet.waiting, (round_, number, left_us - (now_us - inlet.since_us), held))
            self._next_turn(now_us, inlet)

    def _next_turn(self, now_us: float, inlet: _Inlet) -> None:
        inlet.turn += 1
        inlet.since_us, inlet.now = now_us, heappop(inlet.waiting) if inlet.waiting else None
        if inlet.now is not None:
            _, _, left_us, message = inlet.now
            self._plan(now_us + left_us, _EventKind.TAKEN_IN, replace(message, turn=inlet.turn))

    def _take_in(self, now_us: float, message: _Message) -> None:
        inlet = self._inlets[self._link_of[message.receiver]]
        if message.turn == inlet.turn:
            self._next_turn(now_us, inlet)
            self._deliver(now_us, message.sender, message.receiver, message.num_bytes)

    def _deliver(self, now_us: float, sender: int, receiver: int, num_bytes: float) -> None:
        state, host = self.ranks[receiver], sender // self._local
        state.received_bytes += num_bytes
        state.peers.add(host)
        if host not in state.waits_for:
            state.arrived[host] += 1
            return
        state.free_us = max(state.free_us, now_us) + self._inter.overhead_us
        self._take(state, host)
        if not state.waits_for:
            self._begin_rounds(receiver)

    @staticmethod
    def _take(state: _Rank, host: int) -> None:
        state.waits_for[host] -= 1
        if not state.waits_for[host]:
            del state.waits_for[host]

    def _begin_rounds(self, rank: int) -> None:
        """Begins the next round, and later ones whose messages have all arrived."""
        state, host, own = self.ranks[rank], rank // self._local, rank % self._local
        schedule = self._schedules[host]
        while not state.waits_for and state.round + 1 < len(schedule.rounds):
            state.round += 1
            now = schedule.rounds[state.round]
            for send in now.sends:
                state.free_us += self._inter.overhead_us
                num_bytes = self._bytes(schedule, send.begin, send.end, send.payload)
                state.messages += 1
                state.sent_bytes += num_bytes
                state.peers.add(send.peer)
                message = _Message(rank, send.peer * self._local + own, num_bytes)
                self._plan(state.free_us, _EventKind.POSTED, message)
            for receive in now.receives:
                if state.arrived[receive.peer]:
                    state.arrived[receive.peer] -= 1
                    state.free_us += self._inter.overhead_us
                else:
                    state.waits_for[receive.peer] += 1

    def _bytes(self, schedule: HostSchedule, begin: int, end: int, payload: Payload) -> float:
        share = (end - begin) / schedule.num_parts
        if payload is Payload.SUMS:
            return share * self._problem.sum_bytes
        return share * (self._problem.message_bytes if payload is Payload.PARTIALS else self._problem.share_bytes)


def simulate(
    algorithm: str, problem: HostAllReduce, local: Link, inter: Link, ranks_per_link: int | None = None
) -> Simulated:
    """Runs `algorithm` among the ranks of `problem`, all of which begin at once.

    `ranks_per_link` None: all ranks of a host share one link. What ranks of a host exchange with each other before and
    after takes as long for all of them and is added.
    """
    clock = _Clock(algorithm, problem, inter, ranks_per_link or problem.ranks_per_host)
    between_us = clock.run()
    within_us = two_shot(problem.ranks_per_host).us(problem.message_bytes, local)
    ranks = clock.ranks
    local_sum = problem.sum_bytes if host_algorithm(algorithm).sends_partial_sums and problem.hosts > 1 else 0.0
    return Simulated(
        us=within_us + between_us,
        messages=max(state.messages for state in ranks),
        sent_bytes=max(state.sent_bytes for state in ranks),
        received_bytes=max(state.received_bytes for state in ranks),
        peers=max(len(state.peers) for state in ranks),
        memory_bytes=local_sum + max(state.received_bytes for state in ranks),
        total_messages=sum(state.messages for state in ranks),
    )
