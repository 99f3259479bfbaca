"""All-reduces among up to 1024 hosts, simulated message by message: recursive doubling against the other algorithms.

    python -m benchmarks.hosts_simulation [--machines a100x4-slingshot gh200-infiniband] [--kib 16 64 256 1024 2048]

No machine runs here: `cost_model/host_simulation.py` runs every rank's schedule on a clock with the links of a machine
profile. `predicted_us` is the closed form that decisions use. Direct algorithms and rings are simulated up to 64 hosts.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks import record
from weaveopt import cost_model
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.host_algorithms import HOST_ALGORITHMS, Problem, host_algorithm
from weaveopt.cost_model.host_schedules import DOUBLING, HALVING
from weaveopt.cost_model.host_simulation import simulate
from weaveopt.cost_model.machine import Machine
from weaveopt.records.candidate import Fabric

SUITE = "hosts_simulation"
MACHINES = ("a100x4-slingshot", "gh200-infiniband")
HOSTS = (2, 3, 4, 6, 8, 16, 24, 32, 64, 100, 128, 256, 512, 1000, 1024)
KIB = (16, 64, 256, 1024, 2048)
MOST_HOSTS = {algorithm.name: 1024 if algorithm.name in (DOUBLING, HALVING) else 64 for algorithm in HOST_ALGORITHMS}
"""The others send as many messages as there are pairs of hosts."""


COSTLY_US = 1.0
"""What a message costs each of its ends in rows that ask what follows from that; the profiles know of none."""
COSTLY_KIB = 64


def rows_of(machine: Machine, links: int, sizes: list[int], overhead_us: float = 0.0) -> list[record.Row]:
    """One row a size and number of hosts; `links` NICs a host, each shared by its ranks."""
    ranks, link = machine.ranks_per_host, fabric_costs(machine, Fabric.NVSHMEM).link
    inter = replace(machine.inter_host, overhead_us=overhead_us)
    rows = []
    for kib in sizes:
        for hosts in HOSTS:
            problem = Problem(kib * 1024, ranks, hosts)
            seen = {
                name: simulate(name, problem, link, inter, ranks // links)
                for name, most in MOST_HOSTS.items()
                if hosts <= most
            }
            ours = seen.pop(DOUBLING)
            closed = host_algorithm(DOUBLING).cost(problem, link, inter, ranks // links)
            row = record.row(
                case={"hosts": hosts, "ranks_per_host": ranks, "links": links, "kib": kib, "overhead_us": overhead_us},
                weave_us=ours.us,
                baselines={name: each.us for name, each in seen.items()},
                predicted_us=closed.us,
                parameters={
                    "algorithm": DOUBLING,
                    "simulated": True,
                    "messages_a_rank": ours.messages,
                    "peers_a_rank": ours.peers,
                    "sent_bytes_a_rank": round(ours.sent_bytes),
                    "memory_bytes_a_rank": round(ours.memory_bytes),
                },
            )
            rows.append(row)
        print(f"{machine.name}, {links} links: {kib} KiB done", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="*", default=list(MACHINES))
    parser.add_argument("--kib", nargs="*", type=int, default=list(KIB))
    parser.add_argument("--no-write", action="store_true")
    asked = parser.parse_args()
    for name in asked.machines:
        machine = cost_model.load(name)
        rows = []
        for links in sorted({1, machine.ranks_per_host}):
            rows += rows_of(machine, links, asked.kib)
        rows += rows_of(machine, machine.ranks_per_host, [COSTLY_KIB], COSTLY_US)
        if not asked.no_write:
            print(record.write(SUITE, name, rows))


if __name__ == "__main__":
    main()
