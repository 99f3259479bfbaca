"""Rows of a GEMM that are sharded over ranks: [outer, world, inner].

Rank r stores rows [outer, r, inner]. `outer` is 1 if whole activations are split along their rows, the batch size if
each sequence is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.fx as fx

from weaveopt.fabrics.topology import Topology
from weaveopt.graph.arrangement import Arrangement, Dim, Factor, Size, merged, quotient, size_of, taken
from weaveopt.graph.facts import group_of, is_empty
from weaveopt.graph.pattern import tensor_of
from weaveopt.records.candidate import NO_TOKENS, Rejection


@dataclass(frozen=True)
class Rows:
    """Distribution of rows (or columns) over ranks."""

    dim: int
    """0: whole activations are cut along their rows; 1: each of `outer` sequences is; -1: columns are."""
    outer: Size
    inner: Size
    """Rows of one rank in one sequence, or its columns."""


RANK = 0
"""Dimension of a gathered value's source that is the rank; the other one counts the elements of a rank's shard."""
SHARD = 1


def scattered_rows(partial: Arrangement, world: int, shape: Sequence[int | torch.SymInt]) -> Rows | Rejection:
    """Locate the ranks' rows in a GEMM's result [m, n] (`shape`) that a reduce-scatter reads as `partial` and splits
    along its first dimension.

    Returns a rejection if the shard's elements are not [outer, inner, n] or [m, inner] in this order.
    """
    parts = taken(merged(partial.dims[0]), world) if partial.dims else None
    if parts is None or partial.picked:
        values = (("world", world), ("layout", text(partial)))
        return Rejection("uneven_shards", "what is scattered does not divide by the ranks", values)
    lead, rest = parts
    result = merged((*rest, *(factor for dim in partial.dims[1:] for factor in dim)))
    whole = Arrangement.of(shape)
    if len(lead) == 1:
        for dim in (0, 1):
            without = [_without(each, lead[0]) if at == dim else each for at, each in enumerate(whole.dims)]
            expected = None if None in without else merged(tuple(f for each in without for f in each or ()))
            if lead[0].dim == dim and result == expected:
                outer = quotient(_size(whole.dims[dim]), lead[0].step * world)
                assert outer is not None, f"{lead[0]} is no digit of {whole.dims[dim]}"
                if dim == 0:
                    return Rows(0 if outer == 1 else 1, outer, lead[0].step)
                if outer == 1:
                    return Rows(-1, 1, lead[0].step)
    values = (("world", world), ("layout", text(partial)))
    return Rejection("scatter_dim_not_supported", "a rank's shard is no block of rows or columns of the GEMM", values)


def gathered(shard: Sequence[int | torch.SymInt], world: int) -> Arrangement:
    """A gathered value [world * s0, s1, ...] by rank and place in a rank's shard [s0, s1, ...]."""
    dims: list[Dim] = []
    step: Size = 1
    for size in reversed([size_of(each) for each in shard]):
        dims.insert(0, () if size == 1 else (Factor(SHARD, step, size),))
        step = step * size
    return Arrangement(((Factor(RANK, 1, world), *dims[0]), *dims[1:]))


def gathered_rows(rows: Dim, columns: Dim, world: int) -> Rows | None:
    """Locate the ranks' rows in a GEMM's operand [rows, columns] made of gathered shards; None unless [outer, world,
    inner].

    The elements of one rank have to be in that rank's own order.
    """
    rank = Factor(RANK, 1, world)
    if rank not in rows:
        return None
    at = rows.index(rank)
    outer, inner = rows[:at], rows[at + 1 :]
    own = merged((*outer, *inner, *columns))
    in_order = all(factor.dim == SHARD for factor in own) and len(own) <= 1 and all(factor.step == 1 for factor in own)
    if not in_order:
        return None
    size = _size(outer)
    return Rows(0 if size == 1 else 1, size, _size(inner))


def text(arrangement: Arrangement) -> str:
    """The dimensions as sizes and steps of digits, for reasons: `[(2:8@0 4:16@0), (8:1@0)]`."""
    dims = (" ".join(f"{f.size}:{f.step}@{f.dim}" for f in merged(dim)) for dim in arrangement.dims)
    return "[" + ", ".join(f"({dim})" for dim in dims) + "]"


def _without(dim: Dim, digit: Factor) -> Dim | None:
    """The digits of a whole dimension but for `digit`, which counts `step` elements; None where it is none of them."""
    parts = taken(dim, s) if (s := quotient(_size(dim), digit.step * digit.size)) is not None else None
    if parts is None:
        return None
    outer, rest = parts
    middle = taken(rest, digit.size)
    return None if middle is None or middle[0] != (digit,) else (*outer, *middle[1])


def _size(dim: Dim) -> Size:
    return prod(factor.size for factor in dim)


def hint_of(size: Size, like: torch.Tensor) -> int:
    """A size as a number in this call, without a guard on it; its symbols are among those of `like`."""
    if isinstance(size, int):
        return size
    sizes: list[int | torch.SymInt] = list(like.shape)
    shape_env = next(each.node.shape_env for each in sizes if isinstance(each, torch.SymInt))
    return int(size.xreplace(shape_env.backed_var_to_val))


def against_group(collective: fx.Node, world: int, topology: Topology | None) -> tuple[Rejection, ...]:
    """Return the reasons against any rewrite of a collective in its process group."""
    group = group_of(collective)
    if topology is None:
        return (Rejection("group_not_known", "the process group is not known in this process", (("group", group),)),)
    sizes = (("group_size", world), ("world", topology.world))
    if world != topology.world:
        return (Rejection("group_not_known", "the collective names another number of ranks than its group has", sizes),)
    if world < 2:
        return (Rejection("one_rank", "the group has one rank: nothing travels", sizes),)
    value = tensor_of(collective)
    return (NO_TOKENS,) if value is not None and is_empty(value) else ()


def against_row_size(rows: torch.Tensor) -> tuple[Rejection, ...]:
    """Return the reason against rows of a symbolic size: an operation is planned for one size of them."""
    sizes: list[int | torch.SymInt] = list(rows.shape)
    size = sizes[-1]
    if isinstance(size, int):
        return ()
    return (Rejection("shape_not_known", "a site needs rows of a static size", (("size", str(size)),)),)
