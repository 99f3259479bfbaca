"""All-reduces among up to 1024 hosts, simulated message by message: recursive doubling against the other algorithms.

No machine runs here: `cost_model/host_simulation.py` runs every rank's schedule on a clock with the links of the
machine's profile. `predicted_us` is the closed form that decisions use. Direct algorithms and rings are simulated up to
64 hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import CPU, Asked, Needs, Setting, Suite
from weaveopt import cost_model
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.host_algorithms import HOST_ALGORITHMS, HostAllReduce, host_algorithm
from weaveopt.cost_model.host_schedules import DOUBLING, HALVING
from weaveopt.cost_model.host_simulation import simulate
from weaveopt.records.candidate import Fabric

MACHINES = ("a100x4-slingshot", "gh200-infiniband")
HOSTS = Setting("hosts", (2, 3, 4, 6, 8, 16, 24, 32, 64, 100, 128, 256, 512, 1000, 1024), quick=(2, 3, 8))
KIB = Setting("kib", (16, 64, 256, 1024, 2048), quick=(64,))
MOST_HOSTS = {algorithm.name: 1024 if algorithm.name in (DOUBLING, HALVING) else 64 for algorithm in HOST_ALGORITHMS}
"""The others send as many messages as there are pairs of hosts."""
COSTLY_US = 1.0
"""Overhead of a message at each end, in rows that show its effect; the profiles have none."""
COSTLY_KIB = 64


@dataclass(frozen=True)
class Case:
    hosts: int
    ranks_per_host: int
    links: int
    """NICs a host, each shared by its ranks."""
    kib: int
    overhead_us: float = 0.0


def cases(asked: Asked) -> list[Case]:
    ranks = cost_model.load(asked.machine).ranks_per_host
    found = [
        Case(hosts, ranks, links, kib)
        for links in sorted({1, ranks})
        for kib in asked.of(KIB)
        for hosts in asked.of(HOSTS)
    ]
    return found + [Case(hosts, ranks, ranks, COSTLY_KIB, COSTLY_US) for hosts in asked.of(HOSTS)]


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    machine = cost_model.load(asked.machine)
    link = fabric_costs(machine, Fabric.NVSHMEM).link
    for case in cases:
        inter = replace(machine.inter_host, overhead_us=case.overhead_us)
        problem, sharing = (
            HostAllReduce(case.kib * 1024, case.ranks_per_host, case.hosts),
            case.ranks_per_host // case.links,
        )
        seen = {
            name: simulate(name, problem, link, inter, sharing)
            for name, most in MOST_HOSTS.items()
            if case.hosts <= most
        }
        ours = seen.pop(DOUBLING)
        yield record.row(
            case=asdict(case),
            weave_us=ours.us,
            baselines={name: each.us for name, each in seen.items()},
            predicted_us=host_algorithm(DOUBLING).cost(problem, link, inter, sharing).us,
            parameters={
                "algorithm": DOUBLING, "simulated": True, "messages_a_rank": ours.messages, "peers_a_rank": ours.peers,
                "sent_bytes_a_rank": round(ours.sent_bytes), "memory_bytes_a_rank": round(ours.memory_bytes),
            },
        )  # fmt: skip


SUITES = (
    Suite(
        "hosts_simulation", "all-reduces among up to 1024 hosts, simulated", Needs(CPU, worlds=(0,), machines=MACHINES),
        cases, rows, ours=(DOUBLING,), baselines=tuple(name for name in MOST_HOSTS if name != DOUBLING),
        predicted="the closed form that decisions use", settings=(KIB, HOSTS), replaces=True,
    ),
)  # fmt: skip
