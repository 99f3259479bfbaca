"""Ranks with a real gloo process group for tests, warm or with processes of their own; and the processes of a run."""

from __future__ import annotations

from tests.ranks.ports import free_port
from tests.ranks.records import Outcome
from tests.ranks.run import RankError, collect, run_ranks

__all__ = ["Outcome", "RankError", "collect", "free_port", "run_ranks"]
