"""Compile graphs of symbolic size for regimes of token counts, each with the decision that is best there.

If the decision for a graph would change with the number of tokens (`solver.regimes`; from the cost model, never from a
list), one comparison of the symbolic count with the boundary becomes a guard of the compiled function: torch compiles
it again, and decides again, when a call comes from beyond. At most four regimes are made of one graph. Token counts are
the same on all ranks of a group, and so are profiles and options, so all ranks have the same guards.

A backward graph has no guards of its own: it runs with its forward graph, under that one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint, guard_float
from torch.utils._sympy.numbers import int_oo

from weaveopt import cost_model
from weaveopt.graph.facts import tokens_of
from weaveopt.graph.pattern import tensor_of
from weaveopt.graph.values import dtype_name, hint
from weaveopt.pipeline.problem import Frame, Problem
from weaveopt.records.report import Regime
from weaveopt.records.site import TokenCounts
from weaveopt.rule import CapturedGraph, Context, FoundSite
from weaveopt.solver.regimes import Served, Stretch, regimes
from weaveopt.wording import counted


def specialize(
    captured: CapturedGraph, frame: Frame, context: Context
) -> tuple[Regime | None, Mapping[int, TokenCounts]]:
    """The regime of this graph, and the token counts that may come within it, by site.

    None, and no counts, for a graph whose sizes are numbers, a backward graph, and one without sites. More tokens than
    the option `max_tokens` plans for are served by the last regime.
    """
    symbolic = _symbolic(captured, frame.sites)
    if symbolic is None:
        return None, {}
    found = _regimes(symbolic, frame, context)
    served = next((each for each in found if symbolic.hint <= each.last), found[-1])
    end = served.last if served is not found[-1] else symbolic.end
    tokens = min(max(symbolic.hint, served.decided_as.first), served.decided_as.last)
    counts = {}
    for index in symbolic.sites:
        most = frame.sites[index].site.tokens.most
        largest = most if end is None else min(most, end)
        counts[index] = TokenCounts(tokens, served.first, max(largest, tokens))
    return Regime(served.first, end), counts


def guard(captured: CapturedGraph, regime: Regime | None, numbers: Sequence[torch.SymFloat]) -> None:
    """Make torch compile again for token counts outside `regime`: a comparison that it has not seen yet becomes a
    guard.

    And for other values of `numbers`, the floats that rewrites took as the numbers they are in this call.

    To be called when Inductor is done: its graph cache keeps the guards of a graph, and a graph that is the same in
    two regimes, or under two profiles, may serve both.
    """
    for number in numbers:
        value = guard_float(number)
        assert value == number.node.hint, f"{number} is {number.node.hint} in this call and guarded as {value}"
    count = captured.symbolic_tokens
    if count is None or regime is None:
        return
    above = bool(count >= regime.min_tokens)
    below = regime.max_tokens is None or bool(count <= regime.max_tokens)
    assert above and below, f"{counted(count.node.hint, 'token')} are not in {regime}"


@dataclass(frozen=True)
class _Symbolic:
    """The symbolic token count of a graph, and the sites that have it."""

    hint: int
    sites: tuple[int, ...]
    """Positions."""
    first: int
    end: int | None
    """The least and the largest value that may come; None: no end."""
    step: int
    """Divisor of every possible value."""
    may_guard: bool


def _symbolic(captured: CapturedGraph, sites: Sequence[FoundSite]) -> _Symbolic | None:
    count = captured.symbolic_tokens
    if count is None or captured.phase == "backward":
        return None
    those = tuple(
        index
        for index, found in enumerate(sites)
        if not found.site.rejections and found.token_value is not None and _is_count(found.token_value, count)
    )
    if not those:
        return None
    bounds = count.node.shape_env.bound_sympy(count.node.expr)
    return _Symbolic(
        hint=int(count.node.hint),
        sites=those,
        first=max(1, int(bounds.lower)),
        end=None if bounds.upper is int_oo else int(bounds.upper),
        step=max(1, abs(int(count.node.expr.as_coeff_Mul()[0]))),
        may_guard=not _has_promised_range(count),
    )


def _is_count(node: fx.Node, count: torch.SymInt) -> bool:
    value = tensor_of(node)
    tokens = None if value is None else tokens_of(value)
    return isinstance(tokens, torch.SymInt) and bool(tokens.node.expr == count.node.expr)


def _has_promised_range(count: torch.SymInt) -> bool:
    """True if the user declared a size's range (`mark_dynamic(min=, max=)`), which torch refuses to narrow."""
    symbols = count.node.expr.free_symbols
    for tracked in getattr(count.node.shape_env, "tracked_fakes", None) or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            promised = isinstance(constraint, StrictMinMaxConstraint) and isinstance(size, torch.SymInt)
            if promised and size.node.expr.free_symbols & symbols:
                return True
    return False


def _regimes(symbolic: _Symbolic, frame: Frame, context: Context) -> tuple[Served, ...]:
    """Regimes of the planned token counts; one regime where torch forbids a guard."""
    last = max(symbolic.first, min(context.config.max_tokens, symbolic.end or context.config.max_tokens))
    if not symbolic.may_guard:
        everything = Served(symbolic.first, last, Stretch(symbolic.hint, symbolic.hint))
        return (everything,)

    def problem_at(tokens: int) -> Problem:
        """Price the problem as if all calls had this token count."""
        counts = dict.fromkeys(symbolic.sites, TokenCounts(tokens, tokens, tokens))
        return frame.problem(counts, usable_only=True)

    rows = {_row_of(frame.sites[index]) for index in symbolic.sites}
    grid = {
        tokens
        for length, dtype in sorted(rows)
        for tokens in cost_model.token_grid(context.machine, length, dtype, symbolic.first, last)
    }
    # With room for one count only torch would make the size a number, an error where it was marked dynamic.
    return regimes(problem_at, sorted(grid), narrowest=2 * symbolic.step)


def _row_of(found: FoundSite) -> tuple[int, str]:
    """Elements of what the site exchanges for one token, and their dtype."""
    value = None if found.token_value is None else tensor_of(found.token_value)
    assert value is not None, f"{found.site.id} has no token count"
    return hint(value.shape[-1]), dtype_name(value)
