"""Which graphs were compiled for which model: what `weaveopt.report` reads."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx
from torch._dynamo.output_graph import GraphCompileReason

from weaveopt.cost_model import Machine
from weaveopt.fabrics.topology import Topology
from weaveopt.inductor import breaks, outside
from weaveopt.records.candidate import Rejection
from weaveopt.records.generation import GenerationReport, LeftCall, StepReport
from weaveopt.records.report import GraphBreak, GraphReport, MachineSummary, OutsideCommunication, Report


@dataclass
class Entry:
    """The graphs of one call of the backend: forward, and backward if there is one."""

    parameters: tuple[weakref.ref[torch.Tensor], ...]
    callers: tuple[weakref.ref[torch.nn.Module], ...] = ()
    """Modules that were being called, from the innermost out: a part of a broken model may have no parameters."""
    breaks: tuple[GraphBreak, ...] = ()
    """Those met on the way to this graph since the one before, and the one that ended it."""
    reason: GraphCompileReason | None = None
    """Dynamo's own note of the break that ended it; None where it returned."""
    outside: list[OutsideCommunication] = field(default_factory=list)
    graphs: list[GraphReport] = field(default_factory=list)
    machine: MachineSummary | None = None
    world: int = 1

    def belongs_to(self, owned: frozenset[int]) -> bool:
        tensors = [id(tensor) for reference in self.parameters if (tensor := reference()) is not None]
        modules = [id(module) for reference in self.callers if (module := reference()) is not None]
        return any(found in owned for found in (*tensors, *modules))

    def watch(self, inner_compile: Callable[..., object]) -> Callable[..., object]:
        """`inner_compile` that also notes what this model communicated between its graphs."""
        ended_at = self.breaks[-1].where if self.reason is not None else ""
        return outside.watched(inner_compile, self.caller, ended_at, self.outside)

    @property
    def caller(self) -> int | None:
        """Tells apart what is being called: the outermost module."""
        return id(self.callers[-1]()) if self.callers else None


_entries: list[Entry] = []
_generation: weakref.WeakKeyDictionary[torch.nn.Module, GenerationReport] = weakref.WeakKeyDictionary()


def open_entry(example_inputs: Sequence[object], graph_module: fx.GraphModule | None = None) -> Entry:
    """A place for the reports of one graph that Dynamo captured.

    Its model is known by the parameters that the graph takes, and by the modules whose call is under way.
    """
    tensors = [value for value in example_inputs if isinstance(value, torch.nn.Parameter)]
    entry = Entry(
        parameters=tuple(weakref.ref(tensor) for tensor in tensors),
        callers=tuple(weakref.ref(module) for module in _called_modules()),
        reason=breaks.noted(graph_module),
    )
    before = _entries[-1] if _entries else None
    # After a break the rest of the same call comes next.
    if before is not None and before.reason is not None and before.caller == entry.caller:
        entry.breaks = breaks.since(before.reason, entry.reason)
    if entry.reason is not None:
        entry.breaks += (breaks.graph_break(entry.reason),)
    _entries.append(entry)
    return entry


def _called_modules() -> Iterator[torch.nn.Module]:
    """Modules whose `__call__` is on the stack, from the innermost out."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        # Only of these frames: to read a frame's locals keeps them alive until it ends.
        if frame.f_code.co_name == "_wrapped_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                yield module


def add(entry: Entry, report: GraphReport, machine: Machine, topologies: Mapping[str, Topology]) -> None:
    entry.graphs.append(report)
    dtypes = {str(value) for d in report.decisions for name, value in d.site.facts if name == "dtype"}
    hosts = max((known.num_hosts for known in topologies.values()), default=1)
    entry.machine = machine.summary(tuple(sorted(dtypes)), hosts)
    entry.world = max([entry.world, *(known.world for known in topologies.values())])


def note_step(model: torch.nn.Module, step: StepReport) -> None:
    """A form of decode step of `model`, with what it did so far; in place of what was noted of that form before."""
    before = _generation.get(model, GenerationReport())
    forms = {(found.batch, found.cache_length, found.choice, found.backend): found for found in before.steps}
    forms[step.batch, step.cache_length, step.choice, step.backend] = step
    _generation[model] = replace(before, steps=tuple(forms.values()))


def note_left(model: torch.nn.Module, loop: str, reasons: tuple[Rejection, ...]) -> None:
    """A call of `weaveopt.generate` that transformers' own loop took."""
    before = _generation.get(model, GenerationReport())
    known = {(left.loop, left.reasons): left for left in before.left}
    found = known.get((loop, reasons), LeftCall(loop, reasons, 0))
    known[loop, reasons] = replace(found, count=found.count + 1)
    _generation[model] = replace(before, left=tuple(known.values()))


def report(model: torch.nn.Module | object | None = None) -> Report:
    """What weaveopt decided for `model`, or for everything compiled in this process if it is None.

    The graphs are told apart by the parameters that they take; a function without parameters of its own has the
    graphs that belong to no module.
    """
    entries = [entry for entry in _entries if entry.graphs]
    name = "all compiled graphs"
    generation = GenerationReport(
        tuple(step for found in _generation.values() for step in found.steps),
        tuple(left for found in _generation.values() for left in found.left),
    )
    if isinstance(model, torch.nn.Module):
        module = getattr(model, "_orig_mod", model)
        name = type(module).__name__
        owned = frozenset(map(id, (*module.parameters(), *module.modules(), model)))
        entries = [entry for entry in entries if entry.belongs_to(owned)]
        generation = _generation.get(module, GenerationReport())
    elif model is not None:
        name = getattr(model, "__name__", type(model).__name__)
        entries = [entry for entry in entries if not entry.parameters]
        generation = GenerationReport()
    notes = () if entries or generation != GenerationReport() else (_NOTHING,)
    return Report(
        model=name,
        world=max((entry.world for entry in entries), default=1),
        machine=next((entry.machine for entry in reversed(entries) if entry.machine is not None), None),
        graphs=tuple(graph for entry in entries for graph in entry.graphs),
        fallbacks=tuple(f for entry in entries for graph in entry.graphs for f in graph.fallbacks),
        notes=notes,
        breaks=breaks.counted(found for entry in entries for found in entry.breaks),
        outside=outside.summed([found for entry in entries for found in entry.outside]),
        generation=generation,
    )


_NOTHING = (
    "nothing was compiled yet: call the model once. torch.compile(model).generate() compiles nothing; use "
    'model.compile(backend="weave") or generate(compile_config=CompileConfig(backend="weave"))'
)
