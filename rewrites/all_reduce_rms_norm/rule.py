"""Product -> all-reduce -> (+ residual) -> norm, in one operation on symmetric memory (TokenWeave, 4.2 and 4.3).

Unfused, on every rank of a group::

    partial = a @ b
    total = all_reduce(partial)            # then optionally + bias, * scale
    total = post_norm(total)               # post-norm families only
    total = residual + total               # absent after the embedding
    normed = rms_norm(total) * weight      # or LayerNorm, (1 + w), ...; absent where a post-norm family ends here

Fused: `weave::mm_all_reduce_norm` lets the product write into the arena and does the rest in one pass. On `peer`
the kernel sends rows from wherever they are: there the product stays in the graph, where Inductor picks its kernel,
and `weave::all_reduce_norm` does the rest. Where only FP8 linears read the normed rows, on GPUs the op quantizes them
too (`weave::all_reduce_norm_quant`). Two all-reduces that meet in one sum (a mixture and its shared experts;
parallel attention and MLP) become one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.graph.facts import DTYPE_NAMES, count_tokens, group_of, module_of, shape_of
from weaveopt.graph.pattern import SHAPE_ONLY, is_call, tensor_of
from weaveopt.graph.scalars import casts_of, symbols_of
from weaveopt.graph.splice import call_after, current, erase_dead, last_of, replace_uses
from weaveopt.ops.all_reduce_norm import call as op
from weaveopt.records.candidate import Candidate, Fabric, Rejection
from weaveopt.records.memory import Placement, RegionNeed
from weaveopt.records.report import Decision
from weaveopt.records.site import Product, Site, Workload
from weaveopt.rewrites.all_reduce_rms_norm import candidates as lowering
from weaveopt.rule import ArenaNeed, Context, Finding, Match
from weaveopt.sites.norms import Norm, find_norms
from weaveopt.sites.quantization import Place, Quantized, find_quantized, shaped_like, stored_scale
from weaveopt.sites.reduction import ANY_ALL_REDUCE, Reduced, follow, product_of

aten = torch.ops.aten


@dataclass(frozen=True)
class SiteMatch(Match):
    """A matched site: the reduced value's way through the graph, and the product that may write into the arena."""

    reduced: Reduced | None = None
    product: fx.Node | None = None
    addend: fx.Node | None = None
    """What is added to the product before the reduction: another partial result."""
    quantized: Quantized | None = None
    """What FP8 linears do to the normed rows, where the op does it."""


@dataclass(frozen=True)
class AllReduceRMSNorm:
    """The rule; see the module's docstring."""

    name: str = "all_reduce_rms_norm"

    def find(self, graph: fx.Graph, context: Context) -> list[Finding]:
        all_reduces = [node for node in graph.nodes if is_call(node, ANY_ALL_REDUCE)]
        if not all_reduces:
            return []
        norms = find_norms(graph)
        followed: list[tuple[fx.Node, Reduced | Rejection]] = []
        merged: set[fx.Node] = set()
        for node in all_reduces:
            if node not in merged:
                reduced = follow(node, norms)
                followed.append((node, reduced))
                if isinstance(reduced, Reduced):
                    merged.update(reduced.collectives)
        absorbed = frozenset(n for _, each in followed if isinstance(each, Reduced) for n in each.passed)
        return [self._finding(node, reduced, absorbed, context) for node, reduced in followed]

    def _finding(
        self, node: fx.Node, reduced: Reduced | Rejection, absorbed: frozenset[fx.Node], context: Context
    ) -> Finding:
        group = group_of(node)
        if isinstance(reduced, Rejection):
            return Finding(self._site(node, (node,), group, None, "", (reduced,)), None)
        quantized = _quantized(reduced, group, context)
        match = _matched(reduced, quantized if isinstance(quantized, Quantized) else None)
        workload = _workload(reduced, match, absorbed, context)
        rejections = _rejections(reduced, workload, group, context)
        form = reduced.text + _quantized_text(quantized)
        site = self._site(node, reduced.collectives, group, workload, form, rejections)
        return Finding(site, None if rejections else match)

    def _site(
        self,
        node: fx.Node,
        collectives: tuple[fx.Node, ...],
        group: str,
        workload: Workload | None,
        form: str,
        rejections: tuple[Rejection, ...],
    ) -> Site:
        return Site(
            id=node.name,
            rule=self.name,
            group=group,
            module=module_of(node),
            collectives=tuple(collective.name for collective in collectives),
            workload=workload,
            form=form,
            rejections=rejections,
        )

    def candidates(self, site: Site, context: Context, usable_only: bool = False) -> tuple[Candidate, ...]:
        assert site.workload is not None, f"{site.id} was not matched"
        return lowering.candidates(self.name, site.workload, context.topologies[site.group], context, usable_only)

    def need(self, decision: Decision) -> ArenaNeed | RegionNeed:
        return lowering.arena_need(decision)

    def replace(
        self, graph: fx.Graph, match: Match, decision: Decision, placement: Placement, context: Context
    ) -> tuple[str, ...]:
        assert isinstance(match, SiteMatch) and match.reduced is not None
        reduced, quantized = match.reduced, match.quantized
        sum_used = _is_read_elsewhere(reduced)
        call = _call(match, reduced, decision, placement, sum_used, context)
        first = reduced.collectives[0]
        operands: tuple[fx.Node | None, ...] = (
            _summed(graph, reduced.biases),
            reduced.scale_tensor,
            _summed(graph, reduced.residuals),
            *((reduced.post.weight, reduced.post.bias) if reduced.post else (None, None)),
            *((reduced.norm.weight, reduced.norm.bias) if reduced.norm else (None, None)),
        )
        if match.product is not None and decision.chosen.fabric is not Fabric.PEER:
            *bias, a, b = match.product.args
            addend = match.addend if match.addend is not None else (bias[0] if bias else None)
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
        self._splice_results(graph, match, reduced, fused, sum_used)
        erase_dead(graph, match.interior | reduced.passed | frozenset(_producers(reduced)))
        return _rounding(reduced, quantized)

    def _splice_results(
        self, graph: fx.Graph, match: SiteMatch, reduced: Reduced, fused: fx.Node, sum_used: bool
    ) -> None:
        """Readers of the norm, of its quantized rows and their scales, and of the sum read the fused results."""
        position = fused
        quantized = match.quantized
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
                # Only a product without a residual loses the shape [batch, seq, hidden]; its view still has the sizes.
                sizes = shape_of(graph, reduced.partials[0])
                last = value.shape[-1]
                result = call_after(graph, result, aten.view.default, (result, [*sizes[:-1], last]), old)
            if places is None:
                replace_uses(graph, old, result)
            for place in places or ():
                replace_uses(graph, place.node, shaped_like(graph, place, result))


def _quantized(reduced: Reduced, group: str, context: Context) -> Quantized | Rejection | None:
    """The quantization that the op may do at this site, or why it is left to the graph."""
    topology = context.topologies.get(group)
    if reduced.norm is None or topology is None or not lowering.quantizes(topology):
        return None
    found = find_quantized(reduced.norm.output)
    if not isinstance(found, Quantized):
        return found
    value = tensor_of(reduced.collectives[0])
    return found if value is None else lowering.against_quantization(int(value.shape[-1])) or found


def _quantized_text(quantized: Quantized | Rejection | None) -> str:
    if not isinstance(quantized, Rejection):
        return "" if quantized is None else quantized.text
    values = ", ".join(f"{name} {value}" for name, value in quantized.values)
    return f" -> e4m3 left as it is: {quantized.message} ({values})"


def _matched(reduced: Reduced, quantized: Quantized | None) -> SiteMatch:
    """What disappears, which value may stay sharded, and which product writes into the arena."""
    vanishing = set(reduced.passed) | (quantized.nodes if quantized is not None else set())
    for node in reversed(reduced.norm.nodes if reduced.norm else ()):
        if node is reduced.norm.output or all(user in vanishing for user in node.users):  # type: ignore[union-attr]
            vanishing.add(node)
    for scalar in reduced.scalars:
        for node in casts_of(scalar):
            if all(user in vanishing for user in node.users):
                vanishing.add(node)
    # The op that quantizes takes a partial result: its product stays in the graph on every fabric.
    products = [] if quantized is not None else [product_of(partial) for partial in reduced.partials]
    product = addend = None
    if len(products) == 1:
        product = products[0]
    elif len(products) == 2:
        product, addend = _product_and_addend(reduced, products)
    return SiteMatch(
        interior=frozenset(vanishing),
        sharded_input=reduced.residuals[0] if len(reduced.residuals) == 1 else None,
        sharded_output=reduced.total,
        # Rows with scales of their own come one by one.
        landing_output=reduced.norm.output if reduced.norm is not None and quantized is None else None,
        numbers=symbols_of(reduced.scalars),
        reduced=reduced,
        product=product,
        addend=addend,
        quantized=quantized,
    )


def _product_and_addend(reduced: Reduced, products: list[fx.Node | None]) -> tuple[fx.Node | None, fx.Node | None]:
    """Of two partial results, a plain product that can accumulate onto the other one, given as [tokens, hidden]."""
    for index in (1, 0):
        product, other = products[index], products[1 - index]
        addend = other if other is not None else reduced.partials[1 - index]
        value = tensor_of(addend)
        if product is not None and product.target is aten.mm.default and value is not None and value.ndim == 2:
            return product, addend
    return None, None


def _workload(reduced: Reduced, match: SiteMatch, absorbed: frozenset[fx.Node], context: Context) -> Workload | None:
    value = tensor_of(reduced.collectives[0])
    topology = context.topologies.get(group_of(reduced.collectives[0]))
    if value is None or topology is None or value.dtype not in DTYPE_NAMES:
        return None
    tokens, max_tokens = count_tokens(value, context.config.max_tokens)
    product = None
    if match.product is not None:
        a = tensor_of(match.product.args[-2])  # type: ignore[arg-type]
        if a is not None:
            product = Product(tokens, int(a.shape[-1]), int(value.shape[-1]))
    return Workload(
        tokens=tokens,
        max_tokens=max_tokens,
        hidden=int(value.shape[-1]),
        dtype=DTYPE_NAMES[value.dtype],
        world=topology.world,
        hosts=topology.num_hosts,
        product=product,
        num_partials=len(reduced.collectives),
        num_norms=int(reduced.norm is not None) + int(reduced.post is not None),
        has_residual=bool(reduced.residuals),
        sum_is_used=_is_read_elsewhere(reduced),
        sum_may_shard=all(user in absorbed or user in match.interior for user in reduced.total.users),
        out_dtype=_out_dtype(reduced) if match.quantized is None else "float8_e4m3fn",
    )


def _out_dtype(reduced: Reduced) -> str:
    """Of the normed rows, where it is not that of the activations."""
    value = tensor_of(reduced.collectives[0])
    output = None if reduced.norm is None else tensor_of(reduced.norm.output)
    if value is None or output is None or output.dtype == value.dtype:
        return ""
    return DTYPE_NAMES.get(output.dtype, "")


def _is_read_elsewhere(reduced: Reduced) -> bool:
    """Whether anything but the site's own norm reads the sum."""
    own = set(reduced.norm.nodes) if reduced.norm is not None else set()
    if any(user not in own for user in reduced.total.users):
        return True
    # A statistic of the norm that is read elsewhere (saved for the backward pass) is computed from the sum again.
    return any(user not in own for node in own if node is not reduced.norm.output for user in node.users)  # type: ignore[union-attr]


def _rejections(reduced: Reduced, workload: Workload | None, group: str, context: Context) -> tuple[Rejection, ...]:
    """Conditions that no fabric or parameter changes; all that fail are listed."""
    topology = context.topologies.get(group)
    if topology is None:
        return (Rejection("group_not_known", "the process group is not known in this process", (("group", group),)),)
    value = tensor_of(reduced.collectives[0])
    assert value is not None
    reasons: list[Rejection] = []
    if workload is None:
        values = (("dtype", str(value.dtype).removeprefix("torch.")),)
        return (Rejection("dtype_not_supported", "the kernels take bfloat16, float16 and float32", values),)
    if workload.world < 2:
        reasons.append(Rejection("one_rank", "a group of one rank communicates nothing", (("world", workload.world),)))
    for norm in (reduced.post, reduced.norm):
        if norm is not None:
            reasons.extend(_norm_rejections(norm, value))
    total = tensor_of(reduced.total)
    if total is None or total.ndim not in (2, 3):
        reasons.append(Rejection("shape_not_known", "the sum is neither [tokens, hidden] nor [batch, seq, hidden]"))
    return tuple(reasons)


def _norm_rejections(norm: Norm, value: torch.Tensor) -> list[Rejection]:
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


def _call(
    match: SiteMatch, reduced: Reduced, decision: Decision, placement: Placement, sum_used: bool, context: Context
) -> op.AllReduceNormCall:
    workload = decision.site.workload
    assert workload is not None
    sharded = op.SumOut.SHARDED if placement.sum_sharded else op.SumOut.WHOLE
    parameters = dict(decision.chosen.parameters)
    return op.AllReduceNormCall(
        site=decision.site.id,
        group=decision.site.group,
        fabric=decision.chosen.fabric,
        world=workload.world,
        hidden=workload.hidden,
        dtype=workload.dtype,
        out_dtype=workload.out_dtype or workload.dtype,
        # Behind the partial buffers, which live as long as the arena.
        output_offset=max(0, placement.output_offset - 2 * placement.partial_bytes),
        max_tokens=placement.max_tokens,
        one_shot_max_tokens=int(parameters.get("one_shot_max_tokens", 0)),
        scale=reduced.scale,
        post=reduced.post.form if reduced.post else None,
        norm=reduced.norm.form if reduced.norm else None,
        residual_sharded=placement.residual_sharded,
        sum_out=sharded if sum_used else op.SumOut.NONE,
        timeout_s=context.config.timeout_s,
        normalized_aliases_arena=placement.normed_lands,
        quant=op.Quant.NONE if match.quantized is None else match.quantized.quant,
        table=tuple(op.row_of(row) for row in decision.chosen.lowerings),
        in_pieces=decision.chosen.fabric in op.GPU_FABRICS and placement.max_tokens >= workload.max_tokens,
    )


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


def _producers(reduced: Reduced) -> list[fx.Node]:
    """The partial results and the views and products behind them; erased where nobody reads them any more."""
    nodes: list[fx.Node] = []
    for partial in reduced.partials:
        node = partial
        nodes.append(node)
        while is_call(node, SHAPE_ONLY) and isinstance(node.args[0], fx.Node):
            node = node.args[0]
            nodes.append(node)
        if is_call(node, frozenset({aten.mm.default, aten.addmm.default})):
            nodes.append(node)
    return nodes


def _rounding(reduced: Reduced, quantized: Quantized | None) -> tuple[str, ...]:
    lines = ["partial results are summed in fp32 and rounded once, after the residual"]
    if len(reduced.collectives) > 1:
        lines.append("partial results that meet in one sum are added before the reduction")
    if reduced.scale_tensor is not None or reduced.scale != 1.0:
        lines.append("the scaled sum is not rounded before the residual is added")
    return tuple(f"all_reduce_rms_norm: {line}" for line in (*lines, *(quantized.rounding if quantized else ())))
