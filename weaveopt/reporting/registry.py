"""Registry of the graphs that were compiled for each model, which `weaveopt.report` reads.

No reference to a parameter is kept, not even a weak one: `torch.utils.swap_tensors`, which `.to()` goes through where
parameters are DTensors, refuses tensors that have any.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx
from torch._dynamo.output_graph import GraphCompileReason
from torch.multiprocessing.reductions import StorageWeakRef

from weaveopt.errors import WeaveError
from weaveopt.inductor import breaks, dynamo, outside
from weaveopt.integrations.transformers import batching_loop
from weaveopt.records.candidate import Rejection
from weaveopt.records.generation import GenerationReport, LeftCall, StepReport
from weaveopt.records.report import (
    Fallback,
    GraphBreak,
    GraphReport,
    MachineSummary,
    OutsideCommunication,
    Report,
    Uncompiled,
)
from weaveopt.reporting import events
from weaveopt.reporting.document import graph_to_json
from weaveopt.rule import Context
from weaveopt.wording import counted


@dataclass
class Entry:
    """The graphs of one call of the backend: forward, and backward if there is one."""

    has_parameters: bool
    modules: tuple[weakref.ref[torch.nn.Module], ...] = ()
    """Modules that own its parameters, that were being called, or that the compiled function was called with."""
    classes: frozenset[type[torch.nn.Module]] = frozenset()
    """Classes of the modules that were being called, or that the function was called with."""
    loose: tuple[tuple[int, StorageWeakRef], ...] = ()
    """Identities of parameters whose owner is not known, valid as long as their first storage lives."""
    caller: int | None = None
    """Identity of what is being called: the outermost module."""
    frame: dynamo.CompiledFrame | None = None
    """The function that Dynamo compiled; None where something else called the backend."""
    dropped: bool = False
    """True once Dynamo compiled the function anew after a reset."""
    breaks: tuple[GraphBreak, ...] = ()
    """Graph breaks since the previous graph, and the one that ended this graph."""
    reason: GraphCompileReason | None = None
    """Dynamo's own note of the break that ended it; None where it returned."""
    outside: list[OutsideCommunication] = field(default_factory=list)
    graphs: list[GraphReport] = field(default_factory=list)
    machine: MachineSummary | None = None
    world: int = 1

    def belongs_to(self, owned: frozenset[int]) -> bool:
        modules = (id(module) for reference in self.modules if (module := reference()) is not None)
        tensors = (tensor for tensor, storage in self.loose if not storage.expired())
        return any(found in owned for found in (*modules, *tensors))

    @property
    def runs(self) -> bool:
        """True if Dynamo still has the code."""
        return not self.dropped and (self.frame is None or dynamo.is_kept(self.frame))

    def watch(self, inner_compile: Callable[..., object]) -> Callable[..., object]:
        """`inner_compile` that also notes what this model communicated between its graphs."""
        ended_at = self.breaks[-1].where if self.reason is not None else ""
        return outside.watched(inner_compile, self.caller, ended_at, self.outside)

    def note(self, graph: str) -> Callable[[str], None]:
        """Takes why the first call of a graph could not prepare its inputs."""

        def add(why: str) -> None:
            for report in [each for each in self.graphs if each.name == graph]:
                failed = Fallback(graph, "first call", why)
                correct(self, replace(report, fallbacks=(*report.fallbacks, failed)))

        return add


_entries: list[Entry] = []
_generation: weakref.WeakKeyDictionary[torch.nn.Module, GenerationReport] = weakref.WeakKeyDictionary()
dynamo.watch_stances()


def open_entry(example_inputs: Sequence[object], graph_module: fx.GraphModule | None = None) -> Entry:
    """A place for the reports of one graph that Dynamo captured.

    Its model is identified by the modules whose call is in progress, and by those that own the parameters that it
    takes.
    """
    parameters = {id(value): value for value in example_inputs if isinstance(value, torch.nn.Parameter)}
    called = tuple(dynamo.called_modules())
    variables, global_modules = dynamo.current_modules()
    owners = {
        id(module): module
        for root in (*called, *variables, *global_modules)
        for module in root.modules()
        if any(id(tensor) in parameters for tensor in module._parameters.values())
    }
    owned = {id(tensor) for module in owners.values() for tensor in module._parameters.values()}
    entry = Entry(
        has_parameters=bool(parameters),
        modules=tuple(weakref.ref(module) for module in dict.fromkeys((*called, *variables, *owners.values()))),
        classes=frozenset(map(_class_of, (*called, *variables))),
        loose=tuple(
            (key, StorageWeakRef(tensor.untyped_storage())) for key, tensor in parameters.items() if key not in owned
        ),
        caller=id(called[-1]) if called else None,
        frame=dynamo.current_frame(),
        reason=breaks.noted(graph_module),
    )
    _drop_earlier(entry)
    before = _entries[-1] if _entries else None
    # After a break the rest of the same call comes next.
    if before is not None and before.reason is not None and before.caller == entry.caller:
        entry.breaks = breaks.since(before.reason, entry.reason)
    if entry.reason is not None:
        entry.breaks += (breaks.graph_break(entry.reason),)
    _entries.append(entry)
    return entry


def _class_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of the user's module, of what `torch.compile` returned too."""
    inner = getattr(module, "_orig_mod", module)
    assert isinstance(inner, torch.nn.Module), inner
    return type(inner)


def _drop_earlier(entry: Entry) -> None:
    """Marks what Dynamo no longer has before a new compile gets its number: they begin anew after a reset."""
    if entry.frame is None:
        return
    code, translator = entry.frame.code(), entry.frame.translator()
    for other in _entries:
        frame = other.frame
        if frame is not None and frame.code() is code and frame.translator() is not translator and not other.runs:
            other.dropped = True


def add(entry: Entry, report: GraphReport, context: Context, stands_in_for: tuple[str, ...], note: str = "") -> None:
    """Keep a graph's report with its model, and announce it: in the log, and in torch's structured trace.

    `stands_in_for`: GPUs without a profile, whose place the context's machine takes.
    """
    machine, topologies = context.machine, context.topologies
    entry.graphs.append(report)
    events.log(report)
    dynamo.trace_artifact(f"weaveopt_{report.name}", lambda: graph_to_json(report))
    dtypes = {str(value) for d in report.decisions for name, value in d.site.facts if name == "dtype"}
    hosts = max((known.num_hosts for known in topologies.values()), default=1)
    entry.machine = replace(machine.summary(tuple(sorted(dtypes)), hosts), stands_in_for=stands_in_for, note=note)
    entry.world = max([entry.world, *(known.world for known in topologies.values())])


def correct(entry: Entry, report: GraphReport) -> None:
    """Put `report` in place of the one that was added for its graph."""
    entry.graphs[:] = [report if each.name == report.name else each for each in entry.graphs]
    events.log(report)


def note_step(model: torch.nn.Module, step: StepReport) -> None:
    """A form of decode step of `model`, with what it did so far; in place of what was noted of that form before."""
    before = _generation.get(model, GenerationReport())
    forms = {(found.batch, found.cache_length, found.choice, found.backend): found for found in before.steps}
    forms[step.batch, step.cache_length, step.choice, step.backend] = step
    _generation[model] = replace(before, steps=tuple(forms.values()))


def note_left(model: torch.nn.Module, loop: str, reasons: tuple[Rejection, ...]) -> None:
    """Record a call of `weaveopt.generate` that ran in transformers' own loop."""
    before = _generation.get(model, GenerationReport())
    known = {(left.loop, left.reasons): left for left in before.left}
    found = known.get((loop, reasons), LeftCall(loop, reasons, 0))
    known[loop, reasons] = replace(found, count=found.count + 1)
    _generation[model] = replace(before, left=tuple(known.values()))


def report(model: object | None = None) -> Report:
    """Report the decisions for `model`, or for everything compiled in this process if it is None.

    Graphs are distinguished by the modules that own their parameters, and by the function that was compiled. Raises
    `WeaveError` for objects that cannot be compiled.
    """
    entries = [entry for entry in _entries if entry.graphs]
    if model is None:
        generation = GenerationReport(
            tuple(step for found in _generation.values() for step in found.steps),
            tuple(left for found in _generation.values() for left in found.left),
            batching_loop.report_of(None),
        )
        found = _Found("all compiled graphs", entries, tuple(dynamo.under_stances(None)), generation)
    elif isinstance(model, torch.nn.Module):
        found = _of_module(model, entries)
    else:
        found = _of_function(model, entries)
    return _assembled(found)


@dataclass(frozen=True)
class _Found:
    """Compile results that belong to one model."""

    name: str
    entries: Sequence[Entry]
    under_stances: tuple[Uncompiled, ...]
    generation: GenerationReport = field(default=GenerationReport())
    notes: tuple[str, ...] = ()


def _of_module(model: torch.nn.Module, entries: Sequence[Entry]) -> _Found:
    module = getattr(model, "_orig_mod", model)
    name, modules = type(module).__name__, tuple(module.modules())
    owned = frozenset(map(id, (*module.parameters(), *modules, model)))
    own = [entry for entry in entries if entry.belongs_to(owned)]
    notes: tuple[str, ...] = ()
    if not own:
        # Parameters are arguments of compiled code, so that it serves every module for which its guards hold.
        compiled = [each for each in (model, *modules) if dynamo.compiles_with_weave(each)]
        classes = {*map(_class_of, compiled)}
        classes |= {type(module)} if module in _generation else set()
        own = [entry for entry in entries if entry.runs and not classes.isdisjoint(entry.classes)]
        notes = (_SHARED.format(name=name),) if own else ()
    stances = tuple(dynamo.under_stances(modules))
    generation = replace(_generation.get(module, GenerationReport()), batching=batching_loop.report_of(module))
    return _Found(name, own, stances, generation, notes)


def _of_function(function: object, entries: Sequence[Entry]) -> _Found:
    """The graphs that were compiled of a function, else those that belong to no module."""
    if not callable(function) or isinstance(function, type):
        raise WeaveError(_misuse(function))
    receiver = getattr(function, "__self__", None)
    if isinstance(receiver, torch.nn.Module):
        raise WeaveError(
            f"weaveopt.report: found the method {function.__name__!r} of a {type(receiver).__name__}, "  # type: ignore[attr-defined]
            "expected the module itself: weaveopt.report(model)"
        )
    name = getattr(function, "__name__", type(function).__name__)
    compiled = getattr(function, "_torchdynamo_orig_callable", function)
    code = getattr(compiled, "__code__", None)
    own = [entry for entry in entries if code is not None and entry.frame is not None and entry.frame.is_of(code)]
    own = own or [entry for entry in entries if not entry.has_parameters]
    return _Found(name, own, tuple(dynamo.under_stances(None, compiled)))


def _misuse(found: object) -> str:
    what = f"the class {found.__name__}" if isinstance(found, type) else f"{type(found).__name__} {str(found)[:40]!r}"
    expected = "expected what torch.compile returned, a module that was compiled, or nothing for all of this process"
    model = getattr(found, "model", None)
    hint = ": weaveopt.report(x.model)" if isinstance(model, torch.nn.Module) else ""
    return f"weaveopt.report: found {' '.join(what.split())}, {expected}{hint}"


def _assembled(found: _Found) -> Report:
    """The report of what runs; of what no longer does where nothing else is there."""
    running = [entry for entry in found.entries if entry.runs]
    entries, notes = running or found.entries, found.notes
    num_gone = len(found.entries) - len(running)
    if num_gone and running:
        gone = counted(num_gone, "earlier graph")
        notes += (f"{gone} not shown: dropped by a torch._dynamo.reset(), or with freed objects",)
    elif num_gone:
        notes += ("this code was dropped by torch._dynamo.reset(), or with objects that were freed: no call runs it",)
    uncompiled = (*dynamo.limits_reached(_frames(running)), *found.under_stances)
    if not entries and found.generation == GenerationReport():
        notes += (_nothing(uncompiled),)
    return Report(
        model=found.name,
        world=max((entry.world for entry in entries), default=1),
        machine=next((entry.machine for entry in reversed(entries) if entry.machine is not None), None),
        graphs=tuple(graph for entry in entries for graph in entry.graphs),
        fallbacks=tuple(f for entry in entries for graph in entry.graphs for f in graph.fallbacks),
        notes=notes,
        breaks=breaks.counted(found for entry in entries for found in entry.breaks),
        outside=outside.summed([found for entry in entries for found in entry.outside]),
        uncompiled=uncompiled,
        generation=found.generation,
    )


def _frames(entries: Iterable[Entry]) -> Iterable[dynamo.CompiledFrame]:
    return (entry.frame for entry in entries if entry.frame is not None)


_NOTHING = (
    "nothing was compiled yet: call the model once. torch.compile(model).generate() compiles nothing; use "
    'model.compile(backend="weave") or generate(compile_config=CompileConfig(backend="weave"))'
)
_SHARED = (
    "no graph was compiled for this {name}: its calls run what was compiled for another {name}, shown here, where "
    "Dynamo's guards hold"
)


def _nothing(uncompiled: tuple[Uncompiled, ...]) -> str:
    if uncompiled:
        return "nothing was compiled: its calls ran uncompiled"
    if torch._dynamo.config.disable:
        return "nothing was compiled: TORCH_COMPILE_DISABLE, or torch._dynamo.config.disable, is set"
    return _NOTHING
