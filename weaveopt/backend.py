"""`torch.compile(model, backend="weave")`: the six steps in order, and then Inductor.

    capture -> recognize -> decide -> plan -> rewrite -> bind

The steps sit where Inductor's own compile of one graph begins (`inner_compile`), so they see inference,
forward and backward graphs after AOTAutograd, on every compile. AOTAutograd's cache would skip them on a warm
run and is off around the call; Inductor's graph cache lies behind them and keeps working.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import torch
import torch.fx as fx
from torch._functorch import config as functorch_config
from torch._inductor import list_mode_options, list_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from weaveopt import cost_model, registry
from weaveopt.config import Config, OptionValue, resolve
from weaveopt.cost_model import Machine
from weaveopt.decision import BufferPlan, Decision, Fallback, GraphReport
from weaveopt.errors import WeaveError
from weaveopt.pipeline.bind import await_peers, bind
from weaveopt.pipeline.capture import capture
from weaveopt.pipeline.decide import decide
from weaveopt.pipeline.plan import plan
from weaveopt.pipeline.recognize import recognize
from weaveopt.pipeline.rewrite import rewrite
from weaveopt.rewrites import RULES, names
from weaveopt.rule import CapturedGraph, Context, Finding
from weaveopt.runtime import topology
from weaveopt.runtime.topology import Topology

Compiled = Callable[..., object]
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
        config = resolve(options, tuple(list_options()), names())
        patches = {**(list_mode_options(mode) if mode else {}), **dict(config.inductor)}
        if config.cuda_graphs:
            patches["triton.cudagraphs"] = True
        entry = registry.open_entry(example_inputs)

        # Inductor's own signature: what it passes is handed on untouched.
        def optimize_and_compile(module: fx.GraphModule, inputs: Sequence[object], **inductor: object) -> object:
            captured, context, report = optimize(
                module,
                config,
                is_backward=bool(inductor.get("is_backward")),
                is_inference=bool(inductor.get("is_inference")),
            )
            registry.add(entry, report, context)
            compiled = compile_fx_inner(module, inputs, **inductor)  # type: ignore[arg-type]
            await_peers(captured, context)
            return compiled

        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(graph_module, example_inputs, inner_compile=optimize_and_compile, config_patches=patches)  # type: ignore[arg-type, no-any-return]
    except WeaveError as error:
        return _raiser(error)


def optimize(
    module: fx.GraphModule, config: Config, *, is_backward: bool, is_inference: bool
) -> tuple[CapturedGraph, Context, GraphReport]:
    """All six steps on one graph; `module` gets the rewritten graph, or stays as it is where a step failed."""
    started = time.perf_counter()
    captured = capture(module, f"graph{next(_graph_numbers)}", is_backward=is_backward, is_inference=is_inference)
    topologies = {group: topology.discover(group, config.compile_timeout_s) for group in captured.groups}
    context = Context(config, _machine_for(config, topologies), topologies)
    report, decisions, plans, fallback = _steps(captured, context, started)
    bind(captured, decisions, plans, fallback, context)
    if fallback is None and any(decision.rewritten for decision in decisions):
        module.graph = captured.graph
    return captured, context, report


def _steps(
    captured: CapturedGraph, context: Context, started: float
) -> tuple[GraphReport, tuple[Decision, ...], tuple[BufferPlan, ...], Fallback | None]:
    """Recognize, decide, plan, rewrite. A failure is a fallback that the report holds, unless `strict`."""
    clock = _Clock(started)
    clock.lap("capture")
    step = "recognize"
    findings: tuple[Finding, ...] = ()
    decisions: tuple[Decision, ...] = ()
    plans: tuple[BufferPlan, ...] = ()
    rounding: tuple[str, ...] = ()
    fallback: Fallback | None = None
    try:
        findings = recognize(captured, RULES, context)
        clock.lap(step)
        step = "decide"
        decisions = decide(findings, RULES, context)
        clock.lap(step)
        step = "plan"
        plans = plan(findings, decisions, RULES)
        clock.lap(step)
        step = "rewrite"
        rounding = rewrite(captured, findings, decisions, plans, RULES, context)
        clock.lap(step)
    except Exception as error:  # whatever went wrong, the unrewritten graph is still right
        if context.config.strict:
            raise WeaveError(f"step {step!r} failed on {captured.name}: {_first_line(error)}") from error
        fallback = Fallback(captured.name, step, _first_line(error))
    report = GraphReport(
        name=captured.name,
        phase=captured.phase,
        tokens=captured.tokens,
        decisions=decisions if fallback is None else (),
        plans=plans if fallback is None else (),
        rounding=rounding,
        fallbacks=() if fallback is None else (fallback,),
        steps_us=clock.laps,
    )
    return report, report.decisions, report.plans, fallback


def preview(config: Config, known: Topology, machine: Machine, sink: Callable[[GraphReport], None]) -> Compiled:
    """A backend that captures, decides and rewrites as `weave` does, for `weaveopt explain`: no peers, no kernels.

    Every process group of the graph is taken to have the topology `known`. What it returns only makes outputs
    of the right shapes, so it is good for fake inputs alone.
    """

    def inner_compile(module: fx.GraphModule, inputs: Sequence[object], **inductor: object) -> object:
        started = time.perf_counter()
        backward, inference = bool(inductor.get("is_backward")), bool(inductor.get("is_inference"))
        captured = capture(module, f"graph{next(_graph_numbers)}", is_backward=backward, is_inference=inference)
        context = Context(config, machine, dict.fromkeys(captured.groups, known))
        sink(_steps(captured, context, started)[0])
        outputs = module.graph.output_node().args[0]
        values = fx.map_arg(outputs, lambda node: node.meta["val"])

        def returns_fakes(arguments: list[object]) -> object:
            arguments.clear()
            return values

        returns_fakes._boxed_call = True  # type: ignore[attr-defined]
        return returns_fakes

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> Compiled:
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(graph_module, example_inputs, inner_compile=inner_compile)  # type: ignore[arg-type, no-any-return]

    return backend


class _Clock:
    """How long each step took, for the report."""

    def __init__(self, started: float) -> None:
        self._last = started
        self._laps: list[tuple[str, float]] = []

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        self._laps.append((step, round((now - self._last) * 1e6, 1)))
        self._last = now

    @property
    def laps(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._laps)


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
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _raiser(error: WeaveError) -> Compiled:
    def raise_error(*_: object) -> object:
        raise error

    return raise_error
