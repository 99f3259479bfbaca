"""Normalized rows that may alias the arena, where peers store them: no copy, and no memory of their own.

All sites of a group store rows into one region, each overwriting those of the site before. A peer writes once this
rank's partial result has come to it: after all that this rank's stream did before the site. So a value may stay there
if whatever reads it runs before every later site of its group. That must hold in any order that respects the data,
since Inductor chooses one, and so only GEMMs may read it: they run as one call where they stand, while an element-wise
op can end up inside a kernel far downstream, and so can a GEMM of very short rows, which Inductor makes one. A GEMM
that a later site takes in does not count: that site may write rows there while it still reads them. Opaque operations
of the graph are taken to run no site of the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.fx as fx
from torch._inductor import config as inductor_config

from weaveopt.graph.pattern import SHAPE_ONLY, is_call, tensor_of
from weaveopt.rewrites.reduction.sharding import plan_of
from weaveopt.rule import Chosen
from weaveopt.sites.reduction.matcher import Reduction

aten = torch.ops.aten
_ROWS: dict[object, int] = {aten.mm.default: 0, aten.addmm.default: 1}
"""GEMMs, and which of their arguments has the rows that are multiplied."""
_MASKED_WRITES = frozenset({aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default})
_CONSTANTS = frozenset({
    aten.lift_fresh_copy.default, aten.clone.default, aten.detach.default,
    aten.full.default, aten.scalar_tensor.default,
})  # fmt: skip
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
"""Tag of operations that no CUDA graph may hold; not every version of torch has it. Inductor's own test of a graph's
nodes includes operations that it lowers to element-wise work, such as the masked write of an embedding that is spread
over ranks."""
_SHORTEST_ROW = 64
"""Elements. Inductor (torch 2.13) may turn GEMMs of rows of up to 32 into element-wise work."""


def aliasing_values(chosen: Sequence[Chosen]) -> frozenset[fx.Node]:
    """The normalized rows that may alias the arena; `chosen`: all rewritten sites of one group, of any rule."""
    interiors = [each.proposal.consumes for each in chosen]
    wanted = [(index, value) for index, each in enumerate(chosen) if (value := _output(each)) is not None]
    if not wanted or may_be_split(wanted[0][1]):
        return frozenset()
    ahead = _sites_ahead(wanted[0][1].graph, interiors)
    reached = [_union(ahead[node] for node in interior) for interior in interiors]
    consumed = frozenset[fx.Node]().union(*interiors)
    every = (1 << len(interiors)) - 1
    found = set()
    for index, value in wanted:
        before = sum(1 << other for other, bits in enumerate(reached) if bits >> index & 1 and other != index)
        later = every & ~before & ~(1 << index)
        if all(
            _is_gemm(reader, node) and ahead[reader] & later == later and reader not in consumed
            for reader, node in _readers(value)
        ):
            found.add(value)
    return frozenset(found)


def aliasing_of_groups(chosen: Sequence[Chosen]) -> frozenset[fx.Node]:
    """The same for all rewritten sites of a graph: those of each group by themselves."""
    groups = dict.fromkeys(each.found.site.groups for each in chosen)
    return frozenset().union(
        *(aliasing_values([each for each in chosen if each.found.site.groups == group]) for group in groups)
    )


def _output(chosen: Chosen) -> fx.Node | None:
    """The normalized rows of a site whose kernel can have peers write them where they are read."""
    plan, structure = plan_of(chosen.proposal), chosen.found.structure
    if plan is None or not isinstance(structure, Reduction) or not plan.may_alias_arena:
        return None
    return None if structure.reduced.norm is None else structure.reduced.norm.output


def _sites_ahead(graph: fx.Graph, interiors: Sequence[frozenset[fx.Node]]) -> dict[fx.Node, int]:
    """For each node, a bit mask of the sites that cannot begin before it has run."""
    own: dict[fx.Node, int] = {}
    for index, interior in enumerate(interiors):
        for node in interior:
            own[node] = own.get(node, 0) | 1 << index
    ahead: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        ahead[node] = own.get(node, 0) | _union(ahead[user] for user in node.users)
    return ahead


def _union(bits: Iterator[int]) -> int:
    found = 0
    for each in bits:
        found |= each
    return found


def _readers(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Whatever reads the value's memory, and the view of it that is read."""
    for user in value.users:
        if is_call(user, SHAPE_ONLY):
            yield from _readers(user)
        else:
            yield user, value


def _is_gemm(reader: fx.Node, node: fx.Node) -> bool:
    rows = _ROWS.get(reader.target) if reader.op == "call_function" else None
    read = [index for index, argument in enumerate(reader.args) if argument is node]
    value = tensor_of(node)
    if rows is None or reader.kwargs or read != [rows] or value is None:
        return False
    length = value.shape[-1]
    return isinstance(length, int) and length >= _SHORTEST_ROW


def is_read_in_place(value: fx.Node) -> bool:
    """True if the normalized rows of a site may alias the arena, as far as one site can say: their readers are GEMMs,
    and the graph is not split."""
    return all(_is_gemm(reader, node) for reader, node in _readers(value)) and not may_be_split(value)


_Asked = tuple[int, str | None, frozenset[str], bool]
_known: weakref.WeakKeyDictionary[fx.Graph, tuple[_Asked, bool]] = weakref.WeakKeyDictionary()
"""Answers of `may_be_split`, which every site of a graph asks for."""


def may_be_split(value: fx.Node) -> bool:
    """True if Inductor may make more than one CUDA graph of the value's graph.

    A value passed from one of them to the next has to reside in the memory of CUDA graphs, which the arena does not.
    A call in flight cannot cross from one into the next either.
    """
    tensor, graph = tensor_of(value), value.graph
    device = None if tensor is None else tensor.device.type
    at = frozenset(getattr(inductor_config, "custom_should_partition_ops", []))
    asked = len(graph.nodes), device, at, _keeps_constants()
    known = _known.get(graph)
    if known is None or known[0] != asked:
        known = _known[graph] = asked, _splits(graph, device, at)
    return known[1]


def _splits(graph: fx.Graph, device: str | None, asked: frozenset[str]) -> bool:
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if any(_target_splits(target, asked) for target in {node.target for node in nodes}):
        return True
    return any(_value_splits(node, device) for node in nodes)


def _target_splits(target: object, asked: frozenset[str]) -> bool:
    """True if Inductor splits a graph at every call of an operator."""
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    name = target.name()
    return name in asked or f"{name}.{target._overloadname}" in asked or _UNSAFE in target.tags


def _value_splits(node: fx.Node, device: str | None) -> bool:
    """True if Inductor splits a graph at a node for its inputs or outputs: another device, or sizes that are known
    late."""
    if node.meta.get("unbacked_bindings") or _looks_for_true(node):
        return True
    values = (tensor_of(each) for each in _seen(node) if not _is_constant(each))
    return any(value is not None and value.device.type != device for value in values)


def _keeps_constants() -> bool:
    return bool(getattr(inductor_config, "always_keep_tensor_constants", False))


def _is_constant(node: fx.Node) -> bool:
    """True for a single number that the graph holds, on whatever device: Inductor writes it into the kernels that read
    it, unless it is asked to keep constants as tensors. So `x[mask] = 0.0` reads one of the CPU, as in embeddings whose
    rows are spread over ranks."""
    value = tensor_of(node)
    if value is None or value.dim() != 0 or _keeps_constants():
        return False
    return node.op == "get_attr" or (is_call(node, _CONSTANTS) and all(map(_is_constant, node.all_input_nodes)))


def _looks_for_true(node: fx.Node) -> bool:
    """True if a masked write becomes a library kernel that counts the true values, which no CUDA graph supports.

    One value at all places of one mask is element-wise work.
    """
    if not is_call(node, _MASKED_WRITES):
        return False
    arguments = dict(zip(("x", "indices", "values"), node.args, strict=False)) | node.kwargs
    indices, value = arguments["indices"], tensor_of(arguments["values"])  # type: ignore[arg-type]
    assert isinstance(indices, list | tuple), f"{node.name} has no list of indices"
    masks = [mask for each in indices if isinstance(each, fx.Node) and (mask := tensor_of(each)) is not None]
    is_fill = len(indices) == 1 and value is not None and value.numel() == 1
    return not is_fill and any(mask.dtype in (torch.bool, torch.uint8) for mask in masks)


def _seen(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    # What it reads was looked at where it was made, unless that is no call.
    yield from (each for each in node.all_input_nodes if each.op != "call_function")
