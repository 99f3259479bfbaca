"""Both ways in which masks are read."""

from __future__ import annotations

import pytest

from weaveopt.sites.shared.masks import evaluate, intervals


@pytest.fixture(params=["short forms", "blocks"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the answer; blocks of a few rows, and hardly a node that is evaluated whole."""
    if request.param == "blocks":
        monkeypatch.setattr(intervals, "_derived", lambda node, is_inverted, values: None)
        monkeypatch.setattr(intervals, "BLOCK_ELEMENTS", 64)
        monkeypatch.setattr(evaluate, "WHOLE_ELEMENTS", 48)
    return str(request.param)
