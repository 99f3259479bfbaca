"""Time of a collective by fabric and variant: measured curves first, α–β models where there are none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

from weaveopt.cost_model.alpha_beta import (
    Cost,
    Steps,
    all_gather,
    library,
    multicast_one_shot,
    multicast_two_shot,
    one_shot,
    two_shot,
)
from weaveopt.cost_model.between_hosts import hierarchical_sent_cost, ring_cost, tree_cost
from weaveopt.cost_model.curve import carried, first_point, nearest_curve, read_points
from weaveopt.cost_model.host_schedules import RING
from weaveopt.cost_model.hosts_curves import at_most, curves_between, hosts_parts_us
from weaveopt.cost_model.machine import Curve, FabricCosts, Link, Machine
from weaveopt.cost_model.uncertainty import estimated, read
from weaveopt.errors import ProfileError
from weaveopt.records.candidate import Fabric

LIBRARY, ONE_SHOT, TWO_SHOT = "library", "one_shot", "two_shot"
"""Variants of `all_reduce`: NCCL or Gloo decides; every rank reads all messages; every rank reduces its share."""
TREE = "tree"
"""With `RING`, what the library's all-reduce between hosts may be."""
_STEPS: dict[str, Callable[[int], Steps]] = {LIBRARY: library, ONE_SHOT: one_shot, TWO_SHOT: two_shot}
_MULTICAST_STEPS = {**_STEPS, ONE_SHOT: multicast_one_shot, TWO_SHOT: multicast_two_shot}


def all_reduce_steps(fabric: Fabric, variant: str, world: int) -> Steps:
    """Steps and traffic of an all-reduce within one host."""
    return (_MULTICAST_STEPS if fabric is Fabric.MULTIMEM else _STEPS)[variant](world)


def fabric_costs(machine: Machine, fabric: Fabric) -> FabricCosts:
    """The fabric's row of the profile; `ProfileError` if the machine has no such fabric."""
    for costs in machine.fabric_costs:
        if costs.fabric is fabric:
            return costs
    if fabric in machine.fabrics:  # TCP: what it takes between hosts is `inter_host`, and within one what shm takes
        return FabricCosts(fabric, fabric_costs(machine, Fabric.SHM).link)
    known = ", ".join(each.value for each in machine.fabrics)
    raise ProfileError(f"machine {machine.name!r} has no fabric {fabric.value!r}; it has: {known}")


def curve_parts_us(
    machine: Machine, curve: Curve, message_bytes: float, world: int, steps: Callable[[int], Steps]
) -> tuple[float, float]:
    """(latency, rest) of a measured curve, carried over from its world size to `world` by the `steps` of each.

    The latency grows with the number of steps, the rest with the traffic, both with the oversubscription of cores.
    """
    total_us = read_points(machine, curve.origin, curve.points, message_bytes, curve.row_error)
    floor_us: float = read(machine, curve.origin, curve.points[0].us, first_point(curve))
    rest_us: float = total_us - floor_us
    if world != curve.world:
        slowdown = machine.oversubscription(world, 1) / machine.oversubscription(curve.world, 1)
        here, there = steps(world), steps(curve.world)
        floor_us *= slowdown * here.num_steps / there.num_steps
        rest_us *= slowdown * here.traffic / there.traffic
        rest_us = carried(machine, total_us, floor_us, rest_us, ("world", curve.op, curve.variant, curve.world, world))
    return floor_us, rest_us


def inter_link(machine: Machine, fabric: Fabric) -> Link:
    """The link between hosts, as the fabric uses it."""
    return fabric_costs(machine, fabric).inter_host or machine.inter_host


def library_cost(machine: Machine, message_bytes: float, world: int, hosts: int) -> tuple[str, Cost]:
    """(`ring` or `tree`, its cost): the library's all-reduce over several hosts, by the better of the two."""
    link, inter = fabric_costs(machine, Fabric.LIBRARY).link, inter_link(machine, Fabric.LIBRARY)
    flat = ring_cost(message_bytes, world, inter)
    tree = tree_cost(message_bytes, ceil(world / hosts), hosts, link, inter)
    return min(((RING, flat), (TREE, tree)), key=lambda pair: pair[1].us)


def hierarchical_us(
    machine: Machine, message_bytes: float, world: int, hosts: int, back_to_back: bool = False
) -> float:
    """The whole NVRAR all-reduce on `nvshmem`, its launches included: with all bytes that Algorithm 1 sends.

    Three kernels, where a host has several ranks; one, where there is nothing to do within a host. `back_to_back`: no
    computation since the call before, so a rank first waits for its peers to be through with that (NVRAR §4.2.3).
    """
    cost = between_hosts_cost(machine, Fabric.NVSHMEM, TWO_SHOT, message_bytes, world, hosts)
    waits_us = inter_link(machine, Fabric.NVSHMEM).step_us if back_to_back else 0.0
    return machine.memory.floor_us + cost.us + waits_us


def between_hosts_cost(
    machine: Machine, fabric: Fabric, variant: str, message_bytes: float, world: int, hosts: int
) -> Cost:
    """An all-reduce over several hosts, without its first launch."""
    link, inter, local = fabric_costs(machine, fabric).link, inter_link(machine, fabric), ceil(world / hosts)
    if variant == LIBRARY:
        return library_cost(machine, message_bytes, world, hosts)[1]
    # Every byte that Algorithm 1 sends, which is more than eq. 4 of the paper counts: a rewrite must not be slower.
    launches = Cost(2 * machine.memory.floor_us if local > 1 else 0.0, 0.0)
    return launches + hierarchical_sent_cost(message_bytes, local, hosts, link, inter)


def modelled_parts_us(
    machine: Machine, fabric: Fabric, variant: str, message_bytes: float, world: int, hosts: int
) -> tuple[float, float]:
    """(latency, rest) of an all-reduce without a measured curve, from the links' α and β and one launch."""
    if hosts > 1:
        cost = between_hosts_cost(machine, fabric, variant, message_bytes, world, hosts)
    else:
        cost = all_reduce_steps(fabric, variant, world).cost(message_bytes, fabric_costs(machine, fabric).link)
    slowdown = machine.oversubscription(world, hosts)
    # Off by its two constants, whatever the size: a message in two halves is off as the whole one is.
    model = (fabric, variant, world, hosts)
    latency_us = (machine.memory.floor_us + cost.latency_us) * slowdown
    return (
        estimated(machine, latency_us, (*model, "latency")),
        estimated(machine, cost.transfer_us * slowdown, (*model, "bandwidth")),
    )


def all_reduce_parts_us(
    machine: Machine, fabric: Fabric, variant: str, message_bytes: float, world: int, hosts: int = 1
) -> tuple[float, float]:
    """(latency, rest) of `all_reduce_us`."""
    if world <= 1 or message_bytes <= 0:
        return 0.0, 0.0
    costs = fabric_costs(machine, fabric)
    curve = nearest_curve(costs.curves_of("all_reduce", variant), world) if hosts == 1 else None
    if curve is not None:
        return curve_parts_us(machine, curve, message_bytes, world, partial(all_reduce_steps, fabric, variant))
    between = _measured_between(costs, variant, world, hosts)
    if between is not None:
        return hosts_parts_us(
            machine, between, message_bytes, hosts, partial(all_reduce_steps, fabric, variant), at_most
        )
    return modelled_parts_us(machine, fabric, variant, message_bytes, world, hosts)


def _measured_between(costs: FabricCosts, variant: str, world: int, hosts: int) -> Curve | None:
    """An all-reduce that was measured between hosts of as many ranks each; of others, it says nothing."""
    if hosts < 2 or world % hosts:
        return None
    return nearest_curve(curves_between(costs, "all_reduce", variant, world // hosts), world)


def all_reduce_us(
    machine: Machine, fabric: Fabric, variant: str, message_bytes: float, world: int, hosts: int = 1
) -> float:
    """`all_reduce(x)` of `message_bytes` among `world` ranks on `hosts` hosts, in microseconds.

    A measured curve is read log-log between its points and carried over to other world sizes, and between hosts to
    other numbers of them with as many ranks each; without one the α–β models above. Raises `ProfileError` only for a
    fabric that the machine lacks.
    """
    latency_us, rest_us = all_reduce_parts_us(machine, fabric, variant, message_bytes, world, hosts)
    return latency_us + rest_us


def collective_us(machine: Machine, op: str, num_bytes: float, world: int, hosts: int = 1) -> float:
    """`all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all` by the library, in microseconds.

    `num_bytes` of the larger side of the call: the gathered tensor, the one to be reduced, the one to be exchanged.
    A measured curve on one host; else the algorithm's steps and traffic on the slowest link between the ranks.
    """
    if world <= 1 or num_bytes <= 0:
        return 0.0
    if op == "all_reduce":
        return all_reduce_us(machine, Fabric.LIBRARY, LIBRARY, num_bytes, world, hosts)
    costs = fabric_costs(machine, Fabric.LIBRARY)
    curve = nearest_curve(costs.curves_of(op, LIBRARY), world) if hosts == 1 else None
    if curve is None:
        link = costs.link if hosts == 1 else inter_link(machine, Fabric.LIBRARY)
        cost = all_gather(world).cost(num_bytes, link)
        us = (machine.memory.floor_us + cost.us) * machine.oversubscription(world, hosts)
        return estimated(machine, us, (op, world, hosts))
    return sum(curve_parts_us(machine, curve, num_bytes, world, all_gather))


def measured_parts_us(
    machine: Machine, fabric: Fabric, op: str, num_bytes: float, world: int
) -> tuple[float, float] | None:
    """(latency, rest) of `reduce_scatter` or `all_gather` of `num_bytes` by a fabric's own kernel, within one host.

    `num_bytes` of the larger side. None if the profile has no curve of it: without a measurement there is no estimate.
    """
    if fabric not in {costs.fabric for costs in machine.fabric_costs}:
        return None
    curve = nearest_curve(fabric_costs(machine, fabric).curves_of(op), world)
    if curve is None:
        return None
    if num_bytes > 0:
        return curve_parts_us(machine, curve, num_bytes, world, all_gather)
    return read(machine, curve.origin, curve.points[0].us, first_point(curve)), 0.0


def library_algorithm(machine: Machine, op: str, num_bytes: float, world: int, hosts: int) -> str:
    """Which algorithm of the library `collective_us` is the price of between hosts; empty where it was measured."""
    if world <= 1 or num_bytes <= 0 or hosts <= 1:
        return ""
    if op == "all_reduce" and _measured_between(fabric_costs(machine, Fabric.LIBRARY), LIBRARY, world, hosts):
        return ""
    return library_cost(machine, num_bytes, world, hosts)[0] if op == "all_reduce" else RING
