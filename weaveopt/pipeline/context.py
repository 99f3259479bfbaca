"""Context: where the ranks of each group are, the devices that they use, and the profile that prices rest on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.cost_model import Choice, Machine
from weaveopt.fabrics import gpus, topology
from weaveopt.fabrics.topology import Topology
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


def context(captured: CapturedGraph, config: Config, known: Known | None = None) -> GraphContext:
    """Facts that every later step may read. Ranks of new groups are asked once, unless all is `known`.

    Raises `AgreementError` if one does not come.
    """
    if known is not None:
        groups = dict.fromkeys(groups_of(captured), known.topology.restricted(config.fabrics))
        return GraphContext(Context(config, _routed(known.machine, config), groups, phase=captured.phase))
    topologies = _topologies(captured, config)
    choice = machine_for(config, topologies, captured)
    machine = _routed(choice.machine, config)
    found = Context(config, machine, topologies, _not_measured(choice), captured.phase)
    return GraphContext(found, choice.stands_in_for)


def groups_of(captured: CapturedGraph) -> tuple[str, ...]:
    """Groups whose ranks compile the same graph and compare it, and those that synchronize in calls only."""
    return (*captured.groups, *groups_synchronized_in_calls(captured.graph))


def machine_for(config: Config, topologies: Mapping[str, Topology], captured: CapturedGraph) -> Choice:
    """The profile asked for, else the shipped one that fits the GPUs of all ranks, or the nearest in its place."""
    if config.machine is not None:
        return Choice(cost_model.load(config.machine))
    on_gpus = [known for known in topologies.values() if known.device == "cuda"]
    if not on_gpus and (topologies or not runs_on_gpu(captured.graph)):
        return Choice(cost_model.load("cpu"))
    found = {gpu for known in on_gpus for gpu in known.gpus} or {*gpus.gpus_of([gpus.describe()])}
    per_host = max((known.world // known.num_hosts for known in topologies.values()), default=1)
    return cost_model.choose(tuple(found), per_host)


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
    message = "no profile of this GPU: measure it with `weaveopt calibrate`, or name one with options={'machine': ...}"
    return Rejection("machine_not_measured", message, values)
