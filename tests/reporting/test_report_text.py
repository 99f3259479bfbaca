"""The report as text: the golden table, and that nothing of it is lost at any width."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weaveopt.errors import OptionError
from weaveopt.fabrics.traits import header_bytes
from weaveopt.records.candidate import Candidate, Fabric, Rejection, TableRow
from weaveopt.records.memory import Lifetime, PlacedBuffer
from weaveopt.records.report import (
    RULE_FAILED,
    ChoiceRange,
    Decision,
    MachineSummary,
    Report,
    Sensitivity,
    Variant,
    WorkFailure,
)
from weaveopt.reporting import memory, parts, reasons, screen, timeline, why
from weaveopt.reporting import text as render
from weaveopt.reporting.headline import headline

GOLDEN = Path(__file__).parent / "golden"
RULE = "all_reduce_rms_norm"


def test_the_table_is_the_golden_one(report: Report) -> None:
    assert render.text(report) == (GOLDEN / "report.txt").read_text(encoding="utf-8")


def test_the_table_of_a_whole_model_is_the_golden_one(whole: Report) -> None:
    table = (
        ChoiceRange(1, f"{RULE} shm one_shot"),
        ChoiceRange(65, f"{RULE} shm two_shot"),
        ChoiceRange(6000, "leave"),
    )
    constants = (("memory bandwidth -20 %", f"{RULE} shm two_shot"), ("relative_error ×2", "leave"))
    sites = tuple(d.site.id for d in whole.graphs[0].decisions[1:])
    found = Sensitivity(sites, 512, f"{RULE} shm two_shot", table, constants)
    asked = replace(whole, graphs=(replace(whole.graphs[0], sensitivity=(found,)),))
    assert render.text(asked) == (GOLDEN / "whole.txt").read_text(encoding="utf-8")
    assert "from 65 shm two_shot (here: 512)" in why.text(asked, sites[0])


def test_why_is_the_golden_one(report: Report) -> None:
    assert why.text(report, "model.layers.1.mlp.down_proj") == (GOLDEN / "why.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 100, 120, 160, 240])
def test_no_column_and_no_reason_is_lost(report: Report, width: int) -> None:
    text = render.text(report, width)
    squeezed = "".join(text.split())
    header = next(line for line in text.splitlines() if line.startswith("site"))
    assert header.split() == ["site", "×", *["form", "choice", "fabric", "unfused", "us", "predicted", "us", "saved"]]
    for decision in report.graphs[0].decisions:
        rejected = [r for c in (decision.chosen, *decision.alternatives) for r in c.rejections]
        for rejection in (*decision.site.rejections, *rejected):
            assert rejection.code in squeezed or rejection.code in ("fabric_needs_cuda", "no_kernel")
    assert squeezed.count("nofabrichere:peerjoinsGPUs(device=cpu)") == 1, "one line, in place of what it makes moot"
    assert "64%" in text
    assert all(len(line) <= width for line in text.splitlines())


def _on_gpus(report: Report) -> Report:
    """The same with its sites on peer: they run by a table, and share the buffers."""
    table = (
        TableRow(24, "one_shot ll_packet"),
        TableRow(512, "two_shot ll_packet"),
        TableRow(4096, "two_shot bulk", (("num_ctas", 64),)),
    )
    parameters = (("form", "bulk"), ("num_ctas", 64), ("max_tokens", 4096), ("measured", True))

    def moved(decision: Decision) -> Decision:
        if not decision.rewritten:
            return decision
        site = replace(decision.site, tokens=replace(decision.site.tokens, most=8192))
        chosen = replace(
            decision.chosen, fabric=Fabric.PEER, variant="two_shot bulk", parameters=parameters, table=table
        )
        slower = Rejection("slower_algorithm", "two_shot bulk is predicted faster at this size", (("tokens", 512),))
        mail = replace(
            chosen,
            variant="two_shot ll_packet",
            parameters=(("form", "ll_packet"), ("num_ctas", 0)),
            rejections=(slower,),
        )
        direct = (("form", "direct"), ("measured", False))
        switch = replace(chosen, fabric=Fabric.MULTIMEM, variant="two_shot direct", parameters=direct, rejections=())
        alternatives = (decision.alternatives[0], replace(mail, variant="one_shot ll_packet"), mail, switch)
        return replace(decision, site=site, chosen=chosen, alternatives=alternatives)

    graph = report.graphs[0]
    owners = tuple(d.site.id for d in graph.decisions if d.rewritten)
    sizes = {"mailboxes": 2 << 20, "output": 3 << 20, "staging": 2 << 20}
    starts = [sum(list(sizes.values())[:at]) for at in range(len(sizes))]
    buffers = tuple(
        PlacedBuffer(name, start, size, Lifetime.ARENA, owners)
        for (name, size), start in zip(sizes.items(), starts, strict=True)
    )
    plan = replace(graph.plans[0], fabric=Fabric.PEER, num_bytes=header_bytes(Fabric.PEER) + (7 << 20), buffers=buffers)
    moved_graph = replace(graph, decisions=tuple(map(moved, graph.decisions)), plans=(plan,))
    return replace(report, graphs=(moved_graph,))


def test_a_table_is_told_once_with_its_forms_and_ctas(report: Report) -> None:
    squeezed = " ".join(render.text(_on_gpus(report)).split())
    table = (
        "peer table, hidden 1024: up to 24 tokens one_shot ll_packet, up to 512 two_shot ll_packet, "
        "up to 4096 two_shot bulk on 64 CTAs, more through the library"
    )
    assert squeezed.count(table) == 1
    assert "two_shot bulk 64" in squeezed
    assert "unmeasured: multimem two_shot direct (predicted from a paper or a model)" in squeezed
    owners = "model.layers.*.self_attn.o_proj ×8, model.layers.*.mlp.down_proj ×8"
    assert "arena of group 0 on peer: 7,475,200 bytes in 3 buffers" in squeezed
    assert f"mailboxes at 0 2,097,152 bytes {owners}" in squeezed
    assert f"output at 2,097,152 3,145,728 bytes {owners}" in squeezed
    assert f"staging at 5,242,880 2,097,152 bytes {owners}" in squeezed
    assert "gather: the whole sum: 1 place: model.layers.*.self_attn.o_proj" in squeezed


def test_a_reason_names_the_kernels_that_it_holds_for(report: Report) -> None:
    decisions = _on_gpus(report).graphs[0].decisions
    (slower,) = (reason for reason in reasons.collect(decisions) if reason.code == "slower_algorithm")
    assert slower.where(reasons.tried(decisions)) == "peer one_shot ll_packet and two_shot ll_packet"
    assert slower.num_places == 16


def test_why_tells_the_table_of_a_site(report: Report) -> None:
    squeezed = " ".join(why.text(_on_gpus(report), "model.layers.1.mlp.down_proj").split())
    assert "chosen: all_reduce_rms_norm on peer, two_shot bulk form=bulk num_ctas=64" in squeezed
    assert "run-time table: up to 24 tokens one_shot ll_packet, up to 512 two_shot ll_packet" in squeezed


def test_what_a_rule_says_is_told_once_with_its_places(report: Report) -> None:
    graph = report.graphs[0]
    noted = {1: ("no copy: a",), 2: ("no copy: a", "gather: b"), 3: ("no copy: a",)}
    decisions = tuple(
        replace(d, chosen=replace(d.chosen, notes=noted.get(index, ()))) for index, d in enumerate(graph.decisions)
    )
    assert list(memory.note_lines(replace(graph, decisions=decisions))) == [
        "no copy: a: 9 places: model.layers.*.self_attn.o_proj, model.layers.*.mlp.down_proj",
        "gather: b: 1 place: model.layers.*.mlp.down_proj",
    ]
    silent = tuple(replace(d, chosen=replace(d.chosen, notes=())) for d in decisions)
    assert list(memory.note_lines(replace(graph, decisions=silent))) == []


def test_a_buffer_says_how_long_it_lives(report: Report) -> None:
    graph = report.graphs[0]
    (plan,) = graph.plans
    later = replace(plan, buffers=(replace(plan.buffers[1], lifetime=Lifetime.UNTIL_READ, owners=("who",)),))
    assert [row[0] for row in memory.arena_rows(plan, graph.decisions)] == ["partial", "output (call)"]
    assert list(memory.arena_rows(later, graph.decisions)) == [
        ("output (until read)", "2,097,152", "2,097,152", "who ×1")
    ]


def test_buffers_that_sites_have_one_after_the_other_are_one_row(report: Report) -> None:
    graph = report.graphs[0]
    (plan,) = graph.plans
    output, owners = plan.buffers[1], [d.site.id for d in graph.decisions if d.rewritten]
    many = tuple(replace(output, owners=(owner,), first=at, last=at) for at, owner in enumerate(owners))
    elsewhere = replace(output, offset=8 << 20)
    rows = list(memory.arena_rows(replace(plan, buffers=(*many, elsewhere)), graph.decisions))
    every = "model.layers.*.self_attn.o_proj ×8, model.layers.*.mlp.down_proj ×8"
    assert [row[3] for row in rows] == [every, "model.layers.*.self_attn.o_proj ×1"]


def test_variants_are_told_where_there_are_several(report: Report) -> None:
    graph = report.graphs[0]
    assert "variant" not in render.text(report)
    slower = Rejection("no_saving", "the predicted saving does not exceed the model's own error")
    several = (Variant("captured", "", 9000.0, 4000.0), Variant("halves", "split", 8000.0, 3990.0, (slower,)))
    lines = render.text(replace(report, graphs=(replace(graph, variants=several),))).splitlines()
    assert "variant captured: 9,000.0 -> 4,000.0 us; runs" in lines
    assert f"variant halves (split): 8,000.0 -> 3,990.0 us; no_saving: {slower.message}" in lines


def test_headline_of_a_variant_that_runs_is_its_timeline(report: Report) -> None:
    """Sites of a variant overlap, which a sum over them does not see."""
    graph = report.graphs[0]
    several = (Variant("captured", "", 9000.0, 8000.0), Variant("halves", "split", 9500.0, 4500.0, exposed_us=450.0))
    summed, captured = headline(graph), headline(replace(graph, variants=several))
    assert captured == summed, "the captured graph runs"
    found = headline(replace(graph, variants=several, variant="halves"))
    once_us = sum(timeline.times_of(block, fused=False).us for block in timeline.blocks(graph))
    assert found.counting == found.chosen and found.chosen.us == pytest.approx(4500.0 * summed.before.us / once_us)
    assert found.chosen.exposed_us == pytest.approx(found.chosen.us / 10)
    assert found.before.us / found.chosen.us == pytest.approx(2.0)


def test_layers_of_a_kind_are_one_row_with_their_places_added_up(report: Report) -> None:
    rows = render.rows_of(report.graphs[0])
    assert [(row.module, row.count) for row in rows] == [
        ("model.embed_tokens", 1),
        ("model.layers.*.self_attn.o_proj", 8),
        ("model.layers.*.mlp.down_proj", 8),
    ]


def test_a_reason_is_told_once_with_the_range_of_its_values(report: Report) -> None:
    decision = report.graphs[0].decisions[1]

    def rejected(us: float, fabric_index: int) -> Candidate:
        candidate = decision.alternatives[fabric_index]
        return replace(candidate, rejections=(Rejection("no_saving", "too slow", (("us", us), ("tokens", 3))),))

    first = replace(decision, alternatives=(rejected(2.0, 1), rejected(7.5, 2)))
    second = replace(first, site=replace(first.site, id="other", count=5))
    (found,) = reasons.collect((first, second))
    assert found.num_places == 6
    assert found.sentence() == "too slow (us=2.0…7.5, tokens=3)"
    assert found.where({"shm": ["one_shot", "two_shot"], "peer": ["two_shot"]}) == "shm one_shot, peer"


def test_why_finds_by_id_module_and_kind_and_names_the_nearest_otherwise(report: Report) -> None:
    decisions = report.graphs[0].decisions
    assert [d for _, d in why.find(report, decisions[1].site.id)] == [decisions[1]]
    assert [d for _, d in why.find(report, "model.layers.*.mlp.down_proj")] == [decisions[2], decisions[4]]
    assert [d for _, d in why.find(report, "o_proj")] == [decisions[1], decisions[3]]
    with pytest.raises(OptionError, match=r"did you mean 'model\.embed_tokens'"):
        why.find(report, "model.embed_token_")


def test_fallbacks_and_missing_parts_are_said(report: Report) -> None:
    assert "ValueError: odd" in render.text(report) and "fault:" not in render.text(report)
    failed = Variant("halves", "halves", rejections=(Rejection(RULE_FAILED, "KeyError: 'mul'"),))
    graph = replace(report.graphs[0], variants=(*report.graphs[0].variants, failed))
    faulty = replace(report, graphs=(graph,))
    for text in (render.text(faulty), screen.text(faulty)):
        assert "fault: graph graph_0 has no variant of halves, which failed: KeyError: 'mul'" in text
    bare = Report("m", 2, MachineSummary("h", True))
    assert "every constant measured" in render.text(bare)
    assert "no graph was compiled yet" in render.text(bare)


def test_work_that_could_not_be_estimated_is_told_with_and_without_sites(report: Report) -> None:
    assert "could not be estimated" not in render.text(report)
    for decisions in (report.graphs[0].decisions, ()):
        graph = replace(report.graphs[0], decisions=decisions, work_failure=WorkFailure("KeyError", ""))
        lines = render.text(replace(report, graphs=(graph,))).splitlines()
        assert "the work outside the sites of graph_0 could not be estimated: KeyError: no message" in lines
        assert not any("graph_0 runs unrewritten" in line for line in lines)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_figure_of_the_whole_is_cut(whole: Report, width: int) -> None:
    graph = whole.graphs[0]
    large = replace(whole, graphs=(replace(graph, work=tuple(replace(w, us=w.us * 7000.3) for w in graph.work)),))
    text = render.text(large, width)
    assert all(len(line) <= width for line in text.splitlines())
    for part in parts.parts(large.graphs[0]):
        for times in (part.before, part.after):
            assert f"{times.us:,.1f}" in text and f"{times.exposed_us:,.1f}" in text
    assert f"{timeline.total(large.graphs[0], fused=False).us:,.1f}" in text
