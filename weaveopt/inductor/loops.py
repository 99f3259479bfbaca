"""Objects of Inductor's lowering: stored and inlined values, views of them, loop nests, and kinds of operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
import torch.fx as fx

from weaveopt.graph.values import Layout, argument, tensors_of
from weaveopt.inductor.calls import name_of

REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "amin", "max", "min", "any", "all", "prod", "var", "var_mean", "std", "std_mean"}
    | {"argmax", "argmin", "norm", "linalg_vector_norm", "logsumexp", "_softmax", "_log_softmax", "native_layer_norm"}
)
ALIASES = frozenset({"wait_tensor", "_unsafe_view", "reshape", "contiguous", "lift_fresh_copy"})
GATHERS = frozenset({"embedding", "index", "_unsafe_index", "gather", "index_select", "take_along_dim"})
SCATTERS = frozenset(
    {"index_put", "_unsafe_index_put", "index_copy", "index_add", "index_fill", "scatter", "scatter_add"}
    | {"slice_scatter", "select_scatter", "masked_scatter"}
)
IN_LOOPS = frozenset({"slice_scatter", "select_scatter"})
"""Scatters that become a choice between two values, unless the base is overwritten."""
HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})

# Inductor's own limits (torch 2.13): beyond them a value is stored and no longer inlined.
MAX_READS_OF_REUSED = 4
MAX_OPS = {"cpu": 50, "cuda": 30}
MAX_READS = {"cpu": 12, "cuda": 8}
UNROLLED = 8
"""A reduction over fewer elements is written out as point-wise operations."""

Reads = dict[tuple[int, object], int]
"""(number of a stored value, which of its elements) -> bytes."""


@dataclass
class Value:
    """Result of a node: stored (`reads` empty), or still inlined, with the reads and operations of its loops."""

    number: int
    num_bytes: int
    elements: int
    node: fx.Node
    stored: bool
    reads: Reads = field(default_factory=dict)
    num_ops: int = 0
    heavy: bool = False
    reduced: int = 1
    """Elements that each result is reduced from."""


@dataclass(frozen=True)
class View:
    """Elements of a value, as a node sees them."""

    value: Value
    layout: Layout | None
    """Layout of the elements; None: all of them, as they are stored."""
    num_bytes: int
    """Bytes of the distinct elements."""


@dataclass(frozen=True)
class LoweredStep:
    """One loop nest (`call` None) or one call of a library's kernel, in the order of lowering."""

    node: fx.Node
    """Node that is computed, or the call."""
    reads: Reads
    writes: tuple[int, ...]
    written_bytes: int
    elements: int
    """Results; each reduced from `reduced` elements."""
    reduced: int
    call: bool
    scattered: bool = False
    """Written wherever an index says: joined with nothing."""
    rows: tuple[int, ...] = ()
    """Sizes of the loops over the results, outermost first; one for all dimensions where elements are read in their
    order."""


@cache
def is_alias(target: object) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target.is_view or name_of(target)[1] in ALIASES
    return getattr(target, "__name__", "") == "getitem"


def is_masked(node: fx.Node) -> bool:
    """`x[mask] = number`: a choice between two values for each element."""
    if name_of(node.target)[1] not in ("index_put", "_unsafe_index_put"):
        return False
    indices = argument(node, "indices")
    return isinstance(indices, list | tuple) and any(
        isinstance(each, fx.Node) and any(value.dtype == torch.bool for value in tensors_of(each)) for each in indices
    )


def is_written_back(node: fx.Node) -> bool:
    return any(name_of(user.target)[1] == "copy_" and user.args[1] is node for user in node.users)


def dies_in(base: fx.Node, node: fx.Node) -> bool:
    """True if `base` has no reader after `node` other than the copy of the result into it."""
    return all(
        user is node or user < node or (name_of(user.target)[1] == "copy_" and user.args[0] is base)
        for user in base.users
    )
