"""Graphs of symbolic size are compiled for regimes of token counts, each with the decision that is best there.

Where the decision for a graph would change with the number of tokens (`solver.regimes`; from the cost model, never
from a list), one comparison of the symbolic count with the boundary becomes a guard of the compiled function: torch
compiles it again, and decides again, when a call comes from beyond. At most four regimes are made of one graph.
Token counts are alike on all ranks of a group, and so are profiles and options, so all ranks meet the same guards.

A backward graph has no guards of its own: it runs with its forward graph, under that one's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint, guard_float
from torch.utils._sympy.numbers import int_oo

from weaveopt import cost_model
from weaveopt.graph.facts import tokens_of
from weaveopt.graph.pattern import tensor_of
from weaveopt.pipeline.price import Problem, frame
from weaveopt.records.report import Regime
from weaveopt.records.site import Workload
from weaveopt.rule import CapturedGraph, Context, Finding, Rule
from weaveopt.solver.regimes import Served, Stretch, regimes


def specialize(
    captured: CapturedGraph, findings: Sequence[Finding], rules: Sequence[Rule], context: Context
) -> tuple[Regime | None, tuple[Finding, ...]]:
    """The regime of this graph, and its sites with the token counts that may come within it.

    None, and the sites as they are, for a graph whose sizes are numbers, a backward graph, and one without sites.
    More tokens than the option `max_tokens` plans for are served by the last regime.
    """
    symbolic = _symbolic(captured, findings)
    if symbolic is None:
        return None, tuple(findings)
    found = _regimes(symbolic, findings, rules, context)
    served = next((each for each in found if symbolic.hint <= each.last), found[-1])
    end = served.last if served is not found[-1] else symbolic.end
    tokens = min(max(symbolic.hint, served.decided_as.first), served.decided_as.last)

    def bounded(workload: Workload) -> Workload:
        largest = workload.max_tokens if end is None else min(workload.max_tokens, end)
        return replace(_with_tokens(workload, tokens), min_tokens=served.first, max_tokens=max(largest, tokens))

    return Regime(served.first, end), _with_workloads(findings, symbolic, bounded)


def guard(captured: CapturedGraph, regime: Regime | None) -> None:
    """Has torch compile again for token counts outside `regime`: a comparison that it does not know yet is a guard.

    And for other values of the floats that rewrites took as numbers.

    To be called when Inductor is done: its graph cache keeps the guards of a graph, and a graph that is the same in
    two regimes, or under two profiles, may serve both.
    """
    for number in captured.numbers:
        value = guard_float(number)
        assert value == number.node.hint, f"{number} is {number.node.hint} in this call and guarded as {value}"
    count = captured.symbolic_tokens
    if count is None or regime is None:
        return
    above = bool(count >= regime.min_tokens)
    below = regime.max_tokens is None or bool(count <= regime.max_tokens)
    assert above and below, f"{count.node.hint} tokens are not in {regime}"


@dataclass(frozen=True)
class _Symbolic:
    """The symbolic token count of a graph, and the sites that have it."""

    hint: int
    sites: frozenset[str]
    first: int
    end: int | None
    """The least and the largest value that may come; None: no end."""
    step: int
    """All values that may come are multiples of it."""
    may_guard: bool


def _symbolic(captured: CapturedGraph, findings: Sequence[Finding]) -> _Symbolic | None:
    count = captured.symbolic_tokens
    if count is None or captured.phase == "backward":
        return None
    nodes = {node.name: node for node in captured.graph.nodes}
    sites = frozenset(
        finding.site.id
        for finding in findings
        if finding.match is not None and _is_count(nodes[finding.site.collectives[0]], count)
    )
    if not sites:
        return None
    bounds = count.node.shape_env.bound_sympy(count.node.expr)
    return _Symbolic(
        hint=int(count.node.hint),
        sites=sites,
        first=max(1, int(bounds.lower)),
        end=None if bounds.upper is int_oo else int(bounds.upper),
        step=max(1, abs(int(count.node.expr.as_coeff_Mul()[0]))),
        may_guard=not _has_promised_range(count),
    )


def _is_count(collective: fx.Node, count: torch.SymInt) -> bool:
    value = tensor_of(collective)
    tokens = None if value is None else tokens_of(value)
    return isinstance(tokens, torch.SymInt) and bool(tokens.node.expr == count.node.expr)


def _has_promised_range(count: torch.SymInt) -> bool:
    """Whether the user said in which range a size may be (`mark_dynamic(min=, max=)`): torch refuses to narrow it."""
    symbols = count.node.expr.free_symbols
    for tracked in getattr(count.node.shape_env, "tracked_fakes", None) or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            promised = isinstance(constraint, StrictMinMaxConstraint) and isinstance(size, torch.SymInt)
            if promised and size.node.expr.free_symbols & symbols:
                return True
    return False


def _regimes(
    symbolic: _Symbolic, findings: Sequence[Finding], rules: Sequence[Rule], context: Context
) -> tuple[Served, ...]:
    """Of the counts that are planned for; one for all where they may not be told apart."""
    workloads = [f.site.workload for f in findings if f.site.id in symbolic.sites and f.site.workload is not None]
    last = max(symbolic.first, min(context.config.max_tokens, symbolic.end or context.config.max_tokens))
    if not symbolic.may_guard:
        everything = Served(symbolic.first, last, Stretch(symbolic.hint, symbolic.hint))
        return (everything,)

    framed = frame(findings, lambda finding: (finding.site.workload, finding.site.id in symbolic.sites))

    def problem_at(tokens: int) -> Problem:
        """As if only so many tokens came."""

        def workload_at(finding: Finding) -> Workload | None:
            workload = finding.site.workload
            if workload is None or finding.site.id not in symbolic.sites:
                return workload
            return _static(workload, tokens)

        return framed.price(workload_at, rules, context)

    grid = {
        tokens
        for hidden, dtype in {(workload.hidden, workload.dtype) for workload in workloads}
        for tokens in cost_model.token_grid(context.machine, hidden, dtype, symbolic.first, last)
    }
    # With room for one count only torch would make the size a number, an error where it was marked dynamic.
    return regimes(problem_at, sorted(grid), narrowest=2 * symbolic.step)


def _with_tokens(workload: Workload, tokens: int) -> Workload:
    product = None if workload.product is None else replace(workload.product, m=tokens)
    return replace(workload, tokens=tokens, product=product)


def _static(workload: Workload, tokens: int) -> Workload:
    return replace(_with_tokens(workload, tokens), min_tokens=tokens, max_tokens=tokens)


def _with_workloads(
    findings: Sequence[Finding], symbolic: _Symbolic, changed: Callable[[Workload], Workload]
) -> tuple[Finding, ...]:
    """Other workloads for the sites that have the symbolic count."""
    known: dict[Workload, Workload] = {}
    found = []
    for finding in findings:
        workload = finding.site.workload
        if finding.site.id in symbolic.sites and workload is not None:
            if workload not in known:
                known[workload] = changed(workload)
            finding = replace(finding, site=replace(finding.site, workload=known[workload]))
        found.append(finding)
    return tuple(found)
