"""A report made by hand: two kinds of sites, one of them left, every kind of field in use; and one of a whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.graphs.uncertain import estimate_of
from weaveopt.records.candidate import LEAVE, Candidate, Fabric, Rejection
from weaveopt.records.memory import Channel, Lifetime, MemoryPlan, PlacedBuffer
from weaveopt.records.report import Decision, Fallback, GraphReport, MachineSummary, OutsideWork, Report, Variant
from weaveopt.records.site import Site, TokenCounts

RULE = "all_reduce_rms_norm"


def _site(layer: int, module: str, count: int) -> Site:
    return Site(
        id=f"{RULE}.{layer}.{module}",
        kind="reduction",
        groups=("0",),
        module=f"model.layers.{layer}.{module}",
        collectives=(f"all_reduce_{layer}_{module}",),
        description="all_reduce(mm) + residual -> rms_norm(eps=1e-05)",
        tokens=TokenCounts(512),
        facts=(("world", 2), ("hidden", 1024), ("dtype", "bfloat16"), ("out_dtype", ""), ("has_residual", True)),
        count=count,
    )


def _rewritten(layer: int, module: str, count: int) -> Decision:
    baseline = estimate_of(0.1, ("gemm", 100.0), ("all_reduce", 300.0), ("memory", 50.5))
    fused = estimate_of(0.1, ("gemm", 100.0), ("reduce", 80.0), ("overlapped", -20.0))
    slow = estimate_of(0.1, ("gemm", 100.0), ("reduce", 140.0))
    return Decision(
        site=_site(layer, module, count),
        chosen=Candidate(RULE, Fabric.SHM, "two_shot", (("one_shot_max_tokens", 64),), fused),
        alternatives=(
            Candidate(LEAVE, estimate=baseline),
            Candidate(RULE, Fabric.SHM, "one_shot", (("one_shot_max_tokens", 512),), slow),
            Candidate(
                RULE,
                Fabric.PEER,
                "two_shot",
                rejections=(
                    Rejection("fabric_needs_cuda", "peer joins GPUs", (("device", "cpu"),)),
                    Rejection("no_kernel", "this version has no peer kernel"),
                ),
            ),
        ),
        baseline=baseline,
    )


def _left() -> Decision:
    site = Site(
        id="left.0",
        kind="reduction",
        groups=("0",),
        module="model.embed_tokens",
        collectives=("all_reduce",),
        rejections=(Rejection("no_norm", "the sum is read by 2 nodes and none is a norm", (("readers", 2),)),),
    )
    return Decision(site, Candidate(LEAVE), (), None)


@pytest.fixture
def report() -> Report:
    decisions = (
        _left(),
        _rewritten(0, "self_attn.o_proj", 1),
        _rewritten(0, "mlp.down_proj", 1),
        _rewritten(1, "self_attn.o_proj", 7),
        _rewritten(1, "mlp.down_proj", 7),
    )
    gathering = replace(decisions[1], chosen=replace(decisions[1].chosen, notes=("gather: the whole sum",)))
    decisions = (decisions[0], gathering, *decisions[2:])
    owners = tuple(d.site.id for d in decisions if d.rewritten)
    buffers = (
        PlacedBuffer("partial", 0, 2 << 20, Lifetime.ARENA, owners, 0, 3, None, 4096),
        PlacedBuffer("output", 2 << 20, 2 << 20, Lifetime.CALL, owners[:1], 0, 0, None, 4096, 2 << 20),
    )
    plan = MemoryPlan("0", Fabric.SHM, 4 << 20, buffers, (Channel("main", 0),))
    graph = GraphReport(
        name="graph_0",
        phase="prefill",
        tokens=512,
        decisions=decisions,
        plans=(plan,),
        rounding=("all_reduce_rms_norm: the sum is rounded once, not at each step",),
        steps_us=(("recognize", 1200.0), ("decide", 300)),
        variants=(Variant("captured", "", 9000.0, 4000.0),),
    )
    return Report(
        model="tiny",
        world=2,
        machine=MachineSummary("cpu", False, (("memory", "measured 2026-11-20 host"), ("gemm", "datasheet: vendor"))),
        graphs=(graph,),
        fallbacks=(Fallback("graph_1", "recognize", "ValueError: odd"),),
        notes=("tensor parallel over 2 ranks on 1 host; prefill of 1 × 512 tokens",),
    )


def _layer_work(layer: int, after: int, count: int) -> tuple[OutsideWork, ...]:
    """Kernels of a layer outside its two sites: the first projection and attention, then the wide GEMMs."""
    path = f"model.layers.{layer}"
    return (
        OutsideWork(f"{path}.self_attn.qkv_proj", "gemm", 40.0, after, count),
        OutsideWork(f"{path}.self_attn", "attention", 25.0, after, count),
        OutsideWork(f"{path}.mlp.gate_proj", "gemm", 90.0, after + 1, count),
        OutsideWork("", "memory", 5.0, after + 1, count),
    )


@pytest.fixture
def whole(report: Report) -> Report:
    """The same report with what the graph runs outside its sites; the head gathers the logits."""
    work = (
        OutsideWork("model.embed_tokens", "memory", 3.0, 0),
        *_layer_work(0, 1, 1),
        *_layer_work(1, 3, 7),
        OutsideWork("lm_head", "gemm", 200.0, 5),
        OutsideWork("lm_head", "collective", 60.0, 5),
    )
    return replace(report, graphs=(replace(report.graphs[0], work=work),))
