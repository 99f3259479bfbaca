"""Attention as compiled models call it -> causal, grouped, and in decode over what is filled alone.

    key, value = (repeat(each, groups) for each in (key, value))       # written out for every query head
    bias = where(mask, 0, -inf)                                        # [batch, 1, queries, keys], added to every score
    out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)

becomes `weave::library_attention` where the mask is known when the model is compiled: the kernel masks by itself, skips
what is hidden, and reads the heads of keys and values as they are. Where only its values at run time say what the mask
is (a static cache, padding, packed sequences), `weave::masked_attention` reads it as booleans, and `weave::key_ranges`
finds once for all layers which keys it admits. Where keys and values are rows of a paged cache,
`weave::paged_attention` takes the place of their update and of attention (`rewrites.causal_attention.paged`). No rank
communicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.splice import call_after, current_node, erase_dead, last_of, replace_uses
from weaveopt.inductor.kernels import KernelContext
from weaveopt.ops.attention.gpu import lacks_triton
from weaveopt.ops.attention.shapes import RANGE_ROWS
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.causal_attention.candidates import (
    LIBRARY,
    RULE,
    AttentionImplementation,
    CausalAttentionPlan,
    CausalAttentionTerms,
    candidates,
)
from weaveopt.rewrites.causal_attention.paged import erase_update, paged_call
from weaveopt.rule import Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.attention.matcher import KIND, AttentionFacts, AttentionNodes

aten = torch.ops.aten
_EXPANDED = frozenset({aten.expand.default})
_OF_CPUS = frozenset({aten._scaled_dot_product_flash_attention_for_cpu.default})


class CausalAttention:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, nodes = found.facts, found.structure
        assert isinstance(facts, AttentionFacts) and isinstance(nodes, AttentionNodes), f"{found.site.id}: no attention"
        surroundings = KernelContext.of(context.machine, context.topologies.values())
        terms = CausalAttentionTerms(surroundings, not lacks_triton(), RULE in context.config.force)
        return tuple(
            Proposal(candidate, nodes.interior, lowered)
            for candidate, lowered in candidates(facts, tokens, terms, usable_only)
        )

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        return None

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        nodes, lowered = chosen.found.structure, chosen.proposal.plan
        assert isinstance(nodes, AttentionNodes) and isinstance(lowered, CausalAttentionPlan) and not placement.buffers
        form = nodes.form
        rounding = (f"{RULE}: weights of the keys are summed in another order",)
        in_place = lowered.form is AttentionImplementation.GROUPED or (
            lowered.form is AttentionImplementation.CPU and is_call(form.call, _OF_CPUS)
        )
        if form.call is not None and in_place:
            query, key, value = _operands(graph, nodes, lowered)
            if lowered.form is AttentionImplementation.GROUPED:
                form.call.args = (query, key, value, *form.call.args[3:])
            else:
                hides = lowered.causal and not nodes.has_one_query
                form.call.args, form.call.kwargs = (query, key, value, 0.0, hides), {"scale": form.scale}
            erase_dead(graph, chosen.proposal.consumes - {form.call, form.output})
            _erase_mask(graph, nodes)
            return () if lowered.form is AttentionImplementation.GROUPED else rounding
        if lowered.form is AttentionImplementation.PAGED:
            made = paged_call(graph, nodes)
        elif lowered.form in LIBRARY:
            made = _library(graph, nodes, lowered)
        else:
            made = _masked(graph, nodes, lowered)
        replace_uses(graph, form.output, _as_it_left(graph, made, form.output))
        erase_dead(graph, chosen.proposal.consumes)
        if lowered.form is AttentionImplementation.PAGED and nodes.paged is not None:
            erase_update(graph, nodes.paged)
        _erase_mask(graph, nodes)
        return rounding


def _as_it_left(graph: fx.Graph, made: fx.Node, output: fx.Node) -> fx.Node:
    """`made`, or a copy of it where `output` leaves the graph and is contiguous: attention that is written out is, and
    the kernels' results have the layout of the queries."""
    wanted, value = tensor_of(output), tensor_of(made)
    assert wanted is not None and value is not None, f"{output.name} or {made.name} makes no tensor"
    leaves = any(user.op == "output" for user in output.users)
    if not leaves or wanted.stride() == value.stride() or not wanted.is_contiguous():
        return made
    copy = call_after(graph, made, aten.clone.default, (made,), like=made)
    copy.kwargs = {"memory_format": torch.contiguous_format}
    copy.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
    return copy


def _operands(graph: fx.Graph, nodes: AttentionNodes, lowered: CausalAttentionPlan) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Query, keys and values; without the keys after the last that some query reads."""
    query, key, value = (current_node(each) for each in (nodes.form.query, nodes.key, nodes.value))
    if lowered.num_keys:
        position = last_of(graph, [query, key, value])
        key = call_after(graph, position, aten.slice.Tensor, (key, 2, 0, lowered.num_keys), like=key)
        value = call_after(graph, key, aten.slice.Tensor, (value, 2, 0, lowered.num_keys), like=value)
    return query, key, value


def _library(graph: fx.Graph, nodes: AttentionNodes, lowered: CausalAttentionPlan) -> fx.Node:
    operands = _operands(graph, nodes, lowered)
    rest = (nodes.form.scale, lowered.causal, lowered.window, lowered.form.value)
    op = torch.ops.weave.library_attention.default
    return call_after(graph, last_of(graph, operands), op, (*operands, *rest), like=nodes.form.output)


def _masked(graph: fx.Graph, nodes: AttentionNodes, lowered: CausalAttentionPlan) -> fx.Node:
    query, key, value = operands = _operands(graph, nodes, lowered)
    positions = list(operands)
    mask = ranges = None
    if lowered.reads_mask:
        assert nodes.reading.admitted is not None
        mask = current_node(nodes.reading.admitted)
        if nodes.reading.is_inverted:
            mask = _negated(graph, mask)
        while is_call(mask, _EXPANDED) and _keeps_dims(mask):
            mask = current_node(mask.args[0])  # type: ignore[arg-type]  # one row of booleans for all that share it
        mask = _with_four_dims(graph, mask)
        ranges = _ranges(graph, mask)
        positions += [mask, ranges]
    sinks = None if nodes.form.sinks is None else current_node(nodes.form.sinks)
    if sinks is not None:
        positions.append(sinks)
    arguments = (query, key, value, mask, ranges, sinks, nodes.form.scale, nodes.form.softcap, lowered.causal)
    op = torch.ops.weave.masked_attention.default
    return call_after(graph, last_of(graph, positions), op, arguments, like=nodes.form.output)


def _negated(graph: fx.Graph, mask: fx.Node) -> fx.Node:
    """`~mask`: one for all sites that read it."""
    op = aten.bitwise_not.default
    known = next((user for user in mask.users if is_call(user, frozenset({op}))), None)
    return known or call_after(graph, last_of(graph, [mask]), op, (mask,), like=mask)


def _keeps_dims(node: fx.Node) -> bool:
    before = node.args[0]
    a, b = tensor_of(node), tensor_of(before) if isinstance(before, fx.Node) else None
    return a is not None and b is not None and a.ndim == b.ndim == 4


def _with_four_dims(graph: fx.Graph, mask: fx.Node) -> fx.Node:
    """The mask as [batch, heads, queries, keys], sizes of 1 before those that it has."""
    value = tensor_of(mask)
    assert value is not None, f"{mask.name} makes no tensor"
    op = aten.unsqueeze.default
    for _ in range(4 - value.ndim):
        known = next((user for user in mask.users if is_call(user, frozenset({op})) and user.args[1] == 0), None)
        mask = known or call_after(graph, last_of(graph, [mask]), op, (mask, 0), like=mask)
    return mask


def _ranges(graph: fx.Graph, mask: fx.Node) -> fx.Node:
    """The call that finds which keys `mask` admits: one for all sites that read it."""
    op = torch.ops.weave.key_ranges.default
    for user in mask.users:
        if is_call(user, frozenset({op})):
            return user
    return call_after(graph, last_of(graph, [mask]), op, (mask, RANGE_ROWS), like=mask)


def _erase_mask(graph: fx.Graph, nodes: AttentionNodes) -> None:
    """The bias, and what made it alone: no site reads it any more."""
    made: set[fx.Node] = set()
    pending = [nodes.form.mask] if nodes.form.mask is not None else []
    while pending:
        node = pending.pop()
        if node not in made and node.op == "call_function" and not node.is_impure():
            made.add(node)
            pending.extend(node.all_input_nodes)
    erase_dead(graph, frozenset(made))
