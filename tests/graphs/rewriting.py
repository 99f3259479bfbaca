"""Graphs of sequence-parallel forms, rewritten, and run on simulated ranks along with the graphs as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from tests.graphs.capturing import context_of
from weaveopt.fabrics.rows_call import decode
from weaveopt.ops.gemm_comm.all_gather import reference as gathering
from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall, Weights
from weaveopt.ops.gemm_comm.reduce_scatter import reference as scattering
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, Products
from weaveopt.pipeline.rewrite import seam
from weaveopt.rewrites import RULES
from weaveopt.rule import CapturedGraph, Chosen, FoundSite, Placement, Proposal, SiteRule
from weaveopt.sites import SEQUENCE_PARALLEL

c10d, weave = torch.ops._c10d_functional, torch.ops.weave
Arguments = Sequence[Sequence[object]]
"""Arguments of a call, by rank."""


@dataclass(frozen=True)
class Rewritten:
    num_sites: int
    num_rewritten: int
    codes: tuple[str, ...]
    """Why the rules left recognized sites."""


def rule_for(found: FoundSite) -> SiteRule:
    [rule] = RULES.of_kind(found.site.kind)
    return rule


def proposals(found: FoundSite, groups: Sequence[str], world: int) -> Sequence[Proposal]:
    return rule_for(found).propose(found, found.site.tokens, context_of(groups, world))


def rewrite_all(captured: CapturedGraph, world: int) -> Rewritten:
    """Rewrites every site that may be, in place."""
    context = context_of(captured.groups, world)
    every = [found for matcher in SEQUENCE_PARALLEL for found in matcher.find(captured.graph, context)]
    taken: set[fx.Node] = set()
    codes: list[str] = []
    count = 0
    before = seam(captured.graph)
    for found in (each for each in every if each.facts is not None):
        proposed = proposals(found, captured.groups, world)
        allowed = [each for each in proposed if each.candidate.allowed]
        if not allowed:
            assert len(proposed) == 1, "what no fabric changes is said once"
            codes += [reason.code for reason in proposed[0].candidate.rejections]
        elif not allowed[0].consumes & taken:
            assert allowed[0].consumes <= found.nodes
            taken |= allowed[0].consumes
            rule_for(found).replace(captured.graph, Chosen(found, allowed[0]), Placement({}), context)
            captured.graph.lint()
            assert seam(captured.graph) == before, found.site.id
            count += 1
    return Rewritten(len(every), count, tuple(codes))


def evaluated(captured: CapturedGraph, inputs: Sequence[Sequence[object]], world: int) -> list[list[object]]:
    """Results of every rank; `inputs` of every placeholder by rank. Both operations run as their references."""
    values: dict[fx.Node, Sequence[object]] = {}
    left = iter(inputs)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(left)
            continue
        args = [fx.map_arg(node.args, lambda each, rank=rank: values[each][rank]) for rank in range(world)]
        if node.op == "output":
            return [list(own[0]) for own in args]
        known = _COLLECTIVES.get(node.target)
        values[node] = known(args) if known else [node.target(*own, **node.kwargs) for own in args]
    raise AssertionError("the graph has no output")


def _all_gather(args: Arguments) -> list[object]:
    return [torch.cat([_tensor(own[0]) for own in args])] * len(args)


def _reduce_scatter(args: Arguments) -> list[object]:
    total = torch.stack([_tensor(own[0]).float() for own in args]).sum(0) / (len(args) if args[0][1] == "avg" else 1)
    return list(total.to(_tensor(args[0][0]).dtype).chunk(len(args)))


def _gemm_reduce_scatter(args: Arguments) -> list[object]:
    outer, text = args[0][3:]
    partials = [Products(*own[:3]).compute() for own in args]  # type: ignore[arg-type]
    return list(scattering.reference(partials, outer, decode(GemmReduceScatterCall, str(text))))  # type: ignore[arg-type]


def _all_gather_gemm(args: Arguments) -> list[object]:
    shards = [_tensor(own[0]) for own in args]
    outer, text = args[0][3:]
    call = decode(AllGatherGemmCall, str(text))
    return [gathering.reference(shards, Weights(*own[1:3]), outer, call) for own in args]  # type: ignore[arg-type]


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor), value
    return value


_COLLECTIVES: dict[object, Callable[[Arguments], list[object]]] = {
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.wait_tensor.default: lambda args: [own[0] for own in args],
    weave.gemm_reduce_scatter.default: _gemm_reduce_scatter,
    weave.all_gather_gemm.default: _all_gather_gemm,
}


def random_inputs(captured: CapturedGraph, world: int) -> list[list[object]]:
    """Small numbers of the shapes that were captured; symbols by their hints."""
    generator = torch.Generator().manual_seed(0)

    def of(value: object) -> object:
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return value.node.hint
        if not isinstance(value, Tensor):
            return value
        sizes = [each if isinstance(each, int) else each.node.hint for each in value.shape]
        steps = [each if isinstance(each, int) else each.node.hint for each in value.stride()]
        if not value.dtype.is_floating_point:
            return torch.zeros(sizes, dtype=value.dtype)
        made = torch.empty_strided(sizes, steps, dtype=value.dtype)
        return made.copy_(torch.randint(-2, 3, sizes, generator=generator))

    return [[of(node.meta["val"]) for _ in range(world)] for node in captured.graph.find_nodes(op="placeholder")]


def check_rewritten(captured: CapturedGraph, world: int, inputs: Sequence[Sequence[object]] | None = None) -> Rewritten:
    """Rewrites the graph in place, and compares what it computes with what it computed."""
    inputs = random_inputs(captured, world) if inputs is None else inputs
    want = evaluated(captured, inputs, world)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def faked(value: Tensor) -> Tensor:
            return value if hasattr(value, "fake_mode") else mode.from_tensor(value)

        for node in captured.graph.nodes:  # of graphs that were made by hand
            node.meta["val"] = tree_map_only(Tensor, faked, node.meta.get("val"))
    done = rewrite_all(captured, world)
    for own, expected in zip(evaluated(captured, inputs, world), want, strict=True):
        for one, two in zip(own, expected, strict=True):
            if isinstance(two, Tensor):
                assert isinstance(one, Tensor) and one.shape == two.shape and one.dtype == two.dtype
                # Values travel and are added in bf16; sizes of the largest value, since sums cancel.
                scale = float(two.float().abs().max()) if two.numel() else 0.0
                tolerance = 0.03 if two.dtype != torch.float32 else 1e-4
                torch.testing.assert_close(one.float(), two.float(), rtol=0, atol=tolerance * scale)
    return done
