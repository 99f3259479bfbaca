"""Compiled graphs for regimes of token counts: guards that torch honours, alike on all ranks, never more than four."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests import forms
from tests.machines import Times, made_up
from tests.preview import previewed
from tests.ranks import run_ranks
from tests.rewrites.test_all_reduce_rms_norm import inputs
from tests.tolerances import LIBRARY, assert_close
from weaveopt import cost_model
from weaveopt.decision import GraphReport, Regime

ROW_BYTES = forms.HIDDEN * 4
FLIPS: Times = {1: 10.0, 20: 10.0, 4000: 1000.0}
"""An all-reduce by the library, where the fused kernel always takes 20 us: they meet at 49 tokens."""
STAIRS: Times = {tokens + more: 20.0 + tokens for tokens in range(0, 400, 40) for more in (1, 40)}
"""The library in steps; the fused kernel takes a straight line through them: they change places 16 times or more."""


def profile(folder: Path, library: Times, fused: Times) -> str:
    path = folder / "made_up.json"
    path.write_text(cost_model.dumps(made_up(library, fused, ROW_BYTES)))
    return str(path)


def inputs_for(rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(1, tokens, forms.INNER, generator=torch.Generator().manual_seed(rank))
    return x, torch.randn(1, tokens, forms.HIDDEN, generator=torch.Generator().manual_seed(9))


class Chain(nn.Module):
    """Three sites in a row. With `dynamic=True` torch makes sizes of tensors that are no parameters symbolic as well."""

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


def _calls(rank: int, machine: str, counts: list[int], settings: dict[str, object]) -> list[Met]:
    """Calls of all these sizes, each compared with eager; what was compiled on the way."""
    import weaveopt

    torch._dynamo.reset()
    model = Chain()
    options = {"machine": machine, "strict": True, "timeout_s": 30.0, "max_tokens": 4000}
    compiled = torch.compile(model, backend="weave", options=options, **settings)  # type: ignore[call-overload]
    met: list[Met] = []
    for tokens in counts:
        before = len(weaveopt.report().graphs)
        x, residual = inputs_for(rank, tokens)
        with torch.no_grad():
            assert_close(compiled(x, residual), model(x, residual), LIBRARY, f"{tokens} tokens")
        graphs: tuple[GraphReport, ...] = weaveopt.report().graphs[before:]
        met += [(tokens, graph.regime, graph.num_rewritten > 0) for graph in graphs]
    return met


def test_calls_on_both_sides_compile_two_graphs(tmp_path: Path) -> None:
    machine = profile(tmp_path, FLIPS, {1: 20.0, 4000: 20.0})
    ranks = run_ranks(_calls, 2, machine, [7, 60, 2, 48, 3000, 49, 100, 5000], {"dynamic": True}, timeout_s=300)
    assert ranks[0] == ranks[1]
    (first, below, left), (second, above, rewritten) = ranks[0]
    assert (first, second, left, rewritten) == (7, 60, False, True)
    assert below is not None and above is not None and below.max_tokens is not None
    assert below.min_tokens == 2 and above == Regime(below.max_tokens + 1, None)
    assert 40 < below.max_tokens < 60
