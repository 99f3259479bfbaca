"""Time of an all-reduce by fabric and algorithm: measured curves first, α–β models where there are none.

`M` message bytes, `n` ranks, `N` hosts, `G = n / N` ranks a host; `α` latency of a step, `β` bytes per
second and direction. Equations of the multi-host forms are numbered as in the NVRAR paper, §2 and §4.3.
"""

from __future__ import annotations

from math import ceil, log, log2

from weaveopt.cost_model.curve import interpolate_us
from weaveopt.cost_model.machine import Curve, FabricCosts, Link, Machine
from weaveopt.decision import Algorithm, Fabric
from weaveopt.errors import ProfileError

# Data and arrival flag share a word between hosts (NVRAR §4.2.2: 4 bytes of data in 8 sent).
FLAGGED_PAYLOAD = 2.0


def traffic_factor(fabric: Fabric, algorithm: Algorithm, world: int) -> float:
    """Messages that a rank moves in its busier direction.

    one-shot `n - 1` (every rank reads all peers), two-shot and ring `2 (n - 1) / n`; through a switch that
    reduces and multiplies, two-shot `1 + 1 / n` (the partial goes out once and 1 / n of the sum with it).
    """
    if algorithm is Algorithm.ONE_SHOT:
        return float(world if fabric is Fabric.MULTIMEM else world - 1)
    if fabric is Fabric.MULTIMEM:
        return 1.0 + 1.0 / world
    return 2.0 * (world - 1) / world


def latency_steps(algorithm: Algorithm, world: int) -> float:
    """Dependent steps of a small message: flags are polled at once; a library goes down and up a tree."""
    if algorithm is Algorithm.LIBRARY:
        return 2.0 * log2(world)
    return 1.0 if algorithm is Algorithm.ONE_SHOT else 2.0


def ring_us(message_bytes: float, ranks: int, link: Link) -> float:
    """`2 (n - 1) α + 2 (n - 1) / n · M / β` (eq. 1)."""
    return 2 * (ranks - 1) * link.latency_us + link.us(2 * (ranks - 1) / ranks * message_bytes)


def tree_us(message_bytes: float, ranks_per_host: int, hosts: int, local: Link, inter: Link) -> float:
    """`2 (G - 1) α_intra + 2 log2(N) α_inter + 2 (N - 1) / N · M / β_inter` (eq. 2)."""
    steps_us = 2 * (ranks_per_host - 1) * local.latency_us + 2 * log2(hosts) * inter.latency_us
    return steps_us + inter.us(2 * (hosts - 1) / hosts * message_bytes)


def hierarchical_us(message_bytes: float, ranks_per_host: int, hosts: int, local: Link, inter: Link) -> float:
    """Reduce-scatter in the host, recursive doubling between hosts, all-gather in the host (eqs. 3-6)."""
    gather = (ranks_per_host - 1) * local.latency_us + local.us((ranks_per_host - 1) / ranks_per_host * message_bytes)
    exchanged = (hosts - 1) / hosts * FLAGGED_PAYLOAD * message_bytes / ranks_per_host
    return 2 * gather + ceil(log2(hosts)) * inter.latency_us + inter.us(exchanged)


def fabric_costs(machine: Machine, fabric: Fabric) -> FabricCosts:
    """The fabric's row of the profile; `ProfileError` if the machine has no such fabric."""
    for costs in machine.fabric_costs:
        if costs.fabric is fabric:
            return costs
    known = ", ".join(each.value for each in machine.fabrics)
    raise ProfileError(f"machine {machine.name!r} has no fabric {fabric.value!r}; it has: {known}")


def nearest_curve(curves: tuple[Curve, ...], algorithm: Algorithm, world: int) -> Curve | None:
    """The curve of `algorithm` measured at the world size nearest to `world` (the larger of two equally near)."""
    fitting = [curve for curve in curves if curve.algorithm is algorithm]
    return min(fitting, key=lambda curve: (abs(log(curve.world / world)), -curve.world), default=None)


def curve_us(machine: Machine, fabric: Fabric, curve: Curve, message_bytes: float, world: int) -> tuple[float, float]:
    """(latency, rest) of a measured curve, carried over from its world size to `world`.

    The latency grows with the steps, the rest with the traffic, both with the crowding of processors.
    """
    floor_us = curve.points[0].us
    rest_us = interpolate_us(curve.points, message_bytes) - floor_us
    if world != curve.world:
        crowding = machine.crowding(world, 1) / machine.crowding(curve.world, 1)
        algorithm = curve.algorithm
        floor_us *= crowding * latency_steps(algorithm, world) / latency_steps(algorithm, curve.world)
        rest_us *= crowding * traffic_factor(fabric, algorithm, world) / traffic_factor(fabric, algorithm, curve.world)
    return floor_us, rest_us


def between_hosts_us(
    machine: Machine, fabric: Fabric, algorithm: Algorithm, message_bytes: float, world: int, hosts: int
) -> float:
    """An all-reduce over several hosts: the library's better of ring and tree, else the hierarchical form."""
    link, inter, local = fabric_costs(machine, fabric).link, machine.inter_host, ceil(world / hosts)
    if algorithm is Algorithm.LIBRARY:
        return min(ring_us(message_bytes, world, inter), tree_us(message_bytes, local, hosts, link, inter))
    return hierarchical_us(message_bytes, local, hosts, link, inter)


def modelled_us(
    machine: Machine, fabric: Fabric, algorithm: Algorithm, message_bytes: float, world: int, hosts: int
) -> tuple[float, float]:
    """(latency, rest) of an all-reduce without a measured curve, from the links' α and β and one launch."""
    if hosts > 1:
        latency_us = between_hosts_us(machine, fabric, algorithm, 0.0, world, hosts)
        rest_us = between_hosts_us(machine, fabric, algorithm, message_bytes, world, hosts) - latency_us
    else:
        link = fabric_costs(machine, fabric).link
        latency_us = latency_steps(algorithm, world) * link.latency_us
        rest_us = link.us(traffic_factor(fabric, algorithm, world) * message_bytes)
    crowding = machine.crowding(world, hosts)
    return (machine.memory.floor_us + latency_us) * crowding, rest_us * crowding


def all_reduce_parts_us(
    machine: Machine, fabric: Fabric, algorithm: Algorithm, message_bytes: float, world: int, hosts: int = 1
) -> tuple[float, float]:
    """(latency, rest) of `all_reduce_us`."""
    if world <= 1 or message_bytes <= 0:
        return 0.0, 0.0
    costs = fabric_costs(machine, fabric)
    curve = nearest_curve(costs.all_reduce or costs.all_reduce_norm, algorithm, world) if hosts == 1 else None
    if curve is not None:
        return curve_us(machine, fabric, curve, message_bytes, world)
    return modelled_us(machine, fabric, algorithm, message_bytes, world, hosts)


def all_reduce_us(
    machine: Machine, fabric: Fabric, algorithm: Algorithm, message_bytes: float, world: int, hosts: int = 1
) -> float:
    """`all_reduce(x)` of `message_bytes` among `world` ranks on `hosts` hosts, in microseconds.

    A measured curve is read log-log between its points and carried over to other world sizes; without one,
    and between hosts, the α–β models above. Raises `ProfileError` only for a fabric that the machine lacks.
    """
    latency_us, rest_us = all_reduce_parts_us(machine, fabric, algorithm, message_bytes, world, hosts)
    return latency_us + rest_us
