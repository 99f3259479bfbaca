"""Which graphs were compiled for which model: what `weaveopt.report` reads."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weaveopt.cost_model import Machine
from weaveopt.fabrics.topology import Topology
from weaveopt.records.report import GraphReport, MachineSummary, Report


@dataclass
class Entry:
    """The graphs of one call of the backend: forward, and backward if there is one."""

    parameters: tuple[weakref.ref[torch.Tensor], ...]
    graphs: list[GraphReport] = field(default_factory=list)
    machine: MachineSummary | None = None
    world: int = 1

    def belongs_to(self, owned: frozenset[int]) -> bool:
        alive = [reference() for reference in self.parameters]
        return any(id(tensor) in owned for tensor in alive if tensor is not None)


_entries: list[Entry] = []


def open_entry(example_inputs: Sequence[object]) -> Entry:
    """A place for the reports of one compile; the model is known by the parameters that it passes in."""
    tensors = [value for value in example_inputs if isinstance(value, torch.nn.Parameter)]
    entry = Entry(tuple(weakref.ref(tensor) for tensor in tensors))
    _entries.append(entry)
    return entry


def add(entry: Entry, report: GraphReport, machine: Machine, topologies: Mapping[str, Topology]) -> None:
    entry.graphs.append(report)
    dtypes = {str(value) for d in report.decisions for name, value in d.site.facts if name == "dtype"}
    hosts = max((known.num_hosts for known in topologies.values()), default=1)
    entry.machine = machine.summary(tuple(sorted(dtypes)), hosts)
    entry.world = max([entry.world, *(known.world for known in topologies.values())])


def report(model: torch.nn.Module | object | None = None) -> Report:
    """What weaveopt decided for `model`, or for everything compiled in this process if it is None.

    The graphs are told apart by the parameters that they take; a function without parameters of its own has the
    graphs that belong to no module.
    """
    entries = [entry for entry in _entries if entry.graphs]
    name = "all compiled graphs"
    if isinstance(model, torch.nn.Module):
        module = getattr(model, "_orig_mod", model)
        name = type(module).__name__
        owned = frozenset(id(parameter) for parameter in module.parameters())
        entries = [entry for entry in entries if entry.belongs_to(owned)]
    elif model is not None:
        name = getattr(model, "__name__", type(model).__name__)
        entries = [entry for entry in entries if not entry.parameters]
    notes = () if entries else (_NOTHING,)
    return Report(
        model=name,
        world=max((entry.world for entry in entries), default=1),
        machine=next((entry.machine for entry in reversed(entries) if entry.machine is not None), None),
        graphs=tuple(graph for entry in entries for graph in entry.graphs),
        fallbacks=tuple(f for entry in entries for graph in entry.graphs for f in graph.fallbacks),
        notes=notes,
    )


_NOTHING = (
    "nothing was compiled yet: call the model once. torch.compile(model).generate() compiles nothing; use "
    'model.compile(backend="weave") or generate(compile_config=CompileConfig(backend="weave"))'
)
