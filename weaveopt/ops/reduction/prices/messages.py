"""The exchange between hosts: its time in terms, from what busy hosts were measured to take, or from the link alone."""

from __future__ import annotations

from math import ceil

from weaveopt.cost_model import host_exchange
from weaveopt.cost_model.collectives import fabric_costs, inter_link
from weaveopt.cost_model.host_algorithms import HostAllReduce, host_algorithm
from weaveopt.cost_model.kernels import traffic_us
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.uncertainty import estimated, read
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm
from weaveopt.records.candidate import Fabric, Term
from weaveopt.records.price import Reading
from weaveopt.records.site import DTYPE_BYTES


def problem_of(workload: Workload, algorithm: Algorithm) -> HostAllReduce:
    """Exchange of the busiest host. Hosts divide whole rows among each other: one row among 8 hosts is a single host's
    share, 8 times what it would have of many rows.
    """
    ranks_per_host, hosts = workload.world // workload.hosts, workload.hosts
    unevenness = 1.0
    if algorithm in (Algorithm.TWO_SHOT, Algorithm.HALVING) and workload.tokens:
        rows = ceil(workload.tokens / ranks_per_host)
        unevenness = ceil(rows / hosts) * hosts / rows
    return HostAllReduce(workload.message_bytes * unevenness, ranks_per_host, hosts, DTYPE_BYTES[workload.dtype])


def message_terms(machine: Machine, workload: Workload, algorithm: Algorithm, norm_us: float) -> list[Term]:
    """`synchronize`, `add`, `reduce`, `norm` and `distribute`; `norm_us` is the passes over the rows in memory."""
    parts = _busy_us(machine, workload, algorithm)
    terms = []
    if parts is None:
        parts = _of_the_link_us(machine, workload, algorithm)
        if algorithm in (Algorithm.DOUBLING, Algorithm.HALVING):
            terms.append(Term("add", _added_us(machine, workload, algorithm)))
    fixed_us, moved_us = parts
    terms = [Term("synchronize", fixed_us), *terms]
    if algorithm is Algorithm.ONE_SHOT:
        return [*terms, Term("reduce", moved_us), Term("norm", norm_us)]
    return [*terms, Term("reduce", moved_us / 2), Term("norm", norm_us), Term("distribute", moved_us / 2)]


def _busy_us(machine: Machine, workload: Workload, algorithm: Algorithm) -> tuple[float, float] | None:
    """(what does not grow with bytes, what does), where exchanges were measured; None where not."""
    ranks_per_host = workload.world // workload.hosts
    known = host_exchange.nearest(machine.busy_hosts, workload.hosts, ranks_per_host)
    if known is None:
        return None
    traffic = host_algorithm(algorithm.value).traffic(problem_of(workload, algorithm))
    # Hosts that share nothing do not slow each other down; a host's own ranks may, beyond its cores.
    crowding = known.crowding(workload.hosts, ranks_per_host) / known.crowding(known.hosts, known.ranks_per_host)
    if not known.processors:
        there = machine.oversubscription(known.hosts * known.ranks_per_host, known.hosts)
        crowding = machine.oversubscription(workload.world, workload.hosts) / there
    reading: Reading = (known.origin, algorithm, known.hosts, known.ranks_per_host, workload.message_bytes)
    fixed_us = known.fixed_us(traffic.steps, traffic.messages) * crowding
    moved_us = known.bytes_us(traffic.sent_bytes, workload.message_bytes) * crowding
    return read(machine, known.origin, fixed_us, reading), read(machine, known.origin, moved_us, reading)


def _of_the_link_us(machine: Machine, workload: Workload, algorithm: Algorithm) -> tuple[float, float]:
    """The same from `α`, `β` and `o` of the link: a lower bound, as if nothing but messages took time."""
    local, inter = fabric_costs(machine, Fabric.TCP).link, inter_link(machine, Fabric.TCP)
    cost = host_algorithm(algorithm.value).cost(problem_of(workload, algorithm), local, inter)
    slowdown = machine.oversubscription(workload.world, workload.hosts)
    reading: Reading = (Fabric.TCP, algorithm, workload.message_bytes, workload.world, workload.hosts)
    fixed_us = (machine.memory.floor_us + cost.latency_us) * slowdown
    return (
        estimated(machine, fixed_us, reading),
        estimated(machine, cost.transfer_us * slowdown, reading),
    )


def _added_us(machine: Machine, workload: Workload, algorithm: Algorithm) -> float:
    """Sums of some hosts are made in memory: what arrived and what was there are read, and as much is written."""
    moved = 2 * host_algorithm(algorithm.value).traffic(problem_of(workload, algorithm)).received_bytes
    return traffic_us(machine, moved) * machine.oversubscription(workload.world, workload.hosts)
