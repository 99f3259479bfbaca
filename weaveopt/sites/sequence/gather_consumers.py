"""Consumers of a gathered value: GEMMs by rows, GEMMs that contract over the gathered dimension, and others.

    whole = all_gather(shard)                   # several gathers of one shard hold the same
    q, k, v = whole @ wq, whole @ wk, whole @ wv
    grad = whole.T @ x                          # contracts over what was gathered: the whole value is needed

The walk goes forward over every movement of elements and every cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Arrangement, merged
from weaveopt.graph.moves import BITS, MOVES, OTHER_MOVES, Moves
from weaveopt.graph.pattern import describe, is_call, tensor_of
from weaveopt.records.candidate import Rejection
from weaveopt.sites.sequence.rows import RANK, Rows, gathered, gathered_rows, text
from weaveopt.sites.shared.epilogue import WAIT
from weaveopt.sites.shared.linear import MatchedGemm, gemm_at, is_input, leads_to_gemm, may_be_weight


@dataclass(frozen=True)
class Gathered:
    """The nodes of a site by their role."""

    gathers: tuple[fx.Node, ...]
    """All-gathers of one shard."""
    shard: fx.Node
    rows: Rows
    gemms: tuple[MatchedGemm, ...]
    """GEMMs that read the gathered rows as `a`, in one dtype; of several dtypes or orders, those with the most
    columns."""
    contractions: tuple[MatchedGemm, ...]
    """GEMMs that contract over the gathered dimension: gradients of weights."""
    kept: tuple[fx.Node, ...]
    """Nodes among `nodes` with other consumers: their values have to be kept."""
    nodes: frozenset[fx.Node]
    """The gathers, what leads from them to `gemms`, and these."""


class _Role(Enum):
    ROWS = auto()
    CONTRACTION = auto()
    COLUMNS = auto()
    OTHER = auto()


@dataclass
class _Readers:
    """Consumers found by a walk from the gathers."""

    gemms: dict[tuple[Rows, torch.dtype | None], list[tuple[MatchedGemm, fx.Node]]] = field(default_factory=dict)
    """GEMMs with their operands, by the order of their rows and the dtype that they read."""
    contractions: list[MatchedGemm] = field(default_factory=list)
    columns: list[MatchedGemm] = field(default_factory=list)
    is_contracted_as_first: bool = False
    """True if a GEMM contracts over the gathered dimension of its first operand, which no weight has."""
    reasons: dict[Rejection, None] = field(default_factory=dict)


def gathered_at(gathers: Sequence[fx.Node], world: int) -> Gathered | tuple[Rejection, ...]:
    """The site of all-gathers of one shard; without reasons where no GEMM reads it at all: then it is none."""
    shard = gathers[0].args[0]
    assert isinstance(shard, fx.Node), gathers[0].args
    value = tensor_of(shard)
    assert value is not None, f"{shard.name} is no tensor"
    waits = [user for gather in gathers for user in gather.users if is_call(user, WAIT)]
    moves = Moves(dict.fromkeys(waits, gathered(value.shape, world)))
    readers = _Readers()
    for wait in waits:
        _read(wait, moves, world, readers)
    against = _against_parameters(shard, readers)
    if against is not None:
        return (against,)
    if not readers.gemms:
        return tuple(readers.reasons)
    (rows, _), chosen = max(readers.gemms.items(), key=lambda item: sum(gemm.sizes[1] for gemm, _ in item[1]))
    chosen.sort(key=lambda pair: pair[0].node)
    products = {gemm.node for gemm, _ in chosen}
    nodes = {*gathers, *waits, *products}
    pending = [operand for _, operand in chosen]
    while pending:
        node = pending.pop()
        if node not in nodes and moves.known.get(node) is not None:
            nodes.add(node)
            pending.extend(node.all_input_nodes)
    kept = [node for node in nodes - products if any(user not in nodes for user in node.users)]
    return Gathered(
        tuple(gathers),
        shard,
        rows,
        tuple(gemm for gemm, _ in chosen),
        tuple(readers.contractions),
        tuple(sorted(kept)),
        frozenset(nodes),
    )


def _read(node: fx.Node, moves: Moves, world: int, readers: _Readers, seen: set[fx.Node] | None = None) -> None:
    """Collect the consumers of `node` and of values moved from it, in graph order."""
    seen = set() if seen is None else seen
    pending = [node]
    while pending:
        here = pending.pop(0)
        for user in sorted(here.users):
            if is_call(user, MOVES | OTHER_MOVES):
                moved = moves.of(user)
                if isinstance(moved, Rejection) or moved is None:
                    if isinstance(moved, Rejection) and leads_to_gemm(user):
                        readers.reasons[moved] = None
                elif user not in seen:
                    seen.add(user)
                    pending.append(user)
                continue
            gemm = gemm_at(user)
            arrangement = moves.known[here]
            if gemm is not None and isinstance(arrangement, Arrangement):
                _multiply(gemm, here, arrangement, world, readers)


def _multiply(gemm: MatchedGemm, operand: fx.Node, arrangement: Arrangement, world: int, readers: _Readers) -> None:
    role = _role(gemm, operand, arrangement)
    where = (("node", gemm.node.name), ("layout", text(arrangement)))
    if role is _Role.ROWS:
        rows = gathered_rows(merged(arrangement.dims[0]), merged(arrangement.dims[1]), world)
        if rows is not None and not arrangement.picked:
            readers.gemms.setdefault((rows, _dtype(operand)), []).append((gemm, operand))
            return
        message = "the GEMM's rows are not those of the ranks' shards in their order"
        reason = Rejection("layout_not_supported", message, where)
    elif role is _Role.CONTRACTION:
        readers.contractions.append(gemm)
        readers.is_contracted_as_first |= operand is gemm.a
        message = "GEMMs contract over the gathered dimension: no part of a result can be made of one shard"
        reason = Rejection("gather_dim_not_supported", message, where)
    elif role is _Role.COLUMNS:
        readers.columns.append(gemm)
        message = "the gathered value is the second operand: it makes columns, not rows"
        reason = Rejection("gathers_columns", message, where)
    else:
        reason = Rejection("layout_not_supported", "a GEMM reads a part of the gathered value, or adds it", where)
    readers.reasons[reason] = None


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = tensor_of(node)
    return None if value is None else value.dtype


def _role(gemm: MatchedGemm, operand: fx.Node, arrangement: Arrangement) -> _Role:
    """Return the role of the gathered dimension in a GEMM: rows, contraction or columns."""
    if len(arrangement.dims) != 2 or operand not in (gemm.a, gemm.b):
        return _Role.OTHER
    here = [any(factor.dim == RANK for factor in dim) for dim in arrangement.dims]
    if here[0] == here[1]:
        return _Role.OTHER
    if operand is gemm.a and operand is not gemm.b:
        return _Role.ROWS if here[0] else _Role.CONTRACTION
    if operand is gemm.b and operand is not gemm.a:
        return _Role.CONTRACTION if here[0] else _Role.COLUMNS
    return _Role.OTHER


def _against_parameters(shard: fx.Node, readers: _Readers) -> Rejection | None:
    """A gathered parameter is the second operand of every GEMM, or the first one where the second is no weight."""
    by_rows = [gemm for group in readers.gemms.values() for gemm, _ in group]
    every = [*by_rows, *readers.contractions, *readers.columns]
    if not is_input(shard) or readers.is_contracted_as_first or not (every or readers.reasons):
        return None
    if any(may_be_weight(gemm.b) for gemm in by_rows):
        return None
    source = shard
    while source.op not in ("placeholder", "get_attr") and source.all_input_nodes:
        source = source.all_input_nodes[0]
    read_by = ", ".join(sorted({gemm.node.name for gemm in every})) or "views"
    message = "what is gathered is an input of the graph that GEMMs read as their weight"
    return Rejection("gathers_parameter", message, (("input", source.name), ("read_by", read_by)))


def travelling(gathered: Gathered) -> fx.Node:
    """Return the value whose dtype is communicated: the shard, or the dtype view after the gather."""
    node = gathered.gathers[0]
    value, operand = tensor_of(node), tensor_of(gathered.gemms[0].a)
    assert value is not None and operand is not None, f"{describe(node)} makes no tensor"
    viewed = any(is_call(each, BITS) for each in gathered.nodes)
    return gathered.gemms[0].a if viewed and value.dtype.itemsize == operand.dtype.itemsize else node
