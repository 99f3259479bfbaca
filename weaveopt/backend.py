"""`torch.compile(model, backend="weave")`: the six steps in order, and then Inductor.

    capture -> recognize -> decide -> plan -> rewrite -> bind

The steps sit where Inductor's own compile of one graph begins (`inner_compile`), so they see inference,
forward and backward graphs after AOTAutograd, on every compile. AOTAutograd's cache would skip them on a warm
run and is off around the call; Inductor's graph cache lies behind them and keeps working.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import torch
import torch.fx as fx

from weaveopt import cost_model
from weaveopt.config import Config, OptionValue, resolve
from weaveopt.cost_model import Machine
from weaveopt.errors import WeaveError
from weaveopt.fabrics import topology
from weaveopt.fabrics.topology import Topology
from weaveopt.graph.facts import devices_in, groups_in
from weaveopt.inductor import seams as inductor
from weaveopt.inductor.seams import Compiled
from weaveopt.inductor.work import work_of
from weaveopt.pipeline.bind import await_peers, bind
from weaveopt.pipeline.capture import capture
from weaveopt.pipeline.decide import decide
from weaveopt.pipeline.plan import plan
from weaveopt.pipeline.recognize import recognize
from weaveopt.pipeline.rewrite import rewrite
from weaveopt.pipeline.specialize import guard, specialize
from weaveopt.records.memory import BufferPlan
from weaveopt.records.report import Decision, Fallback, GraphReport, Regime, Work, WorkFailure
from weaveopt.reporting import registry
from weaveopt.rewrites import RULES, names
from weaveopt.rule import CapturedGraph, Context, Finding

_graph_numbers = count()


def weave(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, OptionValue] | None = None,
) -> Compiled:
    """The backend. `mode` is Inductor's; `options` holds weaveopt's (see `weaveopt.config`) and Inductor's.

    A `WeaveError` (unknown option, ranks that disagree, a rank that never came) is raised by the first call of
    the compiled function, before any of its kernels runs, so that it reaches the caller as it is.
    """
    try:
        config = resolve(options, inductor.known_options(), names())
        entry = registry.open_entry(example_inputs)

        # Inductor's own signature: what it passes is handed on untouched.
        def optimize_and_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
            is_backward, is_inference = bool(arguments.get("is_backward")), bool(arguments.get("is_inference"))
            captured, context, report = optimize(
                module, inputs, config, entry, is_backward=is_backward, is_inference=is_inference
            )
            compiled = inductor.compile_graph(module, inputs, arguments)
            guard(captured, report.regime)
            await_peers(captured, context)
            return compiled

        patches = inductor.patches_for(mode, config)
        return inductor.compile_with(optimize_and_compile, graph_module, example_inputs, patches)
    except WeaveError as error:
        return _raiser(error)


def optimize(
    module: fx.GraphModule,
    inputs: Sequence[object],
    config: Config,
    entry: registry.Entry,
    *,
    is_backward: bool,
    is_inference: bool,
) -> tuple[CapturedGraph, Context, GraphReport]:
    """All six steps on one graph; `module` gets the rewritten graph, or stays as it is where a step failed."""
    clock = _Clock()
    captured, failure = _capture(module, inputs, is_backward, is_inference)
    clock.lap("capture")
    topologies = _topologies(captured, config)
    context = Context(config, _machine_for(config, topologies), topologies)
    report, numbers = _steps(captured, context, clock, failure)
    registry.add(entry, report, context)
    # Ranks agree even where a step failed on this one: the others must not go on without it.
    bind(captured, report, context)
    if report.fallbacks and config.strict:
        failed = report.fallbacks[0]
        raise WeaveError(f"step {failed.step!r} failed on {failed.graph}: {failed.error}")
    if report.work_failure is not None and config.strict:
        raise WeaveError(f"the work outside the sites of {report.name} could not be estimated: {report.work_failure}")
    if report.num_rewritten:
        module.graph = captured.graph
        captured = replace(captured, numbers=numbers)
    return captured, context, report


def _capture(
    module: fx.GraphModule, inputs: Sequence[object], is_backward: bool, is_inference: bool
) -> tuple[CapturedGraph, Fallback | None]:
    name = f"graph{next(_graph_numbers)}"
    try:
        return capture(module, name, inputs, is_backward=is_backward, is_inference=is_inference), None
    except Exception as error:  # a graph of a form never seen: it still compiles as it is
        plain = CapturedGraph(name, "unknown", 0, groups_in(module.graph), module.graph)
        return plain, Fallback(name, "capture", _first_line(error))


def _steps(
    captured: CapturedGraph, context: Context, clock: _Clock, failure: Fallback | None
) -> tuple[GraphReport, tuple[torch.SymFloat, ...]]:
    """Recognize, decide, plan, rewrite; and the floats that were taken as numbers.

    A failure is a fallback that the report holds: the graph runs unrewritten.
    """
    clock.restart()  # ranks may have waited for each other since
    step = "recognize"
    decisions: tuple[Decision, ...] = ()
    plans: tuple[BufferPlan, ...] = ()
    rounding: tuple[str, ...] = ()
    regime: Regime | None = None
    work: tuple[Work, ...] | WorkFailure = ()
    numbers: dict[str, torch.SymFloat] = {}
    if failure is None:
        try:
            findings = recognize(captured, RULES, context)
            clock.lap(step)
            step = "decide"
            regime, findings = specialize(captured, findings, RULES, context)
            decisions = decide(findings, RULES, context)
            clock.lap(step)
            work = _work(captured, findings, context)
            clock.lap("work")
            step = "plan"
            plans = plan(findings, decisions, RULES)
            clock.lap(step)
            step = "rewrite"
            rounding = rewrite(captured, findings, decisions, plans, RULES, context)
            rewritten = [f.match for f, d in zip(findings, decisions, strict=True) if d.rewritten and f.match]
            numbers = {str(number): number for match in rewritten for number in match.numbers}
            clock.lap(step)
        except Exception as error:  # whatever went wrong, the unrewritten graph is still right
            failure = Fallback(captured.name, step, _first_line(error))
    report = GraphReport(
        name=captured.name,
        phase=captured.phase,
        tokens=captured.tokens,
        decisions=decisions if failure is None else (),
        plans=plans if failure is None else (),
        rounding=rounding,
        fallbacks=() if failure is None else (failure,),
        steps_us=clock.laps,
        regime=regime if failure is None else None,
        work=() if isinstance(work, WorkFailure) else work,
        work_failure=work if isinstance(work, WorkFailure) else None,
    )
    return report, tuple(numbers.values())


def _work(captured: CapturedGraph, findings: Sequence[Finding], context: Context) -> tuple[Work, ...] | WorkFailure:
    """Predicted time outside the sites, for the report alone: no graph stays unrewritten for want of it."""
    try:
        return work_of(captured.graph, findings, context)
    except Exception as error:  # a graph of a form never seen: what it runs outside its sites is not known
        return WorkFailure(type(error).__name__, _message(error))


def preview(config: Config, known: Topology, machine: Machine, sink: Callable[[GraphReport], None]) -> Compiled:
    """A backend that captures, decides and rewrites as `weave` does, for `weaveopt explain`: no peers, no kernels.

    Every process group of the graph is taken to have the topology `known`. What it returns only makes outputs
    of the right shapes, so it is good for fake inputs alone.
    """

    def inner_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        clock = _Clock()
        backward, inference = bool(arguments.get("is_backward")), bool(arguments.get("is_inference"))
        captured, failure = _capture(module, inputs, backward, inference)
        clock.lap("capture")
        context = Context(config, machine, dict.fromkeys(captured.groups, known))
        sink(_steps(captured, context, clock, failure)[0])
        outputs = module.graph.output_node().args[0]
        values = fx.map_arg(outputs, lambda node: node.meta["val"])

        def returns_fakes(arguments: list[object]) -> object:
            arguments.clear()
            return values

        returns_fakes._boxed_call = True  # type: ignore[attr-defined]
        return returns_fakes

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> Compiled:
        return inductor.compile_with(inner_compile, graph_module, example_inputs)

    return backend


class _Clock:
    """How long each step took, for the report."""

    def __init__(self) -> None:
        self.restart()
        self._laps: list[tuple[str, float]] = []

    def restart(self) -> None:
        self._last = time.perf_counter()

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        self._laps.append((step, round((now - self._last) * 1e6, 1)))
        self._last = now

    @property
    def laps(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._laps)


def _topologies(captured: CapturedGraph, config: Config) -> dict[str, Topology]:
    """Where the ranks of each group are, and the device that they use in this graph."""
    devices = devices_in(captured.graph)
    found = {group: topology.discover(group, config.compile_timeout_s) for group in captured.groups}
    return {group: replace(known, device=devices.get(group, known.device)) for group, known in found.items()}


def _machine_for(config: Config, topologies: Mapping[str, Topology]) -> Machine:
    """The profile asked for, else the shipped one that fits the devices found."""
    if config.machine is not None:
        return cost_model.load(config.machine)
    if not any(known.device == "cuda" for known in topologies.values()):
        return cost_model.load("cpu")
    name = torch.cuda.get_device_name().lower()
    per_host = max(known.world // known.num_hosts for known in topologies.values())
    fitting = [shipped for shipped in cost_model.names() if shipped.split("x")[0] in name]
    if not fitting:
        raise WeaveError(
            f"no shipped profile fits {torch.cuda.get_device_name()!r} (shipped: {', '.join(cost_model.names())}): "
            'pass options={"machine": NAME_OR_FILE}'
        )
    return cost_model.load(min(fitting, key=lambda shipped: abs(cost_model.load(shipped).ranks_per_host - per_host)))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {_message(error) or 'no message'}"


def _message(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _raiser(error: WeaveError) -> Compiled:
    def raise_error(*_: object) -> object:
        raise error

    return raise_error
