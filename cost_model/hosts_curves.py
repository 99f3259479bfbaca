"""Curves that were measured between hosts, and what they say of other numbers of hosts with as many ranks each.

Among as many hosts a time is read as it was measured. For other numbers of hosts there is no time, and its substitute
must not make a rewrite look faster than it is. So a kernel of ours grows with its rounds and bytes, and takes no less
among fewer hosts; the library takes no more among more hosts, and shrinks with its rounds and bytes among fewer.
(NCCL's latency among 4 GPUs is 1.4 times that among 2, where a tree has 2 times the rounds: profile `h200x4`.)
"""

from __future__ import annotations

from collections.abc import Callable

from weaveopt.cost_model.alpha_beta import Steps
from weaveopt.cost_model.curve import carried, first_point, read_points
from weaveopt.cost_model.host_algorithms import SUM_BYTES
from weaveopt.cost_model.host_schedules import doublings
from weaveopt.cost_model.machine import Curve, FabricCosts, Machine
from weaveopt.cost_model.uncertainty import read

Carry = Callable[[float], float]
"""From the factor that rounds or bytes grow by to the one that a time is multiplied by."""


def curves_between(
    costs: FabricCosts, op: str, variant: str | None = None, ranks_of_host: int = 1
) -> tuple[Curve, ...]:
    """Those of an operation that were measured between hosts of so many ranks; with `variant`, of that one alone."""
    return tuple(
        each
        for each in costs.curves
        if each.op == op and each.hosts > 1 and each.world == each.hosts * ranks_of_host
        if variant in (None, each.variant)
    )


def at_least(factor: float) -> float:
    """Bounds the factor of one of our kernels from below by 1."""
    return max(factor, 1.0)


def at_most(factor: float) -> float:
    """Bounds the factor of the library from above by 1."""
    return min(factor, 1.0)


def hosts_parts_us(
    machine: Machine, curve: Curve, message_bytes: float, hosts: int, steps: Callable[[int], Steps], carry: Carry
) -> tuple[float, float]:
    """(latency, rest) of such a curve among `hosts` hosts: the latency grows with the number of `steps`, the rest with
    their traffic, each as `carry` says; among as many hosts as were measured, as it was measured.
    """
    total_us = read_points(machine, curve.origin, curve.points, message_bytes, curve.row_error)
    floor_us: float = read(machine, curve.origin, curve.points[0].us, first_point(curve))
    rest_us: float = total_us - floor_us
    if hosts != curve.hosts:
        here, there = steps(hosts), steps(curve.hosts)
        floor_us *= carry(here.num_steps / there.num_steps)
        rest_us *= carry(here.traffic / there.traffic)
        rest_us = carried(machine, total_us, floor_us, rest_us, ("hosts", curve.op, curve.variant, curve.hosts, hosts))
    return floor_us, rest_us


def gpu_doubling(hosts: int, element_bytes: int, ranks_of_host: int = 1) -> Steps:
    """Recursive doubling between GPUs: `log2(N)` rounds, each of all rows that a rank adds (NVRAR §4.1).

    Rows that were not added to anything yet are sent as they are, sums in fp32: in hosts of several ranks there is
    nothing else. Where `N` is no power of two, the hosts beyond it send their rows to a partner first and receive the
    sum in the end: two rounds more, and a sum more that is sent. Traffic counts those rows.
    """
    if hosts <= 1:
        return Steps(0, 0.0)
    rounds, sum_ratio = doublings(hosts), max(SUM_BYTES, element_bytes) / element_bytes
    if hosts == 1 << rounds:
        first = 1.0 if ranks_of_host == 1 else sum_ratio
        return Steps(rounds, first + sum_ratio * (rounds - 1))
    return Steps(rounds + 2, sum_ratio * (rounds + 1))
