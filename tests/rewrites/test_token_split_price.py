"""Token splits by price: of the link, and of contention that a profile has measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.emulation.slow_hosts import machine
from tests.ranks import run_ranks
from weaveopt.cli import model_source
from weaveopt.cli import preview as previews
from weaveopt.cli.model_source import CaptureRequest
from weaveopt.config import Config
from weaveopt.cost_model import Machine, load
from weaveopt.fabrics import topology
from weaveopt.measure.cases.hosts_contention import HostContention
from weaveopt.measure.session import CalibrationSession
from weaveopt.preview import preview
from weaveopt.records.candidate import LEAVE, Fabric
from weaveopt.records.report import GraphReport
from weaveopt.records.task import Stream

TOKENS = 512
MODEL = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip


Explain = Callable[..., GraphReport]


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Explain:
    """The report of a prompt on 2 ranks, without peers."""

    @cache
    def report(where: Machine, hosts: int = 2, num_layers: int = 1) -> GraphReport:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": num_layers}))
        request = CaptureRequest(str(folder), tp=2, batch=1, seq=TOKENS, phase="prefill", dtype="float32", nodes=2)
        source = model_source.load(request.model)
        plan = previews.plan_layers(source, request)
        graphs: list[GraphReport] = []
        backend = preview(Config(), topology.fake(2, hosts, "cpu"), where, graphs.append)
        previews.capture(source, request, plan, backend)
        [found] = graphs
        return found

    return report


def why(graph: GraphReport) -> list[str]:
    """Codes against the rule's variant."""
    [variant] = [each for each in graph.variants if each.rule == "token_split"]
    return [each.code for each in variant.rejections]


def test_a_slow_link_splits_tokens(explained: Explain) -> None:
    """Exchanges take longer than the computation that hides in them; what is left is nearly all exchange."""
    graph = explained(machine(0.25, 1.1))
    captured, chosen = graph.variants
    assert graph.variant == chosen.name == "token_split by sequence" and why(graph) == []
    assert captured.predicted_us is not None and chosen.predicted_us is not None
    assert captured.predicted_us / chosen.predicted_us > 1.1
    assert captured.exposed_us is not None and chosen.exposed_us is not None
    assert captured.added_us is None and chosen.added_us is not None
    assert chosen.exposed_us < captured.exposed_us and abs(chosen.added_us) < 0.5 * captured.predicted_us


def test_the_schedule_of_a_split_is_in_the_report(explained: Explain) -> None:
    """It ends with the predicted time, and exchanges run at the same time as computation."""
    graph = explained(machine(0.25, 1.1))
    for variant, tasks, us in (
        (graph.variants[0], graph.schedule_before, graph.variants[0].baseline_us),
        (graph.variants[1], graph.schedule, graph.variants[1].predicted_us),
    ):
        assert max(each.start_us + each.us for each in tasks) == pytest.approx(us), variant.name
        exchanges = [each for each in tasks if each.stream is Stream.COMMUNICATION]
        computing = [each for each in tasks if each.stream is Stream.COMPUTE]
        at_once = [a for a in exchanges for b in computing if a.start_us < b.start_us < a.start_us + a.us]
        assert bool(at_once) is (variant.name == graph.variant), variant.name
    assert {each.module.split(".")[-1] for each in graph.schedule} >= {"down_proj", "o_proj", "embed_tokens"}
    assert explained(machine(100.0, 1.1)).schedule == (), "the captured graph runs: its sites follow one another"
    assert not [each for each in graph.decisions if each.rewritten and each.chosen.fabric is Fabric.SHM]


@pytest.mark.parametrize(
    ("gbit", "contention", "hosts", "code"),
    [(0.25, None, 2, "not_measured"), (0.25, 3.0, 2, "no_saving"), (10.0, 1.1, 2, "no_saving"),
     (100.0, 1.1, 2, "nothing_exposed"), (0.25, 1.1, 1, "nothing_exposed")],
    ids=["not measured", "contended", "fast link", "faster link", "one host"],
)  # fmt: skip
def test_why_the_captured_graph_runs(
    explained: Explain, gbit: float, contention: float | None, hosts: int, code: str
) -> None:
    graph = explained(machine(gbit, contention), hosts)
    assert graph.variant == "captured" and why(graph) == [code]


def test_a_saving_is_judged_by_each_parts_share(explained: Explain) -> None:
    """GEMMs of half of the tokens are priced as such before a graph is built, and as the graph that is built."""
    graph = explained(machine(1.0, 1.05), num_layers=2)
    captured, chosen = graph.variants
    assert graph.variant == chosen.name and chosen.predicted_us is not None and captured.predicted_us is not None
    assert chosen.predicted_us < 0.94 * captured.predicted_us


def _contention(rank: int) -> tuple[float, float, float]:
    import torch

    found = HostContention()
    found.measure(CalibrationSession(torch.device("cpu"), lambda *_: None, quick=True))
    [row] = found.contention().rows
    return row.gemm, row.communication, found.exchange.us


def test_a_split_is_of_exchanges_whose_contention_was_measured(tmp_path: Path) -> None:
    """Alone, kernels of the fabric `host` are faster than the library's exchange, and one kind of sites gains nothing
    by leaving them; how much they slow a GEMM down that runs meanwhile no profile says."""
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **shape, "num_hidden_layers": 2}))
    request = CaptureRequest(str(tmp_path), tp=2, batch=1, seq=1024, phase="prefill", dtype="bfloat16")
    source, graphs = model_source.load(request.model), list[GraphReport]()
    backend = preview(Config(), topology.fake(2, 1, "cuda"), load("h200x2-no-peer"), graphs.append)
    previews.capture(source, request, previews.plan_layers(source, request), backend)
    [graph] = graphs
    assert graph.variant.startswith("token_split") and why(graph) == []
    assert {each.chosen.choice for each in graph.decisions if each.site.kind == "reduction"} == {LEAVE}
    [whole, split] = graph.variants
    assert split.predicted_us < 0.9 * whole.predicted_us


def test_contention_is_measured_alike_on_all_ranks() -> None:
    """Factors are those of the slowest rank, and never below one."""
    (gemm, communication, us), other = run_ranks(_contention, 2, timeout_s=120)
    assert other[:2] == (gemm, communication)
    assert gemm >= 1.0 and communication >= 1.0 and us > 0.0
