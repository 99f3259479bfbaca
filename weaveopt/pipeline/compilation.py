"""Compilation of one graph: the record that the steps pass on, and the loop that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from itertools import count
from typing import Protocol, TypeVar

import torch
import torch.fx as fx

from weaveopt.config import Config
from weaveopt.cost_model.timed import TimedKernels
from weaveopt.errors import AgreementError, OrderError, PeerTimeoutError, WeaveError
from weaveopt.graph.facts import groups_in
from weaveopt.inductor.seams import GraphPass
from weaveopt.pipeline.agree import EMPTY, Agreed
from weaveopt.pipeline.bind import compiling, shared_reason, unrewritten
from weaveopt.pipeline.choose import ChosenGraph, TimedGraphs
from weaveopt.pipeline.context import GraphContext, Known
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.pipeline.plan import Planned
from weaveopt.pipeline.price import PricedGraph
from weaveopt.pipeline.problem import Problem, ProblemTemplate
from weaveopt.pipeline.rewrite import NOTHING_REWRITTEN, Rewritten
from weaveopt.pipeline.specialize import guard
from weaveopt.records.candidate import Rejection
from weaveopt.records.order import ANY_ORDER, CODE, Order
from weaveopt.records.report import (
    Doubt,
    Fallback,
    GraphReport,
    KernelReport,
    Regime,
    Sensitivity,
    Values,
    WorkFailure,
)
from weaveopt.records.site import TokenCounts
from weaveopt.rule import CapturedGraph, Context, FoundSite, RuleSet
from weaveopt.wording import named

Part = TypeVar("Part")
graph_numbers = count()
ORDER_LOST = Rejection(CODE, "the graph runs as it was: its communication was written in another order than was asked")


class TunedKernels(Protocol):
    """Local kernels that were timed for the captured graph."""

    @property
    def times(self) -> TimedKernels: ...

    @property
    def kernels(self) -> tuple[KernelReport, ...]: ...

    @property
    def line(self) -> str: ...

    @property
    def doubts(self) -> tuple[Doubt, ...]: ...


class TimedGraph(Protocol):
    """A priced graph with measured times."""

    @property
    def priced(self) -> PricedGraph: ...

    @property
    def lines(self) -> tuple[str, ...]:
        """Notes of the measurement, a line each."""
        ...


class Timing(Protocol):
    """The option `verify`: candidates of a graph's sites, and decided graphs, timed on the ranks."""

    def sites(self, priced: PricedGraph, context: Context) -> TimedGraph: ...

    def graphs(self, decided: Sequence[DecidedGraph], context: Context) -> TimedGraphs: ...


class Tunes(Enum):
    """Task of the step `tune`."""

    TIMES = auto()
    """Local kernels are timed on the devices that are here."""
    DOUBTS = auto()
    """No device is here; choices that rest on prices between measured ones are named."""
    NOTHING = auto()


@dataclass(frozen=True)
class VariantState:
    """One variant of the graph, with what each step made of it."""

    captured: CapturedGraph
    sites: tuple[FoundSite, ...] = ()
    frame: ProblemTemplate | None = None
    regime: Regime | None = None
    tokens: Mapping[int, TokenCounts] = field(default_factory=dict)
    """Token counts within the regime, by site."""
    priced: PricedGraph | None = None
    timed: tuple[str, ...] = ()
    decided: DecidedGraph | None = None

    def verified(self, time: Timing | None, context: Context) -> VariantState:
        """The variant with measured times."""
        found = made(time).sites(made(self.priced), context)
        return replace(self, priced=found.priced, timed=found.lines)

    @property
    def problem(self) -> Problem:
        """The sites' problem within the regime."""
        return made(self.frame).problem(self.tokens)

    @property
    def is_undecided(self) -> bool:
        return self.decided is None and not self.captured.rejections


@dataclass(frozen=True)
class Compilation:
    """A graph, what it is compiled for, and what each step made; a step returns the record with its own part."""

    module: fx.GraphModule
    inputs: Sequence[object]
    config: Config
    rules: RuleSet
    graph_pass: GraphPass
    known: Known | None = None
    """Set by `preview` alone."""
    time: Timing | None = None
    """Set with the option `verify`."""
    asks_sensitivity: bool = False
    name: str = field(default_factory=lambda: f"graph{next(graph_numbers)}")
    captured: CapturedGraph | None = None
    found: GraphContext | None = None
    tuned: TunedKernels | None = None
    variants: tuple[VariantState, ...] = ()
    """The captured graph first."""
    timed: TimedGraphs | None = None
    """The variants, timed whole; None without the option `verify`."""
    chosen: ChosenGraph | None = None
    sensitivity: tuple[Sensitivity, ...] = ()
    planned: Planned | None = None
    agreed: Agreed = EMPTY
    rewritten: Rewritten = NOTHING_REWRITTEN
    not_bound: str = ""
    """Why the graph has to stay as it was, on all ranks."""
    order_lost: str = ""
    """Why the code that Inductor wrote on some rank could not run, so that all ranks run the captured graph."""
    fallbacks: tuple[Fallback, ...] = ()
    """The step that failed."""
    laps: Values = ()
    """Microseconds of each step."""

    @property
    def graph(self) -> CapturedGraph:
        """The captured graph; if capture failed, only what can be read from the module without it."""
        if self.captured is not None:
            return self.captured
        return CapturedGraph(self.name, "unknown", 0, groups_in(self.module.graph), self.module.graph)

    def with_captured(self, captured: CapturedGraph) -> Compilation:
        return replace(self, captured=captured, variants=(VariantState(captured),))

    def with_variants(self, variants: Sequence[CapturedGraph]) -> Compilation:
        return replace(self, variants=(*self.variants, *map(VariantState, variants)))

    def with_timed_variants(self) -> Compilation:
        """The compilation with the variants timed whole, where rules make any."""
        timed = made(self.time).graphs(self.decided, self.context) if self.rules.graph_rules else None
        return replace(self, timed=timed)

    @cached_property
    def context(self) -> Context:
        """The context with the times of local kernels, once there are any."""
        context = made(self.found).context
        if self.tuned is None:
            return context
        return replace(context, machine=replace(context.machine, timed=self.tuned.times))

    @property
    def tunes(self) -> Tunes:
        if self.known is None:
            return Tunes.TIMES
        return Tunes.DOUBTS if self.asks_sensitivity else Tunes.NOTHING

    @property
    def sites(self) -> tuple[FoundSite, ...] | None:
        """Sites of the captured graph; None where a step failed."""
        return None if self.fallbacks else self.variants[0].sites

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """Graphs that a step may have changed or made."""
        return tuple(each.captured.graph for each in self.variants) or (self.graph.graph,)

    @property
    def decided(self) -> tuple[DecidedGraph, ...]:
        """All variants, the captured graph first; none where a step failed."""
        return () if self.fallbacks else tuple(each.decided for each in self.variants if each.decided is not None)

    @property
    def refused(self) -> tuple[CapturedGraph, ...]:
        """Variants that their rules refused themselves."""
        return tuple(each.captured for each in self.variants if each.captured.rejections)

    @property
    def regimes(self) -> tuple[Regime | None, ...]:
        """The regime of each decided variant."""
        return tuple(each.regime for each in self.variants if each.decided is not None)

    @property
    def best(self) -> DecidedGraph | None:
        """The decided graph that runs."""
        return None if self.chosen is None else self.chosen.best

    @property
    def numbers(self) -> tuple[torch.SymFloat, ...]:
        """Python floats that rewrites took as the numbers they are in this call."""
        final = self.agreed.decided
        chosen = final.chosen if final is not None else ()
        return tuple({str(number): number for each in chosen for number in each.found.numbers}.values())

    @property
    def failure(self) -> str:
        """The step that failed on this rank, for its peers; empty where none did."""
        return "; ".join(f"step {each.step!r} failed: {each.error}" for each in self.fallbacks)

    @property
    def rewritten_groups(self) -> tuple[str, ...]:
        """Groups of more than one rank that have rewritten sites in this graph, or run a variant of it."""
        return (*self.agreed.waiting_groups, *self.agreed.known) if self.result is not None else ()

    @property
    def result(self) -> fx.Graph | None:
        """The graph that takes the captured one's place; None where that stays as it is."""
        final, report = self.agreed.decided, self.report
        if final is None or not (report.num_rewritten or report.variant != self.graph.variant):
            return None
        return final.priced.captured.graph

    @property
    def report(self) -> GraphReport:
        """Report from what the steps have made so far."""
        graph, final = self.graph, self.agreed.decided
        plain = GraphReport(graph.name, graph.phase, graph.tokens, fallbacks=self.fallbacks, steps_us=self.laps)
        if self.fallbacks:
            return plain
        report = replace(plain, sensitivity=self.sensitivity)
        if self.tuned is not None:
            tuned = self.tuned
            report = replace(report, kernels=tuned.kernels, tuned=tuned.line, doubts=tuned.doubts)
        if self.chosen is not None:
            report = replace(report, regime=self.chosen.regime, variants=self.chosen.compared)
        if final is not None:
            work, variant = final.priced.work, final.priced.captured.variant
            report = replace(
                report, decisions=final.decisions, plans=self.agreed.planned.plans, rounding=self.rewritten.rounding,
                work=() if isinstance(work, WorkFailure) else work,
                work_failure=work if isinstance(work, WorkFailure) else None, variant=variant,
                timed=self._timed_lines(variant),
            )  # fmt: skip
        captured = self.decided[0] if self.decided else None
        if final is not None and captured is not None and final is not captured:
            before, after = captured.priced.baseline, final.timeline
            if before is not None and after is not None:
                report = replace(report, schedule_before=before.scheduled, schedule=after.scheduled)
        if self.not_bound:
            report = unrewritten(report, captured, self.not_bound)
        if self.order_lost:
            report = unrewritten(report, captured, self.order_lost, ORDER_LOST, "order")
        return report

    def _timed_lines(self, variant: str) -> tuple[str, ...]:
        of_sites = next((each.timed for each in self.variants if each.captured.variant == variant), ())
        return (*of_sites, self.timed.line) if self.timed is not None and self.timed.line else of_sites

    def raise_failure(self) -> None:
        """Raises `WeaveError` if anything went wrong: the option `strict`."""
        report = self.report
        if report.fallbacks:
            failed = report.fallbacks[0]
            raise WeaveError(f"step {failed.step!r} failed on {failed.graph}: {failed.error}")
        if report.work_failure is not None:
            raise WeaveError(
                f"the work outside the sites of {report.name} could not be estimated: {report.work_failure}"
            )


@dataclass(frozen=True)
class Step:
    """A named step. One that fails is a fallback: the graph as it was captured is still right."""

    name: str
    run: Callable[[Compilation], Compilation]
    always: bool = False
    """True if it runs though a step failed: the peers of this rank must not go on without it."""
    is_asked: Callable[[Compilation], bool] = lambda _: True


Observer = Callable[[str, float, Sequence[fx.Graph]], None]
"""Gets a step's name, its microseconds, and the graphs after it."""


def run(
    steps: Sequence[Step], state: Compilation, observe: Observer, raised: tuple[type[WeaveError], ...] = ()
) -> Compilation:
    """All steps in order, each timed. Raises `AgreementError` and `PeerTimeoutError`, as no graph runs without a peer,
    and errors of the kinds `raised`; any other error of a step is a fallback."""
    through: tuple[type[WeaveError], ...] = (AgreementError, PeerTimeoutError, *raised)
    for step in steps:
        if (state.fallbacks and not step.always) or not step.is_asked(state):
            continue
        began = time.perf_counter()
        try:
            state = step.run(state)
        except through:
            raise
        except Exception as error:  # whatever went wrong, the unrewritten graph is still right
            if step.always:
                raise
            state = replace(state, fallbacks=(Fallback(state.graph.name, step.name, named(error)),))
        lap_us = round((time.perf_counter() - began) * 1e6, 1)
        state = replace(state, laps=(*state.laps, (step.name, lap_us)))
        observe(step.name, lap_us, state.graphs)
    return state


class CompilesGraph(Protocol):
    """Inductor's compile of the graph that its module holds."""

    def __call__(self, *, order: Order) -> object: ...


def in_order(
    done: Compilation, compile_graph: CompilesGraph, correct: Callable[[GraphReport], None]
) -> tuple[object, Compilation]:
    """Result of Inductor for the graph, and the compilation that it belongs to.

    Where the code that it wrote on some rank has another order of communication than was asked, all ranks that agreed
    on the graph compile the captured one; `correct` gets the report that is true then. Raises `OrderError` where this
    rank compiles a plan alone that was agreed before, as its peers already run it.
    """
    order, why, compiled = done.rewritten.order, "", None
    with compiling(done.agreed, done.context):
        try:
            compiled = compile_graph(order=order)
        except OrderError as error:
            if done.agreed.known:
                raise
            why = str(error)
    if order and (why := shared_reason(done.agreed, why, done.context)):
        done = replace(done, order_lost=why)
        correct(done.report)
        if done.config.strict:
            done.raise_failure()
        done.module.graph = done.graph.graph
        compiled = compile_graph(order=ANY_ORDER)
    guard(done.graph, done.report.regime, done.numbers)
    return compiled, done


def of_each_variant(step: Callable[[Compilation, VariantState], VariantState]) -> Callable[[Compilation], Compilation]:
    """A step that takes one variant at a time, of those that are not decided yet."""
    return lambda state: replace(
        state, variants=tuple(step(state, each) if each.is_undecided else each for each in state.variants)
    )


def of_variants(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same steps once more, where graph rules made variants that may be used."""

    def once_more(step: Step) -> Step:
        def is_asked(state: Compilation) -> bool:
            return any(variant.is_undecided for variant in state.variants) and step.is_asked(state)

        return replace(step, name=f"{step.name} variants", is_asked=is_asked)

    return tuple(map(once_more, steps))


def made(part: Part | None) -> Part:
    """Part of the record that an earlier step made."""
    assert part is not None, "a step runs before the one that makes what it reads"
    return part
