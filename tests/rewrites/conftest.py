"""What the rule made of graphs that were captured in one process."""

from __future__ import annotations

import pytest
import torch.fx as fx

from weaveopt import backend
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.pipeline.plan import Planned
from weaveopt.pipeline.rewrite import rewrite
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
