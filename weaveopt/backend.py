"""`torch.compile(model, backend="weave")`: the steps in order, and then Inductor.

    capture -> variants -> [ recognize -> regime -> price -> (verify ->) decide ] for each -> agree -> rewrite -> bind

Agree plans memory too, since what ranks leave together changes it.

The steps sit where Inductor's own compile of one graph begins (`inner_compile`), so they see inference,
forward and backward graphs after AOTAutograd, on every compile. AOTAutograd's cache would skip them on a warm
run and is off around the call; Inductor's graph cache lies behind them and keeps working.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import torch
import torch.fx as fx

from weaveopt import cost_model
from weaveopt.config import Config, OptionValue, resolve
from weaveopt.cost_model import Choice, Machine
from weaveopt.errors import AgreementError, PeerTimeoutError, WeaveError
from weaveopt.fabrics import gpus, topology
from weaveopt.fabrics.topology import Topology
from weaveopt.graph.facts import devices_in, groups_in, groups_met_in_calls, runs_on_gpu
from weaveopt.inductor import seams
from weaveopt.inductor.seams import Compiled
from weaveopt.pipeline.agree import EMPTY, Agreed, agree, failure_of
from weaveopt.pipeline.bind import bind, compiling, count_calls, lost_multicast, unrewritten
from weaveopt.pipeline.capture import capture
from weaveopt.pipeline.decide import DecidedGraph, cheapest, decide
from weaveopt.pipeline.plan import plan
from weaveopt.pipeline.price import PricedGraph, price
from weaveopt.pipeline.problem import Frame
from weaveopt.pipeline.recognize import recognize
from weaveopt.pipeline.rewrite import rewrite
from weaveopt.pipeline.sensitivity import sensitivities
from weaveopt.pipeline.specialize import guard, specialize
from weaveopt.pipeline.variants import variants
from weaveopt.records.candidate import Rejection
from weaveopt.records.report import Fallback, GraphReport, Regime, Sensitivity, WorkFailure
from weaveopt.records.skew import Skew
from weaveopt.reporting import registry
from weaveopt.rewrites import RULES
from weaveopt.rule import CapturedGraph, Context, HooksInductor, RuleSet
from weaveopt.verification.trial import Make
from weaveopt.verification.verify import Verified, verify

_graph_numbers = count()


def weave(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, OptionValue] | None = None,
    rules: RuleSet = RULES,
) -> Compiled:
    """The backend. `mode` is Inductor's; `options` holds weaveopt's (see `weaveopt.config`) and Inductor's.

    A `WeaveError` (unknown option, ranks that disagree, a rank that never came) is raised by the first call of
    the compiled function, before any of its kernels runs, so that it reaches the caller as it is.
    """
    try:
        config = resolve(options, seams.known_options(), rules.names)
        entry = registry.open_entry(example_inputs, graph_module)
        hooks = [hook for rule in rules.site_rules if isinstance(rule, HooksInductor) for hook in rule.inductor_hooks()]
        make = partial(seams.compile_alone, hooks=hooks)
        counted: set[str] = set()

        # Inductor's own signature: what it passes is handed on untouched.
        def optimize_and_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
            is_backward, is_inference = bool(arguments.get("is_backward")), bool(arguments.get("is_inference"))
            optimized = optimize(
                module, inputs, config, entry, rules, make, is_backward=is_backward, is_inference=is_inference
            )
            with compiling(optimized.agreed, optimized.context):
                compiled = seams.compile_graph(module, inputs, arguments, hooks)
                guard(optimized.captured, optimized.report.regime, optimized.numbers)
            counted.update(optimized.rewritten_groups)
            return compiled

        patches = seams.patches_for(mode, config)
        compiled = seams.compile_with(entry.watch(optimize_and_compile), graph_module, example_inputs, patches)
        return count_calls(compiled, sorted(counted), config.compile_timeout_s)
    except WeaveError as error:
        return _raiser(error)


@dataclass(frozen=True)
class Optimized:
    """One graph after all steps."""

    captured: CapturedGraph
    context: Context
    report: GraphReport
    agreed: Agreed = EMPTY
    numbers: tuple[torch.SymFloat, ...] = ()
    """Python floats that rewrites took as the numbers they are in this call."""

    @property
    def rewritten_groups(self) -> tuple[str, ...]:
        """Groups that have rewritten sites in this graph, of more than one rank."""
        return (*self.agreed.met, *self.agreed.known) if self.report.num_rewritten else ()


def optimize(
    module: fx.GraphModule,
    inputs: Sequence[object],
    config: Config,
    entry: registry.Entry,
    rules: RuleSet = RULES,
    make: Make = seams.compile_alone,
    *,
    is_backward: bool,
    is_inference: bool,
) -> Optimized:
    """All steps on one graph; `module` gets the rewritten graph, or stays as it is where a step failed.

    With the option `verify`, `make` compiles what is timed.
    """
    clock = _Clock()
    captured, failure = _capture(module, inputs, is_backward, is_inference)
    clock.lap("capture")
    topologies = _topologies(captured, config)
    choice = _machine_for(config, topologies, captured)
    context = Context(config, _routed(choice.machine, config), topologies, _not_measured(choice))
    time_candidates = partial(verify, rules=rules, context=context, make=make) if config.verify else None
    decided = _decide(captured, context, rules, clock, failure, time_candidates=time_candidates)
    agreed, report = EMPTY, decided.report
    lost = False
    try:
        # Ranks converge even where a step failed on this one: the others must not go on without it.
        agreed = agree(decided.every, decided.best, rules, context, captured, failure_of(report))
        clock.lap("agree")
        report, numbers, failed = _rewrite(decided, agreed, rules, context, clock)
        error = bind(agreed, agreed.failure or failed, context)
        lost = lost_multicast(error)
        if error and not report.fallbacks:
            report = unrewritten(report, decided.every[0] if decided.every else None, error)
    finally:
        if not lost:
            registry.add(entry, report, context.machine, topologies)
        if entry.machine is not None:
            entry.machine = replace(entry.machine, stands_in_for=choice.stands_in_for)
    if lost:  # again without it; every time one group fewer has it
        return optimize(module, inputs, config, entry, rules, make, is_backward=is_backward, is_inference=is_inference)
    if report.fallbacks and config.strict:
        failed_step = report.fallbacks[0]
        raise WeaveError(f"step {failed_step.step!r} failed on {failed_step.graph}: {failed_step.error}")
    if report.work_failure is not None and config.strict:
        raise WeaveError(f"the work outside the sites of {report.name} could not be estimated: {report.work_failure}")
    if agreed.decided is not None and (report.num_rewritten or report.variant != captured.variant):
        module.graph = agreed.decided.priced.captured.graph
        return Optimized(captured, context, report, agreed, numbers)
    return Optimized(captured, context, report, agreed)


def _capture(
    module: fx.GraphModule, inputs: Sequence[object], is_backward: bool, is_inference: bool
) -> tuple[CapturedGraph, Fallback | None]:
    name = f"graph{next(_graph_numbers)}"
    try:
        return capture(module, name, inputs, is_backward=is_backward, is_inference=is_inference), None
    except Exception as error:  # a graph of a form never seen: it still compiles as it is
        plain = CapturedGraph(name, "unknown", 0, groups_in(module.graph), module.graph)
        return plain, Fallback(name, "capture", _first_line(error))


@dataclass(frozen=True)
class _Decided:
    """What the steps between capture and agree made of a graph."""

    report: GraphReport
    """Of the graph as it was captured, where a step failed; else what is known before anything is rewritten."""
    every: tuple[DecidedGraph, ...] = ()
    """All variants, the captured graph first; none where a step failed."""
    best: DecidedGraph | None = None
    timed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _decide(
    captured: CapturedGraph,
    context: Context,
    rules: RuleSet,
    clock: _Clock,
    failure: Fallback | None,
    ask_sensitivity: bool = False,
    time_candidates: Callable[[PricedGraph], Verified] | None = None,
) -> _Decided:
    """Variants to decide, and a first plan. A failure is a fallback that the report holds."""
    clock.restart()  # ranks may have waited for each other since
    plain = GraphReport(name=captured.name, phase=captured.phase, tokens=captured.tokens)
    if failure is not None:
        return _Decided(replace(plain, fallbacks=(failure,), steps_us=clock.laps))
    step = "variants"
    try:
        regime: Regime | None = None
        every: list[DecidedGraph] = []
        timed: dict[str, tuple[str, ...]] = {}
        found_variants = variants(captured, rules, context)
        clock.lap(step)
        for variant in found_variants:
            step = "recognize"
            frame = Frame(variant, recognize(variant, rules, context), rules, context)
            clock.lap(step)
            step = "regime"
            regime_here, tokens = specialize(variant, frame, context)
            regime = regime if every else regime_here
            clock.lap(step)
            step = "price"
            priced = price(variant, frame, frame.problem(tokens), context)
            clock.lap(step)
            if time_candidates is not None:
                step = "verify"
                verified = time_candidates(priced)
                priced, timed[variant.variant] = verified.priced, verified.lines
                clock.lap(step)
            step = "decide"
            every.append(decide(priced, rules, context))
            clock.lap(step)
        best, compared = cheapest(every, context)
        sensitivity: tuple[Sensitivity, ...] = sensitivities(best, context) if ask_sensitivity else ()
        clock.restart()
        step = "plan"
        plan(best, rules, context)
        clock.lap(step)
    except (AgreementError, PeerTimeoutError):  # ranks that time candidates together: no graph runs without a peer
        raise
    except Exception as error:  # whatever went wrong, the unrewritten graph is still right
        failed = Fallback(captured.name, step, _first_line(error))
        return _Decided(replace(plain, fallbacks=(failed,), steps_us=clock.laps))
    report = replace(plain, regime=regime, sensitivity=sensitivity, variants=compared, steps_us=clock.laps)
    return _Decided(report, tuple(every), best, timed)


def _rewrite(
    decided: _Decided, agreed: Agreed, rules: RuleSet, context: Context, clock: _Clock
) -> tuple[GraphReport, tuple[torch.SymFloat, ...], str]:
    """Carries out what was agreed: the report, the floats that were taken as numbers, and why it failed, if it did."""
    final, report = agreed.decided, decided.report
    if final is None or decided.best is None:
        return replace(report, steps_us=clock.laps), (), ""
    failed = ""
    rounding: tuple[str, ...] = ()
    try:
        rounding = rewrite(final, agreed.planned, rules, context)
        clock.lap("rewrite")
    except Exception as error:  # whatever went wrong, the unrewritten graph is still right
        failed = _first_line(error)
        report = replace(report, fallbacks=(Fallback(report.name, "rewrite", failed),))
    work = final.priced.work
    variant = final.priced.captured.variant
    report = replace(
        report,
        decisions=final.decisions,
        plans=agreed.planned.plans,
        rounding=rounding,
        steps_us=clock.laps,
        work=() if isinstance(work, WorkFailure) else work,
        work_failure=work if isinstance(work, WorkFailure) else None,
        variant=variant,
        timed=decided.timed.get(variant, ()),
    )
    if failed:
        report = GraphReport(report.name, report.phase, report.tokens, fallbacks=report.fallbacks, steps_us=clock.laps)
    numbers = {str(number): number for chosen in final.chosen for number in chosen.found.numbers}
    return report, tuple(numbers.values()), failed and f"step 'rewrite' failed: {failed}"


def rewrite_alone(
    captured: CapturedGraph,
    context: Context,
    rules: RuleSet,
    clock: _Clock,
    failure: Fallback | None,
    ask_sensitivity: bool = False,
) -> tuple[GraphReport, fx.Graph]:
    """The steps without peers to agree with: the report, and the rewritten graph."""
    decided = _decide(captured, context, rules, clock, failure, ask_sensitivity)
    if decided.best is None:
        return _rewrite(decided, EMPTY, rules, context, clock)[0], captured.graph
    agreed = Agreed(decided.best, plan(decided.best, rules, context))
    return _rewrite(decided, agreed, rules, context, clock)[0], decided.best.priced.captured.graph


def preview(
    config: Config,
    known: Topology,
    machine: Machine,
    sink: Callable[[GraphReport], None],
    rules: RuleSet = RULES,
    ask_sensitivity: bool = False,
) -> Compiled:
    """A backend that captures, decides and rewrites as `weave` does, for `weaveopt explain`: no peers, no kernels.

    Every process group of the graph is taken to have the topology `known`. What it returns only makes outputs
    of the right shapes, so it is good for fake inputs alone. With `ask_sensitivity` the reports say what would change
    the choices.
    """

    def inner_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        clock = _Clock()
        backward, inference = bool(arguments.get("is_backward")), bool(arguments.get("is_inference"))
        captured, failure = _capture(module, inputs, backward, inference)
        clock.lap("capture")
        context = Context(config, _routed(machine, config), dict.fromkeys(_groups(captured), known))
        sink(rewrite_alone(captured, context, rules, clock, failure, ask_sensitivity)[0])
        outputs = module.graph.output_node().args[0]
        values = fx.map_arg(outputs, lambda node: node.meta["val"])

        def returns_fakes(arguments: list[object]) -> object:
            arguments.clear()
            return values

        returns_fakes._boxed_call = True  # type: ignore[attr-defined]
        return returns_fakes

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> Compiled:
        return seams.compile_with(inner_compile, graph_module, example_inputs)

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


def _groups(captured: CapturedGraph) -> tuple[str, ...]:
    """Those that compile the same graph and compare it, and those that meet in calls alone."""
    return (*captured.groups, *groups_met_in_calls(captured.graph))


def _topologies(captured: CapturedGraph, config: Config) -> dict[str, Topology]:
    """Where the ranks of each group are, and the device that they use in this graph."""
    devices = devices_in(captured.graph)
    found = {group: topology.discover(group, config.compile_timeout_s) for group in _groups(captured)}
    return {group: replace(known, device=devices.get(group, known.device)) for group, known in found.items()}


def _machine_for(config: Config, topologies: Mapping[str, Topology], captured: CapturedGraph) -> Choice:
    """The profile asked for, else the shipped one that fits the GPUs of all ranks, or the nearest in its place."""
    if config.machine is not None:
        return Choice(cost_model.load(config.machine))
    on_gpus = [known for known in topologies.values() if known.device == "cuda"]
    if not on_gpus and (topologies or not runs_on_gpu(captured.graph)):
        return Choice(cost_model.load("cpu"))
    found = {gpu for known in on_gpus for gpu in known.gpus} or {*gpus.gpus_of([gpus.describe()])}
    per_host = max((known.world // known.num_hosts for known in topologies.values()), default=1)
    return cost_model.choose(tuple(found), per_host)


def _routed(machine: Machine, config: Config) -> Machine:
    """The machine, with the spread of choices over experts that the options name."""
    return machine if config.skew is None else replace(machine, skew=Skew.parse(config.skew))


def _not_measured(choice: Choice) -> Rejection | None:
    """Why no rule may be used under a profile that only stands in: nobody knows how wrong it is here."""
    if not choice.stands_in_for:
        return None
    values = (("gpu", ", ".join(choice.stands_in_for)), ("profile", choice.machine.name))
    message = "no profile of this GPU: measure it with `weaveopt calibrate`, or name one with options={'machine': ...}"
    return Rejection("machine_not_measured", message, values)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {_message(error) or 'no message'}"


def _message(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _raiser(error: WeaveError) -> Compiled:
    def raise_error(*_: object) -> object:
        raise error

    return raise_error
