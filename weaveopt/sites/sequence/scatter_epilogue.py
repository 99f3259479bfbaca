"""Surroundings of a reduce-scatter of GEMMs: from the GEMMs to the shard, and to the norm that may end the site.

wait(reduce_scatter(partial)) [* scale] [-> narrower dtype] [+ reduce_scatter(...)] [+ bias] [+ residual] [-> norm]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.graph.facts import DTYPE_NAMES
from weaveopt.graph.pattern import CAST, MUL, SHAPE_ONLY, describe, is_call, tensor_of
from weaveopt.graph.scalars import casts_of, number_of
from weaveopt.graph.values import hint
from weaveopt.records.candidate import Rejection
from weaveopt.sites.sequence.scatter_producer import DIV, Partial, partial_at, read_by_others
from weaveopt.sites.shared.epilogue import WAIT, Reduced, follow
from weaveopt.sites.shared.norms import Norm


@dataclass(frozen=True)
class Scattered:
    """The nodes of a site by their role."""

    collectives: tuple[fx.Node, ...]
    partials: tuple[Partial, ...]
    """Partial result that each collective reduces."""
    shard: fx.Node
    """The result as the graph reads it: `wait`, after a scale and a cast; its elements are [outer * inner, n]."""
    scales: tuple[float, ...]
    """Factors of the shard after the wait."""
    scalars: tuple[fx.Node | float | int, ...]
    """Factors of `scales`: numbers, or Python floats that were lifted to tensors."""
    after: Reduced | None
    """Epilogue of the shard, its norm included; None if consumers read the shard as it is."""
    saved: tuple[fx.Node, ...]
    """Values before the last sum of the site that are results of the graph too: a backward pass reads them."""
    nodes: frozenset[fx.Node]

    @property
    def scale(self) -> float:
        """Product of all factors of the sum."""
        return self.partials[0].scale * math.prod(self.scales)


@dataclass(frozen=True)
class _Behind:
    """Views, scales and a cast that follow the wait."""

    nodes: tuple[fx.Node, ...] = ()
    scales: tuple[float, ...] = ()
    scalars: tuple[fx.Node | float | int, ...] = ()


def partial_of(collective: fx.Node) -> Partial | Rejection | None:
    """Read the GEMMs that `collective` reduces, if it is their only consumer; None if no GEMM makes its input."""
    value = collective.args[0]
    assert isinstance(value, fx.Node), collective.args
    found = partial_at(value)
    return (read_by_others(found, collective) or found) if isinstance(found, Partial) else found


def scattered_at(collective: fx.Node, partial: Partial, norms: Mapping[fx.Node, list[Norm]]) -> Scattered | Rejection:
    """The site of `collective`, which sums `partial`."""
    if collective.args[1] not in ("sum", "avg"):
        values = (("reduce_op", str(collective.args[1])),)
        return Rejection("not_a_sum", "only sums and means are reduced in a fused kernel", values)
    waits = [user for user in collective.users if is_call(user, WAIT)]
    others = [user for user in collective.users if user not in waits]
    if len(waits) != 1 or any(other.op != "output" for other in others):
        readers = ", ".join(sorted({describe(user) for user in collective.users}))
        return Rejection("read_by_others", "the collective is not waited for exactly once", (("read_by", readers),))
    after_wait = _after_wait(waits[0])
    shard = after_wait.nodes[-1] if after_wait.nodes else waits[0]
    nodes = frozenset({*partial.nodes, collective, waits[0], *after_wait.nodes})
    alone = Scattered((collective,), (partial,), shard, after_wait.scales, after_wait.scalars, None, (), nodes)
    value = tensor_of(shard)
    if value is None or hint(value.shape[-1]) != partial.gemms[0].sizes[1]:
        return alone
    after = follow(collective, norms, after_wait.nodes, may_be_saved=True)
    if not isinstance(after, Reduced):  # the collective itself is saved for the backward pass: the plain shard
        return alone
    results = {node for node in after.passed if any(user.op == "output" for user in node.users)} - {after.total}
    if after.post is not None and results:
        return alone
    partials = [partial]
    for each in after.collectives[1:]:
        other = partial_of(each)
        alike = isinstance(other, Partial) and _meaning(other) == _meaning(partial)
        computed = any(not is_call(node, SHAPE_ONLY) for node in after_wait.nodes)
        if not isinstance(other, Partial) or not alike or computed or results:
            return alone  # two sums that cannot be merged: each is a site, and ends at their addition
        partials.append(other)
    nodes = nodes.union(after.passed, *(each.nodes for each in partials))
    nodes |= _norm_nodes(after, nodes)
    saved = tuple(sorted(results))
    return Scattered(
        after.collectives, tuple(partials), shard, after_wait.scales, after_wait.scalars, after, saved, nodes
    )


def _meaning(partial: Partial) -> tuple[object, ...]:
    return partial.arrangement, partial.scale, partial.gemms[0].sizes[:2]


def _after_wait(wait: fx.Node) -> _Behind:
    """Follow the scales and casts after the wait; views after the last one belong to the nodes that follow."""
    passed: list[fx.Node] = []
    scales: list[float] = []
    scalars: list[fx.Node | float | int] = []
    kept, node = 0, wait
    while len(node.users) == 1:
        reader = next(iter(node.users))
        scalar = _scalar_of(reader, node)
        if scalar is not None:
            number = number_of(scalar)
            assert number, f"{reader.name} scales by {scalar}"
            scales.append(number if is_call(reader, MUL) else 1.0 / number)
            scalars.append(scalar)
        elif not is_call(reader, SHAPE_ONLY) and not _narrows(reader, node):
            break
        passed.append(reader)
        kept = kept if is_call(reader, SHAPE_ONLY) else len(passed)
        node = reader
    return _Behind(tuple(passed[:kept]), tuple(scales), tuple(scalars))


def _scalar_of(reader: fx.Node, node: fx.Node) -> fx.Node | float | int | None:
    """Return the number by which `reader` multiplies or divides `node`; None if it does neither."""
    if not is_call(reader, MUL | DIV) or reader.kwargs:
        return None
    others = [each for each in reader.args[:2] if each is not node]
    if len(others) != 1 or not isinstance(others[0], fx.Node | float | int) or not number_of(others[0]):
        return None
    return others[0] if reader.args[0] is node or is_call(reader, MUL) else None


def _narrows(reader: fx.Node, node: fx.Node) -> bool:
    """True for a cast to a narrower dtype after communication; an upcast belongs to the norm that follows."""
    value, source = tensor_of(reader), tensor_of(node)
    return (
        is_call(reader, CAST)
        and value is not None
        and source is not None
        and value.dtype in DTYPE_NAMES
        and value.dtype.itemsize < source.dtype.itemsize
    )


def _norm_nodes(after: Reduced, passed: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Return the norm's nodes, and the casts of its numbers, that are removed with it."""
    if after.norm is None:
        return frozenset()
    vanishing = {*passed, after.norm.output}
    for node in reversed(after.norm.nodes):
        if all(user in vanishing for user in node.users):
            vanishing.add(node)
    for scalar in after.scalars:
        vanishing.update(node for node in casts_of(scalar) if all(user in vanishing for user in node.users))
    return frozenset(vanishing)
