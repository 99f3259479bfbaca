"""`weaveopt explain` from the command line to the report: all-reduces, estimates, alternatives, formats."""

from __future__ import annotations

import contextlib
import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.graphs.preview import without_sensitivity
from weaveopt import cost_model
from weaveopt.cli import explain
from weaveopt.cli.main import main
from weaveopt.cli.question import DEFAULT_MACHINE, ExplainArguments
from weaveopt.fabrics.traits import header_bytes
from weaveopt.pipeline.sensitivity import words
from weaveopt.records.candidate import Fabric
from weaveopt.records.report import Decision, Report
from weaveopt.reporting.document_reader import from_json
from weaveopt.reporting.memory import routing_lines
from weaveopt.reporting.timeline import total

EMBEDDING = 1
"""All-reduces after the embedding, which is shared by vocabulary."""


SCREEN = 30
"""Lines of a terminal's window."""


def _explain(words: str, tmp_path: Path, sensitivity: bool = False) -> Report:
    file = tmp_path / "report.json"
    with contextlib.nullcontext() if sensitivity else without_sensitivity():
        assert main(["explain", *words.split(), "--format", "json", "--output", str(file)]) == 0
    return from_json(file.read_text(encoding="utf-8"))


def _num_all_reduces(report: Report) -> int:
    return sum(d.site.count * len(d.site.collectives) for graph in report.graphs for d in graph.decisions)


def _assert_complete(decision: Decision) -> None:
    """A choice, an estimate with its terms before and after, and every alternative with its reasons."""
    assert decision.baseline is not None
    assert decision.baseline.terms
    assert decision.chosen.estimate is not None
    assert decision.chosen.estimate.terms
    assert decision.chosen.allowed
    assert decision.alternatives
    for candidate in decision.alternatives:
        assert candidate.estimate is not None or candidate.rejections, candidate
        assert all(r.code and r.message for r in candidate.rejections)


def test_one_rank_has_local_sites_and_no_communication(tmp_path: Path) -> None:
    report = _explain("qwen3-235b-a22b --tp 1 --batch 8 --phase decode --machine h200x4", tmp_path)
    (graph,) = report.graphs
    assert report.world == 1 and {each.site.kind for each in graph.decisions} == {"attention", "mixture", "projections"}
    assert all(each.rewritten and not each.site.groups for each in graph.decisions)
    for fused in (False, True):
        assert total(graph, fused).us > 0 and total(graph, fused).exposed_us == 0


def test_the_cache_of_a_decode_step_is_full(tmp_path: Path) -> None:
    """A layer with a window reads all of its keys, not the few that an empty cache would have."""
    report = _explain("gemma-3-27b --tp 8 --batch 2 --seq 2048 --layers 1 --phase decode --machine h100x8", tmp_path)
    (graph,) = report.graphs
    (attention,) = [each for each in graph.decisions if each.site.kind == "attention"]
    facts = dict(attention.site.facts)
    assert (facts["keys"], facts["mask"]) == (1024, "none"), facts


def test_llama_70b_accounts_for_every_all_reduce(tmp_path: Path) -> None:
    report = _explain("llama-3.3-70b --tp 8 --tokens 4096 --machine h100x8", tmp_path, sensitivity=True)
    assert (report.model, report.world, report.fallbacks) == ("llama-3.3-70b", 8, ())
    assert report.machine is not None
    assert report.machine.name == "h100x8"
    (graph,) = report.graphs
    assert (graph.phase, graph.tokens) == ("prefill", 4096)
    assert _num_all_reduces(report) == 160 + EMBEDDING
    for decision in graph.decisions:
        _assert_complete(decision)
        assert decision.site.tokens.hint == 4096
        facts = dict(decision.site.facts)
        if decision.site.kind == "attention":
            sizes = [facts[name] for name in ("heads", "kv_heads", "queries", "keys", "head_dim")]
            assert sizes == [8, 1, 4096, 4096, 128]
        elif decision.site.kind == "projections":
            assert facts["k"] == 8192 and facts["columns"] in ("1024 + 128 + 128", "3584 + 3584")
        else:
            assert facts["hidden"] == 8192
    counts = Counter({"attention": 0, "reduction": 0, "projections": 0})
    for decision in graph.decisions:
        counts[decision.site.kind] += decision.site.count
    assert counts == {"attention": 80, "reduction": 160 + EMBEDDING, "projections": 160}
    asked = {site: found for found in graph.sensitivity for site in found.sites}
    assert set(asked) == {decision.site.id for decision in graph.decisions}
    for decision in graph.decisions:
        found = asked[decision.site.id]
        assert (found.tokens, found.choice) == (4096, words(decision.chosen))
        assert found.stretches[0].tokens == 1
        assert found.constants
        if decision.rewritten and decision.site.groups:
            assert {choice for _, choice in found.constants} > {found.choice}, "some constant turns it"
        elif decision.rewritten:  # no attention was measured on this machine: the same constants price every kernel
            assert {choice for _, choice in found.constants} == {found.choice}


def test_mixtral_on_cpu_ranks_in_decode(tmp_path: Path) -> None:
    words = "mixtral-8x22b --tp 2 --machine cpu --phase decode --batch 4 --seq 128 --skew 0.5:0.25"
    report = _explain(words, tmp_path)
    (graph,) = report.graphs
    assert (graph.phase, graph.tokens) == ("decode", 4)
    assert _num_all_reduces(report) == 2 * 56 + EMBEDDING
    assert sum(d.site.count for d in graph.decisions if d.rewritten) > 0
    assert sum(plan.num_bytes for plan in graph.plans) > 0
    assert list(routing_lines(graph)) == ["rows by expert: 1 on average, 2 of the busiest (routing 0.5:0.25)"]


@pytest.mark.parametrize("op", ["all_reduce_norm", "gemm_all_reduce"])
def test_a_curve_of_no_kernel_is_refused_in_one_line(
    op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rules alone know their kernels' names, so it is found when a site is priced."""
    document = json.loads(cost_model.dumps(cost_model.load("h200x4")))
    next(each for each in document["fabrics"]["peer"]["curves"] if each["op"] == op)["variant"] = "two_shot blk"
    profile = tmp_path / "own.json"
    profile.write_text(json.dumps(document))
    words = ["llama-3.3-70b", "--tp", "2", "--layers", "1", "--tokens", "64", "--machine", str(profile)]
    assert main(["explain", *words]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert f"profile {profile}: a curve of {op}: found variant 'two_shot blk', expected " in captured.err


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions that differ in the form of their report alone are answered by one capture."""
    asked_before, answer = dict[ExplainArguments, Report](), explain.explain

    def remembering(asked: ExplainArguments, on_step: Callable[[str], None]) -> Report:
        whole = replace(asked, full=True, why=None, format=None, output=None)
        if whole not in asked_before:
            asked_before[whole] = answer(whole, on_step)
        return asked_before[whole]

    monkeypatch.setattr(explain, "explain", remembering)


@pytest.mark.usefixtures("captured_once")
def test_defaults_disable_why_and_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEAVE_MACHINE", raising=False)
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256, **config}))
    assert main(["explain", str(tmp_path), "--seq", "16"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert f"machine: {DEFAULT_MACHINE} (nothing measured on it)" in captured.out
    assert f"{tmp_path.name} on 4 ranks" in captured.out  # as many as the heads allow
    assert "16 tokens, logits of the last" in captured.out
    assert "what would make it faster" in captured.out
    assert all(words not in captured.out for words in ("why not", "arena", "all else held"))
    assert len(captured.out.splitlines()) <= SCREEN
    assert main(["explain", str(tmp_path), "--seq", "16", "--full"]) == 0
    full = capsys.readouterr().out
    assert all(words in full for words in ("why not", "arena", "all else held"))
    assert full.count("nvshmem") == full.count("tcp") == 1, "a fabric that cannot be there is one line for all sites"

    disabled = ("--disable", "all_reduce_rms_norm,gemm_all_reduce,shard_norm")
    cpu = ["explain", str(tmp_path), "--tp", "2", "--seq", "16", "--machine", "cpu", *disabled]
    assert main([*cpu, "--why", "self_attn.o_proj"]) == 0
    text = capsys.readouterr().out
    assert "chosen: leave on library" in text
    assert "model.layers.0.self_attn.o_proj" in text

    assert main([*cpu, "--format", "trace"]) == 0
    events = json.loads(capsys.readouterr().out)["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}


@pytest.mark.parametrize(("phase", "tokens"), [("prefill", 2048), ("decode", 8)])
def test_llama_70b_on_gpus_that_reach_each_other(phase: str, tokens: int, tmp_path: Path) -> None:
    report = _explain(f"llama-3.3-70b --tp 4 --machine h200x4 --phase {phase} --tokens {tokens}", tmp_path)
    (graph,) = report.graphs
    rewritten = [d for d in graph.decisions if d.rewritten and d.site.groups]
    assert rewritten and {d.chosen.fabric for d in rewritten} == {Fabric.PEER}
    local = [d for d in graph.decisions if d.rewritten and not d.site.groups]
    assert all((d.chosen.fabric, d.chosen.table) == (Fabric.LIBRARY, ()) for d in local), "they meet no other rank"
    assert {d.chosen.table[-1].max_tokens for d in rewritten} == {tokens}
    (plan,) = graph.plans
    assert plan.num_bytes == header_bytes(Fabric.PEER) + sum(buffer.num_bytes for buffer in plan.buffers)
    for decision in graph.decisions:
        _assert_complete(decision)
        assert decision.chosen.estimate is not None
        assert "copy" not in {term.name for term in decision.chosen.estimate.terms}


def test_why_of_an_unknown_site_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256, **config}))
    assert main(["explain", str(tmp_path), "--tp", "2", "--seq", "16", "--why", "nothing_like_it"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("weaveopt: error: --why nothing_like_it: no such site")
    assert captured.err.count("\n") == 1


def test_python_hardly_looks_for_garbage_while_it_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tenth of the time went into that: nothing that tracing makes can be let go before the report."""
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256, **config}))
    of_suite, before, looks = gc.get_threshold(), (700, 10, 10), 0

    def count(phase: str, _: object) -> None:
        nonlocal looks
        looks += phase == "start"

    gc.set_threshold(*before)  # Python's own: those of the tests are so high that it hardly looks anyway
    gc.callbacks.append(count)
    try:
        assert main(["explain", str(tmp_path), "--tp", "2", "--seq", "16"]) == 0
        after = gc.get_threshold()
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*of_suite)
    assert "16 tokens" in capsys.readouterr().out
    assert looks < 25, f"{looks} collections"
    assert after == before
