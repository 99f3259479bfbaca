"""Which layers are captured, and that the counts of what stands in always add up to the whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weaveopt.cli import layers, model_source, preview
from weaveopt.cli.layers import LayerPlan, every_layer, reduce, scale
from weaveopt.records.report import Report


@pytest.mark.parametrize(
    ("kinds", "counts"),
    [
        ("aaaaaaaaaa", (1, 8, 1)),
        ("aaa", (1, 1, 1)),
        ("aa", (1, 1)),
        ("a", (1,)),
        ("dddmmmmmmm", (1, 1, 1, 6, 1)),
        ("sfsfsfsf", (1, 3, 3, 1)),
        ("sssssfsssssfss", (1, 1, 1, 1, 8, 1, 1)),
        ("aaaaz", (1, 1, 1, 1, 1)),
        ("zaaaa", (1, 3, 1)),
        ("abc", (1, 1, 1)),
    ],
)
def test_captured_layers_stand_for_all(kinds: str, counts: tuple[int, ...]) -> None:
    plan = reduce(kinds)
    if counts == (1,) * len(kinds):
        assert plan == every_layer(len(kinds))
    assert sum(plan.counts) == len(kinds)
    for kind in set(kinds[:-1]):
        stood_for = sum(n for n, k in zip(plan.counts[:-1], kinds, strict=False) if k == kind)
        assert stood_for == kinds[:-1].count(kind)
    assert kinds[plan.captured - 1] == kinds[-1]
    assert plan.counts[-1] == 1


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("llama-3.3-70b", (1, 78, 1)),
        ("llama-3.1-405b", (1, 124, 1)),
        ("qwen2.5-72b", (1, 78, 1)),
        ("mixtral-8x22b", (1, 54, 1)),
        ("qwen3-235b-a22b", (1, 92, 1)),
        ("deepseek-v3", (1, 1, 1, 57, 1)),
        ("gpt-oss-120b", (1, 17, 17, 1)),
        ("gemma-3-27b", (1, 1, 1, 1, 47, 10, 1)),
    ],
)
def test_presets_are_captured_by_their_kinds_of_layers(name: str, counts: tuple[int, ...]) -> None:
    plan = preview.plan_layers(model_source.load(name), model_source.CaptureRequest(name, tp=2))
    assert plan.counts == counts
    assert sum(counts) == plan.total


def test_first_layers_and_all_layers() -> None:
    source = model_source.load("llama-3.3-70b")
    first = preview.plan_layers(source, model_source.CaptureRequest("llama-3.3-70b", tp=8, layers=3))
    every = preview.plan_layers(source, model_source.CaptureRequest("llama-3.3-70b", tp=8, full=True))
    assert (first.counts, every.counts) == ((1, 1, 1), (1,) * 80)
    assert (every.whole, first.whole) == (True, False)


def test_shortening_cuts_lists_with_one_entry_a_layer() -> None:
    config = model_source.load("gemma-3-27b").config
    short = layers.shortened(config, 7)
    assert (short.num_hidden_layers, short.layer_types) == (7, config.layer_types[:7])
    assert (short.hidden_size, short.rope_parameters) == (config.hidden_size, config.rope_parameters)
    assert config.num_hidden_layers == 62


def test_sites_are_counted_by_the_layer_of_their_module(report: Report) -> None:
    (graph,) = report.graphs
    ones = replace(graph, decisions=tuple(replace(d, site=replace(d.site, count=1)) for d in graph.decisions))
    counts = [d.site.count for d in scale(ones, LayerPlan(8, (3, 5))).decisions]
    assert counts == [1, 3, 3, 5, 5]
