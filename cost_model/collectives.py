"""Time of an all-reduce by fabric and algorithm: measured curves first, α–β models where there are none."""

from __future__ import annotations

from math import ceil, log

from weaveopt.cost_model.alpha_beta import (
    Cost,
    Schedule,
    all_gather,
    library,
    multicast_one_shot,
    multicast_two_shot,
    one_shot,
    two_shot,
)
from weaveopt.cost_model.between_hosts import hierarchical_sent_cost, ring_cost, tree_cost
from weaveopt.cost_model.curve import interpolate_us
from weaveopt.cost_model.machine import Curve, FabricCosts, Machine
from weaveopt.errors import ProfileError
from weaveopt.records.candidate import Algorithm, Fabric


def schedule(fabric: Fabric, algorithm: Algorithm, world: int) -> Schedule:
    """Steps and traffic of an all-reduce within one host."""
    if algorithm is Algorithm.LIBRARY:
        return library(world)
    if fabric is Fabric.MULTIMEM:
        return multicast_one_shot(world) if algorithm is Algorithm.ONE_SHOT else multicast_two_shot(world)
    return one_shot(world) if algorithm is Algorithm.ONE_SHOT else two_shot(world)


def traffic_factor(fabric: Fabric, algorithm: Algorithm, world: int) -> float:
    """Messages that a rank moves in its busier direction."""
    return schedule(fabric, algorithm, world).traffic


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
        here, there = (schedule(fabric, curve.algorithm, ranks) for ranks in (world, curve.world))
        floor_us *= crowding * here.num_steps / there.num_steps
        rest_us *= crowding * here.traffic / there.traffic
    return floor_us, rest_us


def between_hosts_cost(
    machine: Machine, fabric: Fabric, algorithm: Algorithm, message_bytes: float, world: int, hosts: int
) -> Cost:
    """An all-reduce over several hosts: the library's better of ring and tree, else the hierarchical form."""
    link, inter, local = fabric_costs(machine, fabric).link, machine.inter_host, ceil(world / hosts)
    if algorithm is Algorithm.LIBRARY:
        flat, tree = ring_cost(message_bytes, world, inter), tree_cost(message_bytes, local, hosts, link, inter)
        return min(flat, tree, key=lambda cost: cost.us)
    # Every byte that Algorithm 1 sends, which is more than eq. 4 of the paper counts: a rewrite must not be slower.
    return hierarchical_sent_cost(message_bytes, local, hosts, link, inter)


def modelled_us(
    machine: Machine, fabric: Fabric, algorithm: Algorithm, message_bytes: float, world: int, hosts: int
) -> tuple[float, float]:
    """(latency, rest) of an all-reduce without a measured curve, from the links' α and β and one launch."""
    if hosts > 1:
        cost = between_hosts_cost(machine, fabric, algorithm, message_bytes, world, hosts)
    else:
        cost = schedule(fabric, algorithm, world).cost(message_bytes, fabric_costs(machine, fabric).link)
    crowding = machine.crowding(world, hosts)
    return (machine.memory.floor_us + cost.latency_us) * crowding, cost.transfer_us * crowding


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


def collective_us(machine: Machine, kind: str, num_bytes: float, world: int, hosts: int = 1) -> float:
    """`all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all` by the library, in microseconds.

    `num_bytes` of the larger side of the call: the gathered tensor, the one to be reduced, the one to be exchanged.
    A measured curve on one host; else the schedule's steps and traffic on the slowest link between the ranks.
    """
    if world <= 1 or num_bytes <= 0:
        return 0.0
    if kind == "all_reduce":
        return all_reduce_us(machine, Fabric.LIBRARY, Algorithm.LIBRARY, num_bytes, world, hosts)
    costs = fabric_costs(machine, Fabric.LIBRARY)
    curves = {
        "all_gather": costs.all_gather,
        "reduce_scatter": costs.reduce_scatter,
        "all_to_all": costs.all_to_all,
    }[kind]
    curve = nearest_curve(curves, Algorithm.LIBRARY, world) if hosts == 1 else None
    if curve is None:
        link = costs.link if hosts == 1 else machine.inter_host
        cost = all_gather(world).cost(num_bytes, link)
        return (machine.memory.floor_us + cost.us) * machine.crowding(world, hosts)
    floor_us, rest_us = curve.points[0].us, interpolate_us(curve.points, num_bytes) - curve.points[0].us
    here, there = all_gather(world), all_gather(curve.world)
    crowding = machine.crowding(world, 1) / machine.crowding(curve.world, 1)
    return crowding * (floor_us * here.num_steps / there.num_steps + rest_us * here.traffic / there.traffic)
