"""Compiled graphs for regimes of token counts: guards that torch honours, alike on all ranks, never more than four."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.emulation.machines import Times, made_up
from tests.graphs import forms
from tests.graphs.executing import executing
from tests.graphs.tolerances import LIBRARY, assert_close
from tests.ranks import run_ranks
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.records.report import GraphReport, Regime
from weaveopt.solver.regimes import MAX_REGIMES

ROW_BYTES = forms.HIDDEN * 4
FLIPS: Times = {1: 10.0, 20: 10.0, 4000: 1000.0}
"""An all-reduce by the library, where the fused kernel always takes 20 us: they meet at 49 tokens."""
STAIRS: Times = {tokens + more: 20.0 + tokens for tokens in range(0, 400, 40) for more in (1, 40)}
"""The library in steps of 40 tokens,"""
SLOPE: Times = {tokens: float(tokens) for tokens in range(1, 420, 20)}
"""and a fused kernel that takes a straight line through them: they change places 19 times."""


def profile(folder: Path, library: Times, fused: Times) -> str:
    path = folder / "made_up.json"
    path.write_text(cost_model.dumps(made_up(library, fused, ROW_BYTES)))
    return str(path)


def inputs_for(rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(1, tokens, forms.INNER, generator=torch.Generator().manual_seed(rank))
    return x, torch.randn(1, tokens, forms.HIDDEN, generator=torch.Generator().manual_seed(9))


class Chain(nn.Module):
    """Three sites in a row. With `dynamic=True` sizes of tensors that are no parameters are symbolic as well."""

    def __init__(self) -> None:
        super().__init__()
        weights = forms.make_weights(torch.float32)
        self.product, self.after = nn.Parameter(weights.product), nn.Parameter(weights.after)
        self.norm = nn.Parameter(weights.norm)

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        for _ in range(3):
            total = total + forms.all_reduce(x @ self.product)
            x = torch.nn.functional.rms_norm(total, (forms.HIDDEN,), self.norm, 1e-6) @ self.after
        return x


Met = tuple[int, Regime | None, bool]
"""Tokens of the call for which a graph was compiled, the regime it got, and whether anything in it is rewritten."""


def _cached(rank: int, machine: str, counts: list[int], folder: str) -> tuple[list[Met], int, int]:
    """Calls of all these sizes in a fresh process with this graph cache: what was compiled, its hits and misses."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    from torch._dynamo.utils import counters

    import weaveopt

    model, waiting_groups = Chain(), []
    options = {"machine": machine, "strict": True, "timeout_s": 30.0, "max_tokens": 4000}
    compiled = torch.compile(model, backend="weave", options=options, dynamic=True)  # type: ignore[call-overload]
    for tokens in counts:
        before = len(weaveopt.report().graphs)
        x, residual = inputs_for(rank, tokens)
        with torch.no_grad():
            assert_close(compiled(x, residual), model(x, residual), LIBRARY, f"{tokens} tokens")
        graphs = weaveopt.report().graphs[before:]
        waiting_groups += [(tokens, graph.regime, graph.num_rewritten > 0) for graph in graphs]
    return waiting_groups, counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


def test_calls_on_both_sides_compile_two_graphs(tmp_path: Path) -> None:
    """And a warm cache serves each regime its own."""
    machine = profile(tmp_path, FLIPS, {1: 20.0, 4000: 20.0})
    counts = [7, 60, 2, 48, 3000, 49, 100, 5000]
    cold = run_ranks(_cached, 2, machine, counts, str(tmp_path / "cache"), timeout_s=300, own=True)
    assert cold[0] == cold[1]
    ((first, below, left), (second, above, rewritten)), hits, misses = cold[0]
    assert (first, second, left, rewritten, hits, misses) == (7, 60, False, True, 0, 2)
    assert below is not None and above is not None and below.max_tokens is not None
    assert below.min_tokens == 2 and above == Regime(below.max_tokens + 1, None)
    assert 40 < below.max_tokens < 60
    warm = run_ranks(_cached, 2, machine, [60, 7, 5000, 48], str(tmp_path / "cache"), timeout_s=300, own=True)
    assert warm == [([(60, above, True), (7, below, False)], 2, 0)] * 2


def _many(rank: int, machine: str, counts: list[int]) -> list[Met]:
    """Calls of all these sizes, without Inductor."""
    config = Config(machine=machine, strict=True, timeout_s=30.0, max_tokens=400)
    reports: list[GraphReport] = []
    model, waiting_groups = Chain(), []
    compiled = torch.compile(model, backend=executing(config, reports), dynamic=True)
    for tokens in counts:
        x, residual = inputs_for(rank, tokens)
        with torch.no_grad():
            assert_close(compiled(x, residual), model(x, residual), LIBRARY, f"{tokens} tokens")
        waiting_groups += [(tokens, report.regime, report.num_rewritten > 0) for report in reports]
        reports.clear()
    return waiting_groups


def test_never_more_than_four(tmp_path: Path) -> None:
    """As many graphs as regimes are met, however many sizes come."""
    counts = [3, *range(12, 400, 13), 2, 399, 700]
    waiting_groups, other = run_ranks(_many, 2, profile(tmp_path, STAIRS, SLOPE), counts, timeout_s=300)
    assert waiting_groups == other
    regimes = [regime for _, regime, _ in waiting_groups if regime is not None]
    assert 2 < len(set(regimes)) == len(waiting_groups) <= MAX_REGIMES
    for tokens in counts:
        (regime,) = (r for r in regimes if r.min_tokens <= tokens and (r.max_tokens is None or tokens <= r.max_tokens))
        first = next(at for at, each, _ in waiting_groups if each == regime)
        assert counts.index(first) <= counts.index(tokens), "compiled when it was first met"
    assert {rewritten for *_, rewritten in waiting_groups} == {False, True}


def _ways_to_be_symbolic(rank: int, machine: str) -> dict[str, list[tuple[str, int, Regime | None]]]:
    """Compiled graphs for each kind of symbolic or constant sizes: phase, tokens and regime."""
    config = Config(machine=machine, strict=True, timeout_s=30.0, max_tokens=4000)
    marks: dict[str, Callable[[Tensor], None]] = {
        "numbers": lambda x: None,
        "as they come": lambda x: None,
        "marked": lambda x: torch._dynamo.mark_dynamic(x, 1),
        "promised": lambda x: torch._dynamo.mark_dynamic(x, 1, min=2, max=4096),
        "training": lambda x: torch._dynamo.mark_dynamic(x, 1),
    }
    found: dict[str, list[tuple[str, int, Regime | None]]] = {}
    for way, mark in marks.items():
        torch._dynamo.reset()
        reports: list[GraphReport] = []
        model, eager = Chain(), Chain()
        training = way == "training"
        dynamic = False if way == "numbers" else None
        compiled = torch.compile(model, backend=executing(config, reports), dynamic=dynamic)
        for tokens in (7, 60, 30, 100):
            x, residual = inputs_for(rank, tokens)
            mark(x)
            mark(residual)
            with torch.set_grad_enabled(training):
                got, want = compiled(x, residual), eager(x, residual)
                assert_close(got, want, LIBRARY, f"{way}, {tokens} tokens")
                if training:
                    got.sum().backward()
                    want.sum().backward()
        for a, b in zip(model.parameters(), eager.parameters(), strict=True):
            assert not training or a.grad is not None
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
        assert not any(report.fallbacks for report in reports)
        found[way] = [(report.phase, report.tokens, report.regime) for report in reports]
    return found


def test_every_way_to_be_symbolic(tmp_path: Path) -> None:
    machine = profile(tmp_path, FLIPS, {1: 20.0, 4000: 20.0})
    found, other = run_ranks(_ways_to_be_symbolic, 2, machine, timeout_s=300)
    assert found == other
    assert found["numbers"] == [("prefill", tokens, None) for tokens in (7, 60, 30, 100)]
    (*_, below), (*_, above) = found["marked"]
    assert below is not None and below.max_tokens is not None and above == Regime(below.max_tokens + 1, None)
    assert found["marked"] == [("prefill", 7, below), ("prefill", 60, above)]
    # The first call has numbers; symbols come with the second.
    assert found["as they come"] == [("prefill", 7, None), ("prefill", 60, above), ("prefill", 30, below)]
    assert found["promised"] == [("prefill", 7, Regime(2, 4096))], "a range that the user gave is never narrowed"
    assert found["training"] == [
        ("forward", 7, below), ("backward", 7, None), ("forward", 60, above), ("backward", 60, None),
    ]  # fmt: skip
