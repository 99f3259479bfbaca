"""Mixtures of experts in parts: each part's tokens are routed by themselves.

Sorting, histogram and grouped GEMMs of a mixture live in rows of `tokens * choices`, and nothing in them is local to a
token. But a mixture computes each token by itself, so a found site is a block: its nodes are copied once for each part,
with `tokens` and its multiples replaced, and each copy is a mixture again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.fx as fx

from weaveopt.rewrites.token_split.builder import Builder
from weaveopt.rewrites.token_split.copies import AxisRange, Copied, Copier, NotCopied
from weaveopt.rewrites.token_split.slices import Slices
from weaveopt.rewrites.token_split.values import Cut, Mark, Parts, Value, simplified
from weaveopt.sites.mixture.experts import Experts

TOKENS = "tokens"


def mixture_parts(
    builder: Builder, slices: Slices, cut: Cut, value_of: Callable[[fx.Node], Value],
    whole: Callable[[fx.Node], fx.Node], experts: Experts,
) -> Parts:  # fmt: skip
    """The output of a mixture in parts. Raises `NotCopied` where its tokens are whole, or a size does not follow."""
    rows = value_of(experts.x)
    if not isinstance(rows, Parts) or rows.mark.dim != 0:
        raise NotCopied(experts.x, "tokens are not in parts")
    factor = simplified(rows.mark.before * rows.mark.after)
    tokens = simplified(factor * cut.length)
    nodes = []
    for index, own in enumerate(rows.nodes):
        size = simplified(factor * cut.part(index))
        span = AxisRange(tokens, 0, size)
        copier = Copier(builder, slices, {TOKENS: span}, {TOKENS: (1, experts.num_choices)})
        known: dict[fx.Node, Copied] = {experts.x: Copied(own, {TOKENS: Mark(0)})}
        nodes.append(_copied(experts, index, copier, known, value_of, whole, rows.mark).node)
    return Parts(tuple(nodes), rows.mark)


def _copied(
    experts: Experts, index: int, copier: Copier, known: dict[fx.Node, Copied], value_of: Callable[[fx.Node], Value],
    whole: Callable[[fx.Node], fx.Node], mark: Mark,
) -> Copied:  # fmt: skip
    def read(node: fx.Node) -> Copied:
        if node not in known:
            value = None if node in experts.nodes else value_of(node)
            if value is None:
                known[node] = copier.copy(node, read)
            elif isinstance(value, Parts):
                if value.mark.dim != 0 or value.mark.before != mark.before:
                    raise NotCopied(node, "an operand has its tokens in another place")
                choices = _choices_after(value.mark, mark)
                known[node] = Copied(value.nodes[index], {TOKENS: Mark(0, after=choices)})
            else:
                known[node] = Copied(whole(node))
        return known[node]

    return read(experts.output)


def _choices_after(mark: Mark, rows: Mark) -> int:
    """Choices of a token that follow one another in the dimension of an operand."""
    assert isinstance(mark.after, int) or mark.after == rows.after, mark
    if mark.after == rows.after:
        return 1
    assert isinstance(mark.after, int) and isinstance(rows.after, int), mark
    return mark.after // rows.after
