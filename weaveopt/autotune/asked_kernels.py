"""Local kernels that the decision for a graph rests on, and how much each of their prices matters to it.

The price of a graph is worked out once with a table that only writes down what it is asked: whatever a site, a
candidate or the rest of the graph needs is found, without any rule saying so. A kernel is worth as much as the decision
may lose by an error of its price: what another choice would gain if that price were off by as much as it may be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log

from weaveopt.cost_model.timed import ByProfile, KernelShape
from weaveopt.pipeline.price import price
from weaveopt.pipeline.problem import Problem, ProblemTemplate
from weaveopt.pipeline.token_counts import symbolic_counts, tokens_at
from weaveopt.records.price import error_us_of
from weaveopt.records.site import TokenCounts
from weaveopt.rule import CapturedGraph, Context

Counts = Mapping[int, TokenCounts]
ANY_TIME = 1e3
"""Relative error of a price that says nothing."""


@dataclass(frozen=True)
class AskedKernel:
    """A kernel, what the profile says of it, and what its price matters."""

    shape: KernelShape
    us: float
    loss_us: float = 0.0
    """Most that the decision may lose by an error of this price; 0: no choice turns on it."""
    turns: tuple[int, ...] = ()
    """Kinds of sites, by the position of the first, whose choice such an error turns."""
    is_captured: bool = False
    """True if the captured graph runs it, so that every choice is compared with it, and every prediction has it."""

    @property
    def is_known(self) -> bool:
        """False if nothing is known of its price: the kernel may take any time."""
        return error_us_of(self.us) < self.us

    @property
    def worth(self) -> tuple[bool, bool, float, float]:
        """Key of the order of timing. First those that turn a choice: of what nothing is known the shortest, as nothing
        is chosen without their times; then by what a wrong choice loses. Then the longest."""
        turns = self.loss_us > 0.0
        unknown = turns and not self.is_known
        return (turns, unknown, -self.us if unknown else self.loss_us, self.us)


class _Asked:
    """Table without any time, which keeps what it is asked."""

    def __init__(self) -> None:
        self.us_of: dict[KernelShape, float] = {}

    def has(self, shape: KernelShape) -> bool:
        return True

    def us(self, shape: KernelShape, by_profile: ByProfile) -> float:
        found = self.us_of[shape] = by_profile(shape.size)
        return found

    def slowdown(self, kernel: str, by_profile: Callable[[KernelShape], float]) -> float:
        return 1.0


@dataclass(frozen=True)
class _Off:
    """Table in which one kernel takes longer than the profile says, or none does."""

    shape: KernelShape | None = None
    factor: float = 1.0

    def has(self, shape: KernelShape) -> bool:
        return True

    def us(self, shape: KernelShape, by_profile: ByProfile) -> float:
        us = by_profile(shape.size)
        return us * self.factor if replace(shape, layout="") == self.shape else us

    def slowdown(self, kernel: str, by_profile: Callable[[KernelShape], float]) -> float:
        return 1.0


class AskedPrices:
    """The prices of one graph at the token counts that its decision looks at."""

    def __init__(self, captured: CapturedGraph, frame: ProblemTemplate, context: Context) -> None:
        self._captured, self._frame, self._context = captured, frame, context
        self._counts = _counts(captured, frame, context)
        self.groups: tuple[str, ...] = ()
        """Groups in which a site may be rewritten at one of the counts, sorted; known once `kernels` was called."""

    def kernels(self) -> tuple[AskedKernel, ...]:
        """Every kernel that a price at one of the counts rests on, each layout once."""
        asked, captured = _Asked(), _Asked()
        context, groups = self._with(asked), set[str]()
        for counts in self._counts:
            problem = self._frame.problem(counts, context)
            groups.update(group for each in problem.sites if each.choices for group in each.found.site.groups)
            if counts == self._counts[0]:
                found = price(self._captured, self._frame, problem, context)
                _ = found.baseline  # the rest of the graph
                as_it_is = replace(found.surroundings, machine=replace(context.machine, timed=captured))
                for each in found.library_kernels([False] * len(problem.sites)):
                    as_it_is.us(each)
        self.groups = tuple(sorted(groups))
        stored = {replace(shape, layout="") for shape in asked.us_of if shape.layout}
        layouts = {replace(shape, size=0, layout=""): shape.layout for shape in asked.us_of if shape.layout}
        kernels = {}
        for shape, us in asked.us_of.items():
            if shape.layout or shape not in stored:
                # Candidates do not say how operands are stored: as the graph has them, at whatever size.
                layout = shape.layout or layouts.get(replace(shape, size=0), "")
                is_captured = shape in captured.us_of
                kernels[replace(shape, layout=layout)] = AskedKernel(
                    replace(shape, layout=layout), us, is_captured=is_captured
                )
        return tuple(kernels.values())

    def weighed(
        self, kernels: Sequence[AskedKernel], relative_error: float, longest_s: float = inf
    ) -> tuple[AskedKernel, ...]:
        """The same kernels, longest first, with what the decision may lose by an error of each price, which is its
        standard error, and `relative_error` at least.

        Each takes a pricing of all sites; those for which that would exceed `longest_s` count as turning nothing.
        """
        began = time.perf_counter()
        before = [self._problem(counts, self._with(_Off())) for counts in self._counts]
        last = began + longest_s - (time.perf_counter() - began)  # another pricing takes as long as this one
        order = sorted(kernels, key=lambda kernel: -kernel.us)
        return tuple(
            self._weighed(kernel, before, relative_error) if time.perf_counter() < last else kernel for kernel in order
        )

    def _weighed(self, kernel: AskedKernel, before: Sequence[Problem], relative_error: float) -> AskedKernel:
        error = max(relative_error, error_us_of(kernel.us) / kernel.us) if kernel.is_known else ANY_TIME
        context = self._with(_Off(replace(kernel.shape, layout=""), 1.0 + error))
        loss_us, turns = 0.0, dict[int, None]()
        for counts, problem in zip(self._counts, before, strict=True):
            for kind, lost_us in _losses(problem, self._problem(counts, context)).items():
                loss_us += lost_us
                turns[kind] = None
        return replace(kernel, loss_us=loss_us, turns=tuple(turns))

    def _problem(self, counts: Counts, context: Context) -> Problem:
        return self._frame.problem(counts, context, usable_only=True)

    def _with(self, table: _Asked | _Off) -> Context:
        return replace(self._context, machine=replace(self._context.machine, timed=table))


WIDEST_STEP = 8.0
"""Ratio of token counts that are timed one after the other where nothing but times decides: a time says something of
counts that are less than four times as many, or as few."""


def _counts(captured: CapturedGraph, frame: ProblemTemplate, context: Context) -> tuple[Counts, ...]:
    """Token counts of the sites: those of the captured call, and of symbolic ones two more, between it and the ends. On
    GPUs without a profile, as many as it takes for every count to have a timed one next to it."""
    symbolic = symbolic_counts(captured, frame.sites)
    if symbolic is None:
        return ({},)
    last = max(symbolic.first, min(context.config.max_tokens, symbolic.end or context.config.max_tokens))
    ends: tuple[int, ...] = (round((symbolic.first * symbolic.hint) ** 0.5), round((symbolic.hint * last) ** 0.5))
    if context.machine.stands_in:
        num_steps = ceil(log(last / symbolic.first) / log(WIDEST_STEP)) if last > symbolic.first else 0
        ends = (last, *(round(symbolic.first * WIDEST_STEP**at) for at in range(num_steps)))
    steps = {max(end // symbolic.step, 1) * symbolic.step for end in ends} - {symbolic.hint}
    return ({}, *(tokens_at(captured, frame.sites, tokens) for tokens in sorted(steps)))


def _losses(before: Problem, after: Problem) -> dict[int, float]:
    """Loss of each kind of site with the choice that is best before, where prices change as much as from `before`
    to `after`, or as much the other way."""
    chosen, losses = before.best(), dict[int, float]()
    rows = zip(before.costs_us, after.costs_us, strict=True)
    for index, (costs, others) in enumerate(rows):
        if len(costs) != len(others):
            continue
        best = chosen[index]
        # Costs are straight lines of one price: what it changes in one direction it changes in the other.
        changed = [
            abs((there - others[best]) - (here - costs[best])) for here, there in zip(costs, others, strict=True)
        ]
        lost_us = max(change - (here - costs[best]) for change, here in zip(changed, costs, strict=True))
        if lost_us > 0.0 and any(changed):
            kind = before.kinds[index]
            losses[kind] = losses.get(kind, 0.0) + lost_us
    return losses
