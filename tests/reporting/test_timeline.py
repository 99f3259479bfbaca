"""The printed timeline: order of sites and kernels, hidden and exposed communication, totals, parts of the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from weaveopt.cli.layers import LayerPlan, scale
from weaveopt.records.candidate import Estimate, Term
from weaveopt.records.report import OutsideWork, Report
from weaveopt.reporting import parts, timeline
from weaveopt.reporting.timeline import Times


def test_kernels_stand_before_the_site_that_follows_them(whole: Report) -> None:
    graph = whole.graphs[0]
    names = [timeline.module_of(block) or "-" for block in timeline.blocks(graph)]
    assert names[:8] == [
        *("model.embed_tokens", "model.embed_tokens", "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn"),
        *("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.gate_proj", "-", "model.layers.0.mlp.down_proj"),
    ]
    assert names[-2:] == ["lm_head", "lm_head"]
    assert len(names) == len(graph.decisions) + len(graph.work)
    beyond = replace(graph, work=(OutsideWork("", "memory", 1.0, 99),))
    assert timeline.blocks(beyond)[-1] == beyond.work[0], "a kernel after more sites than there are is still there"


def test_kernels_without_a_module_belong_to_the_layer_around_them() -> None:
    modules = ("", "model.layers.0.mlp", "", "model.rotary_emb", "model.layers.1.mlp", "", "lm_head")
    assert timeline.layers_of(modules) == (None, 0, 0, None, 1, None, None)


def test_kernels_are_counted_like_sites(whole: Report) -> None:
    graph = whole.graphs[0]
    ones = replace(
        graph,
        decisions=tuple(replace(d, site=replace(d.site, count=1)) for d in graph.decisions),
        work=tuple(replace(work, count=1) for work in graph.work),
    )
    assert scale(ones, LayerPlan(8, (1, 7))) == graph


@pytest.mark.parametrize(
    ("terms", "exposed_us"),
    [
        ((("gemm", 30.0), ("all_reduce", 22.0), ("memory", 5.0)), 22.0),
        ((("gemm", 30.0), ("reduce", 22.0), ("overlapped", -10.0)), 12.0),
        ((("gemm", 30.0), ("reduce", 6.0), ("gather", 4.0), ("overlapped", -12.0)), 0.0),
        ((("gemm", 30.0), ("copy", 3.0), ("norm", 2.0)), 0.0),
    ],
)
def test_exposed_is_what_nothing_hides(terms: tuple[tuple[str, float], ...], exposed_us: float) -> None:
    assert Estimate(tuple(Term(*term) for term in terms)).exposed_us == exposed_us


def test_kinds_of_kernels_run_on_their_streams() -> None:
    kinds = ("gemm", "attention", "memory", "collective")
    assert [timeline.stream_of(kind) for kind in kinds] == ["compute", "compute", "compute", "communication"]
    assert timeline.stream_of("broadcast") == "communication", "words count, not letters: no `add` in it"


@pytest.mark.parametrize(
    "terms",
    [
        (("gemm", 30.0), ("reduce", 22.0), ("overlapped", -10.0), ("norm", 5.0)),
        (("gemm", 5.0), ("synchronize", 10.0), ("reduce", 10.0), ("norm", 20.0), ("overlapped", -12.0)),
        (("all_reduce", 40.0), ("gemm", 30.0), ("overlapped", -25.0)),
    ],
)
def test_spans_end_with_the_estimate_and_never_overlap_on_a_stream(terms: tuple[tuple[str, float], ...]) -> None:
    estimate = Estimate(tuple(Term(*term) for term in terms))
    spans = timeline.spans(estimate, 100.0)
    assert max(span.end_us for span in spans) == pytest.approx(100.0 + estimate.us)
    assert min(span.start_us for span in spans) == 100.0
    for stream in timeline.STREAMS:
        mine = sorted((span for span in spans if span.stream == stream), key=lambda span: span.start_us)
        assert all(a.end_us <= b.start_us + 1e-9 for a, b in pairwise(mine))


def test_totals_count_every_place(whole: Report) -> None:
    graph = whole.graphs[0]
    work_us = 3.0 + 8 * (40.0 + 25.0 + 90.0 + 5.0) + 260.0
    assert timeline.total(graph, fused=False) == Times(pytest.approx(graph.unfused_us + work_us), 16 * 300.0 + 60.0)
    assert timeline.total(graph, fused=True) == Times(pytest.approx(graph.predicted_us + work_us), 16 * 60.0 + 60.0)


def test_equal_layers_are_one_part_and_parts_add_up(whole: Report) -> None:
    graph = whole.graphs[0]
    found = parts.parts(graph)
    assert [(part.name, part.layers, part.count) for part in found] == [
        ("embedding", (), 1),
        ("layers 0…1", (0, 1), 8),
        ("head", (), 1),
    ]
    assert found[1].before == Times(2 * 450.5 + 160.0, 600.0)
    assert found[1].after == Times(2 * 160.0 + 160.0, 120.0)
    for fused in (False, True):
        summed = sum(((part.after if fused else part.before) * part.count for part in found), Times())
        expected = timeline.total(graph, fused)
        assert (summed.us, summed.exposed_us) == pytest.approx((expected.us, expected.exposed_us))
    assert parts.typical(graph) == found[1]


def test_layers_of_unequal_kernels_stay_apart(whole: Report) -> None:
    graph = whole.graphs[0]
    slower = tuple(replace(w, us=26.0) if w.module == "model.layers.0.self_attn" else w for w in graph.work)
    found = parts.parts(replace(graph, work=slower))
    assert [(part.name, part.count) for part in found][1:3] == [("layer 0", 1), ("layer 1", 7)]


def test_a_graph_without_layers_is_one_part(whole: Report) -> None:
    graph = replace(
        whole.graphs[0], decisions=(), work=(OutsideWork("", "gemm", 7.0, 0), OutsideWork("mlp", "memory", 1.0, 0))
    )
    (part,) = parts.parts(graph)
    assert (part.name, part.before, part.after) == ("whole", Times(8.0), Times(8.0))
