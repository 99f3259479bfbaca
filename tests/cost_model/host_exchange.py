"""Schedules among hosts, executed on arrays: what each host holds at the end, and what was sent."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weaveopt.cost_model.host_schedules import HostSchedule, Payload, Receive, Then, host_schedule

Array = NDArray[np.float32]


@dataclass
class Executed:
    """Results of all hosts, and for each host what it sent: (payload, number of elements)."""

    results: list[Array]
    sent: list[Counter[Payload]]
    num_messages: list[int]
    received: list[Counter[Payload]]
    peers: list[set[int]]


def _bounds(schedule: HostSchedule, begin: int, end: int, length: int) -> slice:
    return slice(begin * length // schedule.num_parts, end * length // schedule.num_parts)


def execute(algorithm: str, own: list[Array], ranks_per_host: int = 1) -> Executed:
    """Runs all hosts in turns, each as far as its messages have come; `own[h]` is what host `h` begins with.

    Raises if a host waits for what no host sends, if a message has another length or payload than its receiver expects,
    or if one is left over.
    """
    hosts, length = len(own), len(own[0])
    schedules = [host_schedule(algorithm, host, hosts, ranks_per_host) for host in range(hosts)]
    held = [array.copy() for array in own]
    found = Executed(held, *([kind() for _ in own] for kind in (Counter, int, Counter, set)))  # type: ignore[call-overload]
    wires: dict[tuple[int, int], deque[tuple[Payload, Array]]] = {}
    at, has_sent = [0] * hosts, [False] * hosts
    ready = deque(range(hosts))
    waiting: set[int] = set()
    while ready:
        host = ready.popleft()
        schedule = schedules[host]
        if at[host] == len(schedule.rounds):
            continue
        now = schedule.rounds[at[host]]
        if not has_sent[host]:
            for send in now.sends:
                data = held[host][_bounds(schedule, send.begin, send.end, length)].copy()
                wires.setdefault((host, send.peer), deque()).append((send.payload, data))
                found.sent[host][send.payload] += len(data)
                found.num_messages[host] += 1
                found.peers[host].add(send.peer)
                if send.peer in waiting:
                    waiting.discard(send.peer)
                    ready.append(send.peer)
            has_sent[host] = True
        need = Counter(receive.peer for receive in now.receives)
        if any(len(wires.get((peer, host), ())) < count for peer, count in need.items()):
            waiting.add(host)
            continue
        _take(host, now.receives, schedule, held, wires, found)
        at[host] += 1
        has_sent[host] = False
        ready.append(host)
    stuck = [host for host in range(hosts) if at[host] < len(schedules[host].rounds)]
    assert not stuck, f"{algorithm}: hosts {stuck} wait for messages that no rank sends"
    assert not any(wires.values()), f"{algorithm}: messages that nobody receives"
    return found


def _take(
    host: int,
    receives: tuple[Receive, ...],
    schedule: HostSchedule,
    held: list[Array],
    wires: dict[tuple[int, int], deque[tuple[Payload, Array]]],
    found: Executed,
) -> None:
    """Copies what arrived, or adds it up in the order of the hosts, the own in its place."""
    length = len(held[host])
    terms: dict[tuple[int, int], list[tuple[int, Array]]] = {}
    for receive in receives:
        payload, data = wires[receive.peer, host].popleft()
        where = _bounds(schedule, receive.begin, receive.end, length)
        assert payload is receive.payload, f"host {host} expects {receive.payload} of {receive.peer}, not {payload}"
        assert len(data) == where.stop - where.start, f"host {host}: {len(data)} elements, not {where}"
        found.received[host][payload] += len(data)
        found.peers[host].add(receive.peer)
        if receive.then is Then.COPY:
            held[host][where] = data
        else:
            terms.setdefault((receive.begin, receive.end), []).append((receive.peer, data))
    for (begin, end), arrived in terms.items():
        where = _bounds(schedule, begin, end, length)
        arrived.append((host, held[host][where].copy()))
        total = np.zeros(where.stop - where.start, np.float32)
        for index, (_, data) in enumerate(sorted(arrived, key=lambda pair: pair[0])):
            total = data if index == 0 else total + data
        held[host][where] = total
