"""GEMM -> all-reduce -> (+ residual) -> norm, in one operation on symmetric memory (TokenWeave, 4.2 and 4.3).

Unfused, on every rank of a group::

    partial = a @ b
    total = all_reduce(partial)            # then optionally + bias, * scale
    total = post_norm(total)               # post-norm families only
    total = residual + total               # absent after the embedding
    normalized = rms_norm(total) * weight  # or LayerNorm, (1 + w), ...; absent where a post-norm family ends here

Fused: `weave::mm_all_reduce_norm` lets the GEMM write into the arena and does the rest in one pass. On `peer` the
kernel sends rows from wherever they are: there the GEMM stays in the graph, where Inductor picks its kernel, and
`weave::all_reduce_norm` does the rest. Where only FP8 linears read the normalized rows, on GPUs the op quantizes them
too (`weave::all_reduce_norm_quant`). Two all-reduces that meet in one sum become one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as with_fields

import torch
import torch.fx as fx
from torch.fx.node import Argument

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.graph.facts import shape_of
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.splice import call_after, current, erase_dead, last_of, replace_uses
from weaveopt.ops.all_reduce_norm import call as op
from weaveopt.ops.all_reduce_norm.variant import Algorithm
from weaveopt.records.candidate import Candidate, Rejection
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.all_reduce_rms_norm.aliasing import aliasing_values
from weaveopt.rewrites.all_reduce_rms_norm.calls import call_of, memory_of
from weaveopt.rewrites.all_reduce_rms_norm.candidates import (
    FP8_ROW_ALIGNMENT,
    RULE,
    Lowered,
    Terms,
    candidates,
)
from weaveopt.rewrites.all_reduce_rms_norm.sharding import SharedSum, residual_of, sharded_values, shared_sums, total_of
from weaveopt.rule import Chosen, Context, FoundSite, Memory, Placement, Proposal, ReuseHook
from weaveopt.sites.norms import Norm
from weaveopt.sites.quantization import Place, Quantized, shaped_like, stored_scale
from weaveopt.sites.reduced import Reduced, product_of
from weaveopt.sites.reduction import KIND, Reduction, ReductionFacts

aten = torch.ops.aten


class AllReduceRMSNorm:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, structure = found.facts, found.structure
        assert isinstance(facts, ReductionFacts) and isinstance(structure, Reduction), f"{found.site.id}: no reduction"
        refused = _refused(facts, structure)
        norm_refused = _norms_refused(structure.reduced)
        if refused or (norm_refused and structure.reduced.post is not None):
            reasons = (*refused, *norm_refused)
            return () if usable_only else (Proposal(Candidate(RULE, rejections=reasons)),)
        against_library = RULE not in context.config.force
        known = Terms(context.topologies[facts.group], context.machine, against_library, bool(norm_refused))
        taken_in = (Proposal(Candidate(RULE, rejections=norm_refused)),) if norm_refused and not usable_only else ()
        return (
            *taken_in,
            *(
                Proposal(candidate, _consumed(structure, lowered), lowered)
                for candidate, lowered in candidates(facts, tokens, known, usable_only)
            ),
        )

    def interactions(self, sites: Sequence[FoundSite]) -> Sequence[SharedSum]:
        """Consecutive sites hand a sum that stays sharded by tokens to each other."""
        return shared_sums(sites)

    def settle(self, chosen: Sequence[Chosen], context: Context) -> Mapping[str, Proposal]:
        """Which residuals and sums are sharded, and which normalized rows are read in the arena."""
        sharded = sharded_values(chosen)
        aliasing: set[fx.Node] = set()
        for group in dict.fromkeys(each.found.site.groups for each in chosen):
            aliasing |= aliasing_values([each for each in chosen if each.found.site.groups == group])
        settled = {}
        for each in chosen:
            lowered, structure = each.proposal.plan, each.found.structure
            if isinstance(lowered, Lowered) and isinstance(structure, Reduction):
                norm = structure.reduced.norm
                plan = with_fields(
                    lowered,
                    residual_sharded=residual_of(each.found) in sharded,
                    sum_sharded=total_of(each.found) in sharded,
                    aliases_arena=norm is not None and norm.output in aliasing,
                )
                candidate = with_fields(each.proposal.candidate, notes=_notes(plan, each.found.facts))
                settled[each.found.site.id] = with_fields(each.proposal, candidate=candidate, plan=plan)
        return settled

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        return memory_of(_lowered(chosen))

    def inductor_hooks(self) -> Sequence[ReuseHook]:
        """Peers write to normalized rows that alias the arena: Inductor must not put anything of its own there."""
        return (ReuseHook(torch.ops.weave.all_reduce_norm.default, op.results_in_arena),)

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        structure, lowered = chosen.found.structure, _lowered(chosen)
        assert isinstance(structure, Reduction), f"{chosen.found.site.id}: no reduction"
        reduced = with_fields(structure.reduced, norm=None) if lowered.norm_apart else structure.reduced
        sum_used = structure.sum_is_read or reduced.norm is None
        quantized = structure.quantized if lowered.quantizes else None
        call = call_of(chosen, lowered, reduced, placement, quantized, sum_used, context)
        first = reduced.collectives[0]
        operands: tuple[fx.Node | None, ...] = (
            _summed(graph, reduced.biases),
            reduced.scale_tensor,
            _summed(graph, reduced.residuals),
            *((reduced.post.weight, reduced.post.bias) if reduced.post else (None, None)),
            *((reduced.norm.weight, reduced.norm.bias) if reduced.norm else (None, None)),
        )
        if lowered.takes_gemm and structure.gemm is not None:
            *bias, a, b = structure.gemm.args
            addend = structure.addend if structure.addend is not None else (bias[0] if bias else None)
            target: object = torch.ops.weave.mm_all_reduce_norm.default
            leading: tuple[object, ...] = (a, b, addend)
        else:
            target = torch.ops.weave.all_reduce_norm.default
            leading = (_summed(graph, reduced.partials),)
            if quantized is not None:
                target = torch.ops.weave.all_reduce_norm_quant.default
                operands = (*operands, stored_scale(graph, quantized))
        args = tuple(current(argument) for argument in (*leading, *operands))  # type: ignore[arg-type]
        position = last_of(graph, [argument for argument in args if isinstance(argument, fx.Node)])
        fused = call_after(graph, position, target, (*args, call.encode()), like=first)
        _splice_results(graph, reduced, quantized, fused, sum_used)
        erase_dead(graph, chosen.proposal.consumes | reduced.passed | structure.gemm_nodes)
        return _rounding(reduced, quantized)


def _notes(lowered: Lowered, facts: object) -> tuple[str, ...]:
    notes = []
    if isinstance(facts, ReductionFacts) and facts.quantization != "none" and not lowered.quantizes:
        why = f"{lowered.fabric.value} has no kernel that does"
        features = op.FEATURES.get(lowered.fabric)
        if features is not None and features.quantizes:
            why = f"the kernels take rows of a multiple of {FP8_ROW_ALIGNMENT} elements (hidden {facts.hidden})"
        notes.append(f"e4m3 rows are made of the normalized ones in the graph: {why}")
    if lowered.norm_apart:
        notes.append("norm apart: the sum is handed out whole and alone, and every rank normalizes it in the graph")
    elif _gathers(lowered):
        notes.append("gather: two-shot hands out the whole sum too, which others read")
    if lowered.aliases_arena:
        notes.append("no copy: normalized rows that come in bulk are read in the arena, where peers write them")
    return tuple(notes)


def _gathers(lowered: Lowered) -> bool:
    """Whether rows of the sum are handed out beside normalized ones."""
    both = lowered.workload.has_norm and lowered.workload.sum_is_used and not lowered.sum_sharded
    return both and lowered.algorithm is Algorithm.TWO_SHOT


def _lowered(chosen: Chosen) -> Lowered:
    assert isinstance(chosen.proposal.plan, Lowered), f"{chosen.found.site.id} was lowered by another rule"
    return chosen.proposal.plan


def _consumed(structure: Reduction, lowered: Lowered) -> frozenset[fx.Node]:
    """What disappears from the graph with a candidate."""
    consumed = structure.reduced.passed if lowered.norm_apart else structure.interior
    if lowered.quantizes and structure.quantized is not None:
        consumed |= structure.quantized.nodes
    if lowered.takes_gemm and structure.gemm is not None:
        consumed |= frozenset(_made_by(structure))
    return consumed


def _made_by(structure: Reduction) -> Iterator[fx.Node]:
    """The GEMM that the operation takes in, and the views behind it."""
    for partial in structure.reduced.partials:
        if product_of(partial) is structure.gemm:
            node = partial
            while node is not structure.gemm:
                yield node
                node = node.args[0]  # type: ignore[assignment]
            yield node


def _refused(facts: ReductionFacts, structure: Reduction) -> tuple[Rejection, ...]:
    """Conditions that no fabric or parameter changes; all that fail are listed."""
    reduced = structure.reduced
    reasons: list[Rejection] = []
    if facts.world < 2:
        reasons.append(Rejection("one_rank", "a group of one rank communicates nothing", (("world", facts.world),)))
    total = tensor_of(reduced.total)
    if total is None or total.ndim not in (2, 3):
        reasons.append(Rejection("shape_not_known", "the sum is neither [tokens, hidden] nor [batch, seq, hidden]"))
    return tuple(reasons)


def _norms_refused(reduced: Reduced) -> tuple[Rejection, ...]:
    """Why the kernels do not take the site's norms; the one of the sum may stay in the graph then."""
    value = tensor_of(reduced.collectives[0])
    assert value is not None, f"{reduced.collectives[0].name} makes no tensor"
    norms = (norm for norm in (reduced.post, reduced.norm) if norm is not None)
    return tuple(reason for norm in norms for reason in _norm_refused(norm, value))


def _norm_refused(norm: Norm, value: torch.Tensor) -> list[Rejection]:
    reasons: list[Rejection] = []
    output = tensor_of(norm.output)
    if output is None or output.dtype not in (value.dtype, torch.float32):
        found = "unknown" if output is None else str(output.dtype)
        reasons.append(Rejection("dtype_changes", "the norm's result has an unsupported dtype", (("dtype", found),)))
    for word, vector in (("weight", norm.weight), ("bias", norm.bias)):
        dtype = None if vector is None else tensor_of(vector)
        if dtype is not None and dtype.dtype not in (value.dtype, torch.float32):
            values = (("dtype", str(dtype.dtype)),)
            reasons.append(Rejection("dtype_not_supported", f"the norm's {word} has an unsupported dtype", values))
    return reasons


def _splice_results(
    graph: fx.Graph, reduced: Reduced, quantized: Quantized | None, fused: fx.Node, sum_used: bool
) -> None:
    """Readers of the norm, of its quantized rows and their scales, and of the sum read the fused results."""
    position = fused
    outputs: list[tuple[fx.Node, int, tuple[Place, ...] | None]] = []
    if reduced.norm is not None:
        outputs.append((reduced.norm.output, 0, None if quantized is None else quantized.rows))
        if quantized is not None and quantized.scales:
            outputs.append((reduced.norm.output, 2, quantized.scales))
    if sum_used:
        outputs.append((reduced.total, 1, None))
    for old, index, places in outputs:
        result = position = call_after(graph, position, operator.getitem, (fused, index), like=old)
        old_value, value = tensor_of(old), tensor_of(result)
        assert old_value is not None and value is not None
        if value.ndim != old_value.ndim:
            # Where there is no residual, rows have the shape of the partial result, or of the GEMM that was taken in.
            sizes = [*_leading_sizes(graph, reduced, old_value), value.shape[-1]]
            result = call_after(graph, result, aten.view.default, (result, sizes), old)
        if places is None:
            replace_uses(graph, old, result)
        for place in places or ():
            replace_uses(graph, place.node, shaped_like(graph, place, result))


def _leading_sizes(graph: fx.Graph, reduced: Reduced, value: torch.Tensor) -> list[Argument]:
    """All but the last size of `value`; symbols are nodes of the view that makes the sum, or the partial result."""
    if all(isinstance(size, int) for size in value.shape[:-1]):
        return list(value.shape[:-1])
    total = tensor_of(reduced.total)
    is_viewed = is_call(reduced.total, frozenset({aten.view.default})) and total is not None
    source = reduced.total if is_viewed and total.ndim == value.ndim else reduced.partials[0]  # type: ignore[union-attr]
    return shape_of(graph, source)[:-1]


def _summed(graph: fx.Graph, values: tuple[fx.Node, ...]) -> fx.Node | None:
    """The only one of `values`, or their sum on this rank in the shape of the first; None where there is none."""
    if not values:
        return None
    nodes = [node for node in map(current, values) if isinstance(node, fx.Node)]
    total, first = nodes[0], tensor_of(nodes[0])
    for node in nodes[1:]:
        value = tensor_of(node)
        assert first is not None and value is not None
        if value.ndim != first.ndim:
            position = last_of(graph, [node, nodes[0]])
            node = call_after(graph, position, aten.view.default, (node, shape_of(graph, nodes[0])), like=node)
        total = call_after(graph, last_of(graph, [total, node]), aten.add.Tensor, (total, node), like=total)
    return total


def _rounding(reduced: Reduced, quantized: Quantized | None) -> tuple[str, ...]:
    lines = ["partial results are summed in fp32 and rounded once, after the residual"]
    if len(reduced.collectives) > 1:
        lines.append("partial results that meet in one sum are added before the reduction")
    if reduced.scale_tensor is not None or reduced.scale != 1.0:
        lines.append("the scaled sum is not rounded before the residual is added")
    return tuple(f"all_reduce_rms_norm: {line}" for line in (*lines, *(quantized.rounding if quantized else ())))
