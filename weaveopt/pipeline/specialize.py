"""Compile graphs of symbolic size for regimes of token counts, each with the decision that is best there.

If the decision for a graph would change with the number of tokens (`solver.regimes`; from the cost model, never from a
list), one comparison of the symbolic count with the boundary becomes a guard of the compiled function: torch compiles
it again, and decides again, when a call comes from beyond. At most four regimes are made of one graph. Token counts are
the same on all ranks of a group, and so are profiles and options, so all ranks have the same guards.

A backward graph has no guards of its own: it runs with its forward graph, under that one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx.experimental.symbolic_shapes import guard_float

from weaveopt import cost_model
from weaveopt.pipeline.problem import Problem, ProblemTemplate
from weaveopt.pipeline.token_counts import SymbolicCounts, exchanged_rows, symbolic_counts
from weaveopt.records.report import Regime
from weaveopt.records.site import TokenCounts
from weaveopt.rule import CapturedGraph, Context
from weaveopt.solver.regimes import DecidedRange, Served, regimes
from weaveopt.wording import counted


def specialize(
    captured: CapturedGraph, frame: ProblemTemplate, context: Context
) -> tuple[Regime | None, Mapping[int, TokenCounts]]:
    """The regime of this graph, and the token counts that may come within it, by site.

    None, and no counts, for a graph whose sizes are numbers, a backward graph, and one without sites. More tokens than
    the option `max_tokens` plans for are served by the last regime.
    """
    symbolic = symbolic_counts(captured, frame.sites)
    if symbolic is None:
        return None, {}
    found = _regimes(symbolic, frame, context)
    served = next((each for each in found if symbolic.hint <= each.last), found[-1])
    end = served.last if served is not found[-1] else symbolic.end
    tokens = min(max(symbolic.hint, served.decided_as.first), served.decided_as.last)
    counts = {}
    for index, tokens_of_site in symbolic.sites.items():
        most = frame.sites[index].site.tokens.most
        largest = most if end is None else min(most, tokens_of_site(end))
        here = tokens_of_site(tokens)
        counts[index] = TokenCounts(here, tokens_of_site(served.first), max(largest, here))
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


def _regimes(symbolic: SymbolicCounts, frame: ProblemTemplate, context: Context) -> tuple[Served, ...]:
    """Regimes of the planned token counts; one regime where torch forbids a guard."""
    last = max(symbolic.first, min(context.config.max_tokens, symbolic.end or context.config.max_tokens))
    if not symbolic.may_guard:
        everything = Served(symbolic.first, last, DecidedRange(symbolic.hint, symbolic.hint))
        return (everything,)

    def problem_at(tokens: int) -> Problem:
        """Price the problem as if all calls had this token count."""
        counts = {index: TokenCounts(of(tokens), of(tokens), of(tokens)) for index, of in symbolic.sites.items()}
        return frame.problem(counts, usable_only=True)

    rows = exchanged_rows(frame.sites[index] for index in symbolic.sites)
    grid = {
        tokens
        for length, dtype in rows
        for tokens in cost_model.token_grid(context.machine, length, dtype, symbolic.first, last)
    }
    # With room for one count only torch would make the size a number, an error where it was marked dynamic.
    return regimes(problem_at, sorted(grid), narrowest=2 * symbolic.step)
