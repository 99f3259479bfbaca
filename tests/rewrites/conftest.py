"""Graphs captured in one process, as the rule rewrote and reported them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.fx as fx
from torch import Tensor

from tests.graphs.overlapped_gemms import Reported, toy
from tests.graphs.preview import previewed
from weaveopt import backend, cost_model
from weaveopt.cost_model.machine import Curve
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.pipeline.plan import Planned
from weaveopt.pipeline.rewrite import rewrite
from weaveopt.records.report import GraphReport
from weaveopt.rule import Context, RuleSet


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs that were rewritten, in order."""
    seen: list[fx.Graph] = []

    def spying(decided: DecidedGraph, planned: Planned, rules: RuleSet, context: Context) -> tuple[str, ...]:
        rounding = rewrite(decided, planned, rules, context)
        seen.append(decided.priced.captured.graph)
        return rounding

    monkeypatch.setattr(backend, "rewrite", spying)
    return seen


@pytest.fixture
def reported(tmp_path: Path) -> Reported:
    """On four GPUs on which `curves` were measured too."""

    def run(fn: Callable[..., object], inputs: tuple[Tensor, ...], *curves: Curve, **more: object) -> GraphReport:
        path = tmp_path / "toy.json"
        path.write_text(cost_model.dumps(toy(*curves)))
        known = {"static": True, "force": (), "world": 4, "machine": str(path), "device": "cuda", **more}
        return previewed(fn, inputs, **known)  # type: ignore[arg-type]

    return run
