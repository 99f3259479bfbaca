"""Reduction sites made by hand: who reads whose sum, and which of them overlap, is the test's to say."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx

from weaveopt.ops.reduction.call import NormSpec
from weaveopt.records.candidate import Rejection
from weaveopt.records.norm import NormKind
from weaveopt.records.site import Site, TokenCounts
from weaveopt.rule import CapturedGraph, FoundSite
from weaveopt.sites.reduction.matcher import KIND, Reduction, ReductionFacts
from weaveopt.sites.shared.epilogue import Reduced
from weaveopt.sites.shared.norms import Norm

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
RMS = NormSpec(NormKind.RMS, 1e-6)


class Reductions:
    """A graph and its sites: `normed = norm(residual + all_reduce(x @ w))`, in bf16 on meta tensors."""

    def __init__(self, tokens: int = 64, hidden: int = 1024, world: int = 2, group: str = "0") -> None:
        self.graph = fx.Graph()
        self.sites: list[FoundSite] = []
        self.tokens, self.hidden, self.world, self.group = tokens, hidden, world, group

    def input(self, *shape: int) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = torch.empty(*shape, device="meta", dtype=torch.bfloat16)
        return node

    def call(self, target: object, *args: object) -> fx.Node:
        """A node that makes rows."""
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = torch.empty(self.tokens, self.hidden, device="meta", dtype=torch.bfloat16)
        return node

    def site(
        self,
        residual: fx.Node | None = None,
        k: int = 512,
        *,
        num_norms: int = 1,
        sum_is_read: bool = True,
        sum_read_by_reductions: bool = True,
        tokens: TokenCounts | None = None,
        sharing: Iterable[fx.Node] = (),
        group: str = "",
        refused: bool = False,
    ) -> FoundSite:
        """`sharing`: nodes of other sites that belong to this one too."""
        gemm = self.call(aten.mm.default, self.input(self.tokens, k), self.input(k, self.hidden))
        group = group or self.group
        reduced = self.call(c10d.all_reduce.default, gemm, "sum", group)
        wait = self.call(c10d.wait_tensor.default, reduced)
        total = self.call(aten.neg.default, wait) if residual is None else self.call(aten.add.Tensor, wait, residual)
        output = self.call(aten.exp.default, total)
        interior = frozenset((reduced, wait, total, output, *sharing))
        facts = ReductionFacts(
            group=group,
            world=self.world,
            hosts=1,
            hidden=self.hidden,
            dtype="bfloat16",
            gemm_depth=k,
            num_norms=num_norms,
            has_residual=residual is not None,
            sum_is_read=sum_is_read,
            sum_read_by_reductions=sum_read_by_reductions,
        )
        walked = Reduced(
            collectives=(reduced,),
            biases=(),
            scale=1.0,
            scales=(),
            scale_tensor=None,
            post=None,
            residuals=() if residual is None else (residual,),
            total=total,
            norm=Norm(total, RMS, None, None, output, (output,), 1e-6),
            passed=frozenset((reduced, wait, total)),
        )
        reasons = (Rejection("read_by_several", "for the test"),) if refused else ()
        name, counts = f"s{len(self.sites)}", tokens or TokenCounts(self.tokens)
        site = Site(name, KIND, (group,), "", (reduced.name,), "", counts, facts.values(), reasons)
        structure = Reduction(walked, interior, gemm=gemm)
        found = FoundSite(site, interior | {gemm}, facts, structure, token_value=reduced)
        self.sites.append(FoundSite(site, interior) if refused else found)
        return found

    def captured(self) -> CapturedGraph:
        return CapturedGraph("graph", "prefill", self.tokens, (self.group,), self.graph)


def reduction_of(found: FoundSite) -> Reduction:
    assert isinstance(found.structure, Reduction)
    return found.structure


def total_of(found: FoundSite) -> fx.Node:
    return reduction_of(found).reduced.total


def rows_of(found: FoundSite) -> fx.Node:
    """Its normalized rows."""
    norm = reduction_of(found).reduced.norm
    assert norm is not None
    return norm.output
