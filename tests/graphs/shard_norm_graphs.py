"""Blocks for the rule `shard_norm`, and what it made of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx
from torch import Tensor
from torch.nn.functional import linear

from tests.graphs import forms
from tests.graphs.preview import previewed
from weaveopt.cost_model.tile_config import TILES_NORM
from weaveopt.fabrics.rows_call import decode
from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, GemmReduceScatterNormCall
from weaveopt.records.candidate import Candidate, Fabric
from weaveopt.records.report import Decision, GraphReport
from weaveopt.rewrites.shard_norm.candidates import RULE

OTHER = "all_reduce_rms_norm"
SCATTER, GATHER = torch.ops.weave.gemm_reduce_scatter.default, torch.ops.weave.all_gather_gemm.default
SCATTER_NORM = torch.ops.weave.gemm_reduce_scatter_norm.default
FUSED = torch.ops.weave.mm_all_reduce_norm.default
H, K = 64, 32
"""Elements of a row of the sum, and of a row between two sums."""


def zeros(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*sizes, dtype=dtype)


def inputs(tokens: int = 16) -> tuple[Tensor, ...]:
    """x, residual, weight of the first GEMM, of the norm, and of a GEMM after it."""
    return zeros(2, tokens // 2, K), zeros(2, tokens // 2, H), zeros(H, K), zeros(H), zeros(K, H)


def block(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    total = residual + forms.all_reduce(linear(x, down))
    rows = forms.rms(total, norm)
    return linear(rows, up), linear(rows, up).relu()


def reported(
    fn: Callable[..., object], *given: Tensor, force: tuple[str, ...] = (RULE,), **more: object
) -> GraphReport:
    return previewed(fn, given or inputs(), force=force, **{"static": True, **more})  # type: ignore[arg-type]


def on(decision: Decision, fabric: Fabric, takes_norm: bool = False) -> Candidate:
    """`takes_norm`: with addition and norm in the first kernel."""
    [found] = [
        each
        for each in (decision.chosen, *decision.alternatives)
        if each.choice == RULE and each.fabric is fabric and each.variant.startswith(TILES_NORM) is takes_norm
    ]
    return found


def refused(report: GraphReport) -> set[str]:
    """Why the rule does not take the only site, on any fabric."""
    [decision] = [each for each in report.decisions if each.site.kind == "reduction"]
    [candidate] = [each for each in (decision.chosen, *decision.alternatives) if each.choice == RULE]
    return {reason.code for reason in candidate.rejections}


def calls(graph: fx.Graph, target: object) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def scatter_calls(graph: fx.Graph) -> list[GemmReduceScatterCall]:
    return [decode(GemmReduceScatterCall, str(node.args[4])) for node in calls(graph, SCATTER)]


def norm_calls(graph: fx.Graph) -> list[GemmReduceScatterNormCall]:
    return [decode(GemmReduceScatterNormCall, str(node.args[4])) for node in calls(graph, SCATTER_NORM)]


def gather_calls(graph: fx.Graph) -> list[AllGatherGemmCall]:
    return [decode(AllGatherGemmCall, str(node.args[4])) for node in calls(graph, GATHER)]
