"""All-reduces among hosts by algorithm: messages, bytes, memory and time, in closed form.

`N` hosts of `G` ranks; a message of `M` bytes in elements of `e` bytes. Rank `l` of each host works on share `l`, of `M
/ G` bytes, and all ranks of a host at once. Sums are sent in `max(4, e)` bytes an element, `w` for short the factor
`max(4, e) / e`. Between hosts a step takes `α` and a message `o` of each of its two ends (`Link.overhead_us`); a link
between hosts, `β` bytes per second and direction, is shared by `ranks_per_link` ranks of a host.

`host_schedules` has the messages themselves, `host_simulation` runs them on a clock; the tests hold the three together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from weaveopt.cost_model.alpha_beta import NOTHING, Cost, two_shot
from weaveopt.cost_model.host_schedules import DOUBLING, HALVING, ONE_SHOT, RING, TWO_SHOT, doublings
from weaveopt.cost_model.machine import Link

SUM_BYTES = 4
"""Bytes of an element of a sum in transit: fp32, or the message's dtype if that is wider."""


@dataclass(frozen=True)
class HostAllReduce:
    """An all-reduce of `message_bytes` among `hosts` hosts of `ranks_per_host` ranks."""

    message_bytes: float
    ranks_per_host: int
    hosts: int
    element_bytes: int = 2

    @property
    def share_bytes(self) -> float:
        """Bytes of one rank's share, in the message's dtype."""
        return self.message_bytes / self.ranks_per_host

    @property
    def sum_bytes(self) -> float:
        """Bytes of one rank's share in the dtype of sums."""
        return self.share_bytes * max(SUM_BYTES, self.element_bytes) / self.element_bytes

    @property
    def first_bytes(self) -> float:
        """Bytes of a share before anything arrived: the partial result itself if a host has one rank, otherwise its
        sum."""
        return self.share_bytes if self.ranks_per_host == 1 else self.sum_bytes


@dataclass(frozen=True)
class Phase:
    """`rounds` equal rounds of the busiest rank: messages of `num_bytes` each that do not wait for one another."""

    rounds: int
    sends: int
    receives: int
    num_bytes: float
    waits: bool = True
    """True if its `α` adds to the total; false if it passes while messages of another round are in transit."""


@dataclass(frozen=True)
class HostTraffic:
    """Messages and bytes of the busiest rank, and the memory and connections that it needs for them."""

    steps: int
    """Rounds that wait for one another, of the whole algorithm."""
    messages: int
    """Messages that it sends."""
    sent_bytes: float
    received_bytes: float
    peers: int
    """Hosts that it exchanges messages with: its connections."""
    memory_bytes: float
    """Memory of a slot for each message received in a call, so that a peer may be ahead; and of the sum, if one is
    sent."""


@dataclass(frozen=True)
class HostAlgorithm:
    """One row of the table below. `phases` and `peers` take two hosts or more."""

    name: str
    phases: Callable[[HostAllReduce], tuple[Phase, ...]]
    peers: Callable[[int], int]
    sends_partial_sums: bool
    """True if messages hold sums of some hosts: a host's own sum then needs memory."""

    def traffic(self, problem: HostAllReduce) -> HostTraffic:
        """Traffic of the busiest rank."""
        if problem.hosts <= 1 or problem.message_bytes <= 0:
            return HostTraffic(0, 0, 0.0, 0.0, 0, 0.0)
        phases = self.phases(problem)
        received = sum(phase.rounds * phase.receives * phase.num_bytes for phase in phases)
        return HostTraffic(
            steps=sum(phase.rounds for phase in phases),
            messages=sum(phase.rounds * phase.sends for phase in phases),
            sent_bytes=sum(phase.rounds * phase.sends * phase.num_bytes for phase in phases),
            received_bytes=received,
            peers=self.peers(problem.hosts),
            memory_bytes=received + (problem.sum_bytes if self.sends_partial_sums else 0.0),
        )

    def between_cost(self, problem: HostAllReduce, inter: Link, ranks_per_link: int) -> Cost:
        """Between hosts alone, all shares at once."""
        if problem.hosts <= 1 or problem.message_bytes <= 0:
            return NOTHING
        phases = self.phases(problem)
        latency_us = _between_us(phases, inter, ranks_per_link, counts_bytes=False)
        return Cost(latency_us, _between_us(phases, inter, ranks_per_link) - latency_us)

    def cost(self, problem: HostAllReduce, local: Link, inter: Link, ranks_per_link: int | None = None) -> Cost:
        """The whole all-reduce: the host's ranks reduce-scatter, hosts exchange, the host's ranks all-gather.

        `ranks_per_link` None: all ranks of a host share one link. Within a host every rank reaches every other one
        at once, `2 α_local + 2 (G - 1) / G · M / β_local`.
        """
        shared = problem.ranks_per_host if ranks_per_link is None else ranks_per_link
        within = two_shot(problem.ranks_per_host).cost(problem.message_bytes, local)
        return within + self.between_cost(problem, inter, shared)


def _between_us(phases: tuple[Phase, ...], inter: Link, ranks_per_link: int, counts_bytes: bool = True) -> float:
    """Rounds one after the other. Ranks that share a link take turns on it, and one waits while another sends.

    The longest of three: a rank's own rounds, with the other ranks' messages ahead of its own in the longest one; the
    link's work, which never pauses but for one `α`, and for what goes through its other direction before and after; and
    round by round whichever of both is longer, where all messages go both ways.
    """
    own_us = longest_us = wire_us = out_us = in_us = rounds_us = tail_us = 0.0
    others = ranks_per_link - 1
    for phase in phases:
        one_us = inter.us(phase.num_bytes) if counts_bytes else 0.0
        messages = max(phase.sends, phase.receives)
        alone_us = _round_us(messages, one_us, 1, inter) - (0.0 if phase.waits else inter.latency_us)
        own_us += phase.rounds * alone_us
        queued_us = _round_us(messages, one_us, ranks_per_link, inter) - _round_us(messages, one_us, 1, inter)
        longest_us = max(longest_us, queued_us)
        wire_us += phase.rounds * messages * one_us
        out_us += phase.rounds * phase.sends * one_us
        in_us += phase.rounds * phase.receives * one_us
        is_duplex = phase.sends and phase.receives
        cycle_us = max(alone_us, ranks_per_link * messages * one_us if is_duplex else 0.0)
        rounds_us += phase.rounds * cycle_us
        if is_duplex:
            tail_us = _round_us(messages, one_us, ranks_per_link, inter) - cycle_us
    return max(own_us + longest_us, wire_us + others * max(out_us, in_us) + inter.step_us, rounds_us + tail_us)


def _round_us(messages: int, one_us: float, ranks_per_link: int, inter: Link) -> float:
    """`messages` out and in, each `one_us` on the wire: bound by the link, by the last message, or by `o` alone."""
    alpha_us, overhead_us = inter.latency_us, inter.overhead_us
    wire_us = 2 * overhead_us + alpha_us + ranks_per_link * messages * one_us
    last_us = (messages + 1) * overhead_us + alpha_us + ranks_per_link * one_us
    return max(wire_us, last_us, 2 * messages * overhead_us)


def _present(*phases: Phase) -> tuple[Phase, ...]:
    return tuple(phase for phase in phases if phase.rounds)


def _one_shot(problem: HostAllReduce) -> tuple[Phase, ...]:
    """`M (N - 1)`: a share of each of the host's partial results, to every host."""
    others = problem.hosts - 1
    return (Phase(1, others, others, problem.message_bytes),)


def _two_shot(problem: HostAllReduce) -> tuple[Phase, ...]:
    """`(M + M / G) (N - 1) / N`: partial results of each host's part, then its sums."""
    others, hosts = problem.hosts - 1, problem.hosts
    return (
        Phase(1, others, others, problem.message_bytes / hosts),
        Phase(1, others, others, problem.share_bytes / hosts),
    )


def _folded(problem: HostAllReduce, core: tuple[Phase, ...], waits_at_end: bool) -> tuple[Phase, ...]:
    """`core` among a power of two of hosts, with one round before it and one after it for the others."""
    before = Phase(1, 0, 1, problem.first_bytes)
    return (before, *core, Phase(1, 1, 0, problem.share_bytes, waits=waits_at_end))


def _power(hosts: int) -> int:
    """The largest power of two that is not above `hosts`."""
    return 1 << doublings(hosts)


def _doubling(problem: HostAllReduce) -> tuple[Phase, ...]:
    """`M / G (1 or w) + w M / G (log2(N) - 1)`: the whole share in every round."""
    rounds, hosts = doublings(problem.hosts), problem.hosts
    if hosts == _power(hosts):
        return _present(Phase(1, 1, 1, problem.first_bytes), Phase(rounds - 1, 1, 1, problem.sum_bytes))
    extra = hosts - _power(hosts)
    # No host is as many rounds away from one that stands in for another as there are rounds, unless more than half do.
    core = (Phase(rounds, 1, 1, problem.sum_bytes),)
    return _folded(problem, core, waits_at_end=2 * extra > _power(hosts))


def _halving(problem: HostAllReduce) -> tuple[Phase, ...]:
    """Half the share, a quarter, ... in sums; and back in totals: `2 log2(N)` rounds, `(1 + w) (N - 1) / N · M / G`."""
    rounds = doublings(problem.hosts)
    is_power = problem.hosts == _power(problem.hosts)
    inwards = [
        Phase(1, 1, 1, (problem.first_bytes if index == 1 and is_power else problem.sum_bytes) / (1 << index))
        for index in range(1, rounds + 1)
    ]
    outwards = [Phase(1, 1, 1, problem.share_bytes / (1 << index)) for index in reversed(range(1, rounds + 1))]
    core = (*inwards, *outwards)
    return core if is_power else _folded(problem, core, waits_at_end=True)


def _ring(problem: HostAllReduce) -> tuple[Phase, ...]:
    """A part of `1 / N` in each of `2 (N - 1)` rounds: `(1 + w) (N - 1) / N · M / G`."""
    hosts = problem.hosts
    return _present(
        Phase(1, 1, 1, problem.first_bytes / hosts),
        Phase(hosts - 2, 1, 1, problem.sum_bytes / hosts),
        Phase(hosts - 1, 1, 1, problem.share_bytes / hosts),
    )


def _others(hosts: int) -> int:
    return hosts - 1


def _doubling_peers(hosts: int) -> int:
    """`log2(N)`; a host that stands in for another one has that one too."""
    return doublings(hosts) + (hosts != _power(hosts))


def _neighbours(hosts: int) -> int:
    return min(2, hosts - 1)


HOST_ALGORITHMS: tuple[HostAlgorithm, ...] = (
    HostAlgorithm(ONE_SHOT, _one_shot, _others, sends_partial_sums=False),
    HostAlgorithm(TWO_SHOT, _two_shot, _others, sends_partial_sums=False),
    HostAlgorithm(DOUBLING, _doubling, _doubling_peers, sends_partial_sums=True),
    HostAlgorithm(HALVING, _halving, _doubling_peers, sends_partial_sums=True),
    HostAlgorithm(RING, _ring, _neighbours, sends_partial_sums=True),
)
"""Every algorithm among hosts that `host_schedules` has messages of."""


def host_algorithm(name: str) -> HostAlgorithm:
    """The row of that name; `KeyError` where there is none."""
    return {algorithm.name: algorithm for algorithm in HOST_ALGORITHMS}[name]


@cache
def hosts_choice(
    message_bytes: float,
    ranks_per_host: int,
    hosts: int,
    local: Link,
    inter: Link,
    element_bytes: int = 2,
    names: tuple[str, ...] | None = None,
    ranks_per_link: int | None = None,
) -> tuple[tuple[str, Cost], ...]:
    """(name, cost) of every algorithm, or of those in `names`, the cheapest first; equal ones by name.

    `local` and `inter` are the links within a host and between hosts; `ranks_per_link`: how many of a host's ranks
    share one link to the other hosts (None: all of them).
    """
    problem = HostAllReduce(message_bytes, ranks_per_host, hosts, element_bytes)
    priced = [
        (algorithm.name, algorithm.cost(problem, local, inter, ranks_per_link))
        for algorithm in HOST_ALGORITHMS
        if names is None or algorithm.name in names
    ]
    return tuple(sorted(priced, key=lambda pair: (pair[1].us, pair[0])))
