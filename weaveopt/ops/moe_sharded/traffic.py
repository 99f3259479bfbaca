"""Rows that a bound `expert_exchange` has moved."""

from __future__ import annotations

from typing import NamedTuple


class Traffic(NamedTuple):
    """Rows between this rank and others since the site was bound."""

    dispatched: int
    """Rows of this rank's tokens, pushed to others."""
    returned: int
    """Results: on CPU ranks those that this one's experts sent back, on GPUs those that this one received. The sum over
    all ranks is the same."""
