"""Which shipped profile stands for the GPUs of a group, and for which of them it only stands in.

What is asked is the same on all ranks, so the answer is: names and sizes of all ranks' GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from weaveopt.cost_model.machine import MEASURED, Machine
from weaveopt.cost_model.profile import load, names

_SLICED_OR_SLOWER = frozenset({"mig", "nvl", "pcie"})
"""Words of a GPU's name that distinguish it from the one of a host with NVSwitch, which the shipped profiles are of."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it."""

    name: str
    processors: int = 0
    """Streaming multiprocessors; 0 where it is not known."""
    bytes_per_s: float = 0.0
    """Bandwidth of its memory, from clock and bus width; 0 if it is not known."""


@dataclass(frozen=True)
class Choice:
    """A profile, and the GPUs that it was not made for."""

    machine: Machine
    stands_in_for: tuple[str, ...] = ()
    """Names of GPUs; none where the profile is theirs."""
    note: str = ""
    """A line for the report on why another profile is not used; empty: there is none."""


def choose(gpus: Sequence[Gpu], ranks_per_host: int, has_peer_access: bool = True) -> Choice:
    """The profile of the slowest of `gpus`: the shipped one of its name, else the nearest by memory bandwidth.

    Profiles of GPUs that exchange through memory of their host are for ranks without peer access. Of several, the one
    with the fewest ranks a host that are no fewer than these: a profile does not hold for larger groups. Contention
    that was only assumed is for whoever names the profile, and left out here: nothing is overlapped by it. Raises
    nothing: there always is a nearest one.
    """
    kinds = sorted(set(gpus), key=lambda gpu: (gpu.name, gpu.processors, gpu.bytes_per_s))
    found = [_profile_of(gpu, ranks_per_host, has_peer_access) for gpu in kinds]
    machine = min(found, key=lambda each: (each.memory.bytes_per_s, each.name))
    others = tuple(dict.fromkeys(gpu.name for gpu in kinds if not fits(machine.name, gpu)))
    return Choice(_without_assumed_contention(machine), others)


def fits(profile: str, gpu: Gpu) -> bool:
    """True if the shipped profile of that name is one of hosts with such GPUs: `h200x4` of `NVIDIA H200`."""
    words = set(re.split(r"[^a-z0-9]+", gpu.name.lower()))
    kind = re.split(r"x\d|-", profile)[0]
    return kind in words and not words & _SLICED_OR_SLOWER


def exchanges_through_host(machine: Machine) -> bool:
    """True if the profile's times are of GPUs without peer access."""
    return any(costs.link_class == "host" for costs in machine.fabric_costs)


def _without_assumed_contention(machine: Machine) -> Machine:
    origins = dict(machine.origins)
    if machine.contention is None or origins[machine.contention.origin].kind == MEASURED:
        return machine
    return replace(machine, contention=None)


def _profile_of(gpu: Gpu, ranks_per_host: int, has_peer_access: bool) -> Machine:
    shipped = [machine for machine in map(load, names()) if machine.device == "cuda"]
    # One that has only the library is named, or calibrated from: its link is assumed, and differs from host to host.
    shipped = [machine for machine in shipped if len(machine.fabrics) > 1]
    if has_peer_access:
        shipped = [machine for machine in shipped if not exchanges_through_host(machine)]
    own = [machine for machine in shipped if fits(machine.name, gpu)]
    if not has_peer_access:
        own = [machine for machine in own if exchanges_through_host(machine)] or own
    if own:
        return min(own, key=lambda machine: (*_beyond(machine, ranks_per_host), machine.name))

    def far(machine: Machine) -> tuple[float, float, bool, int, str]:
        processors = max((gemm.units or 0 for gemm in machine.gemms), default=0)
        return (
            _apart(gpu.bytes_per_s, machine.memory.bytes_per_s),
            _apart(gpu.processors, processors),
            *_beyond(machine, ranks_per_host),
            machine.name,
        )

    return min(shipped, key=far)


def _beyond(machine: Machine, ranks_per_host: int) -> tuple[bool, int]:
    """Sort key of a profile: true if these ranks are more than the profile's, and the difference."""
    return machine.ranks_per_host < ranks_per_host, abs(machine.ranks_per_host - ranks_per_host)


def _apart(ours: float, theirs: float) -> float:
    """0 where one of both is not known."""
    return abs(log(ours / theirs)) if ours > 0 and theirs > 0 else 0.0
