"""Which forms of a site the operation computes, and why it does not compute the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.cost_model import Gemm as GemmSizes
from weaveopt.graph.arrangement import Arrangement, merged
from weaveopt.graph.moves import Moves
from weaveopt.graph.pattern import CAST, is_call, tensor_of
from weaveopt.graph.sizes import SizeAt, find_shape, find_size, inputs_of
from weaveopt.ops.gemm_comm.all_gather.prices import AllGatherGemmWork
from weaveopt.records.candidate import Rejection
from weaveopt.records.site import TokenCounts
from weaveopt.sites.sequence.gather_consumers import Gathered
from weaveopt.sites.sequence.gather_matcher import GatherFacts
from weaveopt.sites.sequence.rows import gathered
from weaveopt.sites.shared.epilogue import WAIT
from weaveopt.sites.shared.linear import MatchedGemm

RULE = "all_gather_gemm"


@dataclass(frozen=True)
class Whole:
    """A node that holds the gathered rows in their order, under any view, and is read by what stays."""

    node: fx.Node
    shape: tuple[int | SizeAt, ...]


@dataclass(frozen=True)
class AllGatherGemmMatch:
    """The part of a site that the operation computes."""

    gemms: tuple[MatchedGemm, ...]
    outer: int | SizeAt
    wholes: tuple[Whole, ...]
    """Values that the operation's gathered rows replace."""
    consumes: frozenset[fx.Node]


def form_of(facts: GatherFacts, structure: Gathered, world: int) -> AllGatherGemmMatch | tuple[Rejection, ...]:
    """Reasons that no fabric or parameter changes; all that hold are listed."""
    sources = [*inputs_of(structure.shard.graph), structure.shard]
    outer = find_size(structure.rows.outer, sources)
    reasons = list(_against(facts, structure))
    if outer is None:
        message = "the number of sequences is a symbol that no input of the graph holds"
        reasons.append(Rejection("size_not_known", message, (("outer", str(structure.rows.outer)),)))
    wholes: dict[fx.Node, Whole] = {}
    stay: set[fx.Node] = set()
    for node in structure.kept:
        found = _rows_in_order(node, structure, world)
        if isinstance(found, Rejection):
            reasons.append(found)
            continue
        anchor, between = found
        stay.update(between)
        shape = find_shape(anchor, sources)
        if shape is None:
            message = "sizes of the gathered value are symbols that no input of the graph holds"
            reasons.append(Rejection("size_not_known", message, (("node", anchor.name),)))
        else:
            wholes[anchor] = Whole(anchor, shape)
    if reasons:
        return tuple(reasons)
    assert outer is not None
    return AllGatherGemmMatch(structure.gemms, outer, tuple(wholes.values()), structure.nodes - stay)


def _rows_in_order(node: fx.Node, structure: Gathered, world: int) -> tuple[fx.Node, frozenset[fx.Node]] | Rejection:
    """The nearest node between the gather and `node` that is the rows in their order; and the nodes downstream of it,
    which stay."""
    value = tensor_of(structure.shard)
    assert value is not None, f"{structure.shard.name} is no tensor"
    waits = [each for each in structure.nodes if each.target in WAIT]
    moves = Moves(dict.fromkeys(waits, gathered(value.shape, world)))
    operand = moves.arrangement(structure.gemms[0].a)
    assert isinstance(operand, Arrangement), f"{structure.gemms[0].a.name} is no gathered value"
    in_order = _flat(operand)
    stay: set[fx.Node] = set()
    here = node
    while True:
        arrangement = moves.arrangement(here) if here not in structure.gathers else None
        is_whole = isinstance(arrangement, Arrangement) and not arrangement.picked and _flat(arrangement) == in_order
        if is_whole and not _is_cast(here, structure):
            return here, frozenset(stay)
        stay.add(here)
        sources = here.all_input_nodes
        if here in structure.gathers or here in waits or len(sources) != 1:
            values = (("node", node.name),)
            message = "what else is read of the gathered value is not in the order of the GEMM's rows"
            return Rejection("order_not_supported", message, values)
        [here] = sources


def _flat(arrangement: Arrangement) -> object:
    return merged(tuple(factor for dim in arrangement.dims for factor in dim))


def _is_cast(node: fx.Node, structure: Gathered) -> bool:
    """True if the node's dtype differs from that of the gathered shard."""
    value, shard = tensor_of(node), tensor_of(structure.shard)
    return is_call(node, CAST) or value is None or shard is None or value.dtype != shard.dtype


def _against(facts: GatherFacts, structure: Gathered) -> Iterator[Rejection]:
    if facts.is_scaled:
        yield Rejection("gemm_not_supported", "the operation multiplies no FP8 operands with scales of their own")
    if facts.dtype != facts.gemm_dtype:
        values = (("travels", facts.dtype), ("gemm", facts.gemm_dtype))
        yield Rejection("dtype_changes", "the gathered value is cast in front of the GEMMs", values)
    if any(gemm.has_factors for gemm in structure.gemms):
        yield Rejection("gemm_not_supported", "a GEMM scales what it adds (alpha, beta)")
    products = {gemm.node for gemm in structure.gemms}
    operands = [each for gemm in structure.gemms for each in (gemm.b, gemm.bias, gemm.addend) if each is not None]
    late = next((each for each in operands if _is_downstream(each, products.union(structure.gathers))), None)
    if late is not None:
        message = "a GEMM's operand is computed from the gathered rows, or from the result of another GEMM of the site"
        yield Rejection("operand_not_ready", message, (("node", late.name),))


def _is_downstream(node: fx.Node, sources: set[fx.Node]) -> bool:
    first = min(sources)
    seen, pending = {node}, [node]
    while pending:
        each = pending.pop()
        if each in sources:
            return True
        # Nothing that stands before all of them is made of one.
        new = [operand for operand in each.all_input_nodes if operand not in seen and not operand < first]
        seen.update(new)
        pending.extend(new)
    return False


def work_of(facts: GatherFacts, widths: Sequence[int], tokens: TokenCounts) -> AllGatherGemmWork:
    """`widths`: columns of every GEMM."""
    gemms = tuple(GemmSizes(tokens.hint, facts.k, width) for width in widths)
    return AllGatherGemmWork(tokens.hint, facts.k, gemms, facts.dtype, facts.world, facts.hosts, facts.gathered_is_read)


def form_refused(facts: GatherFacts, form: AllGatherGemmMatch) -> tuple[Rejection, ...]:
    """Rejections for what the kernel does not support at a site, whatever its sizes."""
    reasons: list[Rejection] = []
    if not form.gemms:
        reasons.append(Rejection("no_gemm", "there is no GEMM that could begin"))
    if any(gemm.addend is not None for gemm in form.gemms):
        reasons.append(Rejection("addend_not_supported", "the kernel adds a bias, and no rows, to what its GEMM makes"))
    if form.outer != 1:
        values = (("outer", facts.outer),)
        reasons.append(
            Rejection("blocks_not_supported", "the kernel supports shards whose rows are contiguous", values)
        )
    if any(gemm.transposed_b is None for gemm in form.gemms):
        reasons.append(Rejection("weight_layout", "the kernel reads weights that are stored [n, hidden]"))
    return tuple(reasons)
