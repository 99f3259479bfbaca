"""Context: where the ranks of each group are, the devices that they use, and the profile that prices rest on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.cost_model import Choice, Machine
from weaveopt.fabrics import gpus, topology, user_profiles
from weaveopt.fabrics.topology import Topology
from weaveopt.fabrics.user_profiles import UserChoice
from weaveopt.graph.facts import devices_in, groups_synchronized_in_calls, runs_on_gpu
from weaveopt.records.candidate import Rejection
from weaveopt.records.skew import Skew
from weaveopt.rule import CapturedGraph, Context


@dataclass(frozen=True)
class Known:
    """The topology of every process group, and the machine, where no process group exists."""

    topology: Topology
    machine: Machine


@dataclass(frozen=True)
class GraphContext:
    """Context that a graph will run in."""

    context: Context
    stands_in_for: tuple[str, ...] = ()
    """GPUs without a profile, whose place the context's machine takes."""
    note: str = ""
    """A line for the report on why the profile that was measured here is not used."""


def context(captured: CapturedGraph, config: Config, known: Known | None = None) -> GraphContext:
    """Facts that every later step may read. Ranks of new groups are asked once, unless all is `known`.

    Raises `AgreementError` if one does not come.
    """
    if known is not None:
        groups = dict.fromkeys(groups_of(captured), known.topology.restricted(config.fabrics))
        return GraphContext(Context(config, _routed(known.machine, config), groups, phase=captured.phase))
    topologies = _topologies(captured, config)
    choice = machine_for(config, topologies, captured)
    machine = replace(_routed(choice.machine, config), stands_in=bool(choice.stands_in_for))
    found = Context(config, machine, topologies, _not_measured(choice), captured.phase)
    return GraphContext(found, choice.stands_in_for, choice.note)


def groups_of(captured: CapturedGraph) -> tuple[str, ...]:
    """Groups whose ranks compile the same graph and compare it, and those that synchronize in calls only."""
    return (*captured.groups, *groups_synchronized_in_calls(captured.graph))


def machine_for(config: Config, topologies: Mapping[str, Topology], captured: CapturedGraph) -> Choice:
    """The profile asked for, else the one that was measured here, else the shipped one that fits the GPUs of all ranks,
    or the nearest in its place."""
    if config.machine is not None:
        return Choice(cost_model.load(config.machine))
    on_gpus = [known for known in topologies.values() if known.device == "cuda"]
    uses_gpus = bool(on_gpus) or (not topologies and runs_on_gpu(captured.graph))
    per_host = max((known.world // known.num_hosts for known in topologies.values()), default=1)
    own = _measured_here(topologies, "cuda" if uses_gpus else "cpu", per_host)
    if own.machine is not None:
        return Choice(own.machine)
    if not uses_gpus:
        return Choice(cost_model.load("cpu"), note=own.note)
    found = {gpu for known in on_gpus for gpu in known.gpus} or {*gpus.gpus_of([gpus.describe()])}
    has_peer_access = all(known.no_peer_access is None for known in on_gpus)
    return replace(cost_model.choose(tuple(found), per_host, has_peer_access), note=own.note)


def _measured_here(topologies: Mapping[str, Topology], device: str, per_host: int) -> UserChoice:
    """The profile that `weaveopt calibrate` left for such ranks, if all of them have the same."""
    known = [each.profiles for each in topologies.values() if each.profiles is not None]
    if not topologies:
        known = [user_profiles.common([user_profiles.device_name(device)], [user_profiles.published()])]
    if not known or any(each.device != device for each in topologies.values()):
        return UserChoice()
    has_peer_access = all(each.no_peer_access is None for each in topologies.values())
    return user_profiles.choose(known, has_peer_access, per_host)


def _topologies(captured: CapturedGraph, config: Config) -> dict[str, Topology]:
    """Topologies by group, each with the device that its ranks use in this graph."""
    devices = devices_in(captured.graph)
    found = {group: topology.discover(group, config.compile_timeout_s) for group in groups_of(captured)}
    return {
        group: replace(known.restricted(config.fabrics), device=devices.get(group, known.device))
        for group, known in found.items()
    }


def _routed(machine: Machine, config: Config) -> Machine:
    """The machine, with the options' spread of choices over experts, and of tokens over ranks."""
    skew = machine.skew if config.skew is None else Skew.parse(config.skew)
    assumed = (skew, config.batch_tokens, config.imbalance)
    if assumed == (machine.skew, machine.batch_tokens, machine.imbalance):
        return machine
    return replace(machine, skew=skew, batch_tokens=config.batch_tokens, imbalance=config.imbalance)


def _not_measured(choice: Choice) -> Rejection | None:
    """Why no rule may be used under a substitute profile: its error on this machine is unknown."""
    if not choice.stands_in_for:
        return None
    values = (("gpu", ", ".join(choice.stands_in_for)), ("profile", choice.machine.name))
    message = (
        "no profile of this GPU: measure it with `weaveopt calibrate`, or name one with options={'machine': ...}; what "
        "communicates with no rank is decided by times alone with options={'tune_budget_s': 5}"
    )
    return Rejection("machine_not_measured", message, values)
