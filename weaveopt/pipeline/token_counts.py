"""Symbolic token counts: that of a graph, and those of its sites as functions of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint
from torch.utils._sympy.numbers import int_oo

from weaveopt.graph.facts import tokens_of
from weaveopt.graph.pattern import tensor_of
from weaveopt.graph.values import dtype_name, hint
from weaveopt.records.site import TokenCounts
from weaveopt.rule import CapturedGraph, FoundSite


@dataclass(frozen=True)
class SymbolicCounts:
    """The symbolic token count of a graph, and the sites that have it."""

    hint: int
    sites: Mapping[int, Callable[[int], int]]
    """Position of a site -> its token count in a call of so many tokens: the same, or a part of it."""
    first: int
    end: int | None
    """The least and the largest value that may come; None: no end."""
    step: int
    """Divisor of every possible value."""
    may_guard: bool


def symbolic_counts(captured: CapturedGraph, sites: Sequence[FoundSite]) -> SymbolicCounts | None:
    """The counts of a graph and its sites; None where sizes are numbers, in a backward graph, and without sites."""
    count = captured.symbolic_tokens
    if count is None or captured.phase == "backward":
        return None
    those = {
        index: derived
        for index, found in enumerate(sites)
        if not found.site.rejections
        and found.token_value is not None
        and (derived := _derived(found.token_value, count)) is not None
    }
    if not those:
        return None
    bounds = count.node.shape_env.bound_sympy(count.node.expr)
    return SymbolicCounts(
        hint=int(count.node.hint),
        sites=those,
        first=max(1, int(bounds.lower)),
        end=None if bounds.upper is int_oo else int(bounds.upper),
        step=max(1, abs(int(count.node.expr.as_coeff_Mul()[0]))),
        may_guard=not _has_promised_range(count),
    )


def _derived(node: fx.Node, count: torch.SymInt) -> Callable[[int], int] | None:
    """The token count of a value as a function of the graph's: the count itself, or an expression of it alone (a half).

    None where it is a number, or depends on other symbols.
    """
    value = tensor_of(node)
    tokens = None if value is None else tokens_of(value)
    if not isinstance(tokens, torch.SymInt):
        return None
    whole = sympy.Symbol("tokens", integer=True, positive=True)
    expression, counted_as = tokens.node.expr, count.node.expr
    if expression == counted_as:
        return int
    factor, symbol = counted_as.as_coeff_Mul()
    found = expression.subs(counted_as, whole)
    if found.free_symbols != {whole} and symbol.is_Symbol:
        found = expression.subs(symbol, whole / factor)
    if found.free_symbols != {whole}:
        return None
    return lambda tokens: int(sympy.floor(found.subs(whole, tokens)))


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


def tokens_at(captured: CapturedGraph, sites: Sequence[FoundSite], tokens: int) -> Mapping[int, TokenCounts]:
    """Token counts of the sites, by position, in a call in which the graph's count is `tokens`; of those that depend on
    it."""
    symbolic = symbolic_counts(captured, sites)
    found = {} if symbolic is None else symbolic.sites
    return {index: TokenCounts(of(tokens), of(tokens), of(tokens)) for index, of in found.items()}


def exchanged_rows(sites: Iterable[FoundSite]) -> list[tuple[int, str]]:
    """Elements of what sites exchange for one token, and their dtype: each pair once."""
    return sorted({_row_of(found) for found in sites if found.token_value is not None})


def _row_of(found: FoundSite) -> tuple[int, str]:
    """Elements of what the site exchanges for one token, and their dtype."""
    value = None if found.token_value is None else tensor_of(found.token_value)
    assert value is not None, f"{found.site.id} has no token count"
    return hint(value.shape[-1]), dtype_name(value)
