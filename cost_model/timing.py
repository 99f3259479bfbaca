"""Which candidates are worth timing, what a measured time varies by, and when one stands for another token count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_TIMED = 4
"""Most candidates of a site that are timed, in addition to the site as it is."""
NEAR = 2.0
"""A measured time stands for token counts up to so many times more or less: as a ratio to the prediction."""
LEAST_ERROR = 0.02
"""Medians of two runs of one program differ by about so much on a quiet machine."""
SPREAD_SHARE = 0.25
"""Standard error of a median, as a share of the spread of single times (quartile to quartile)."""


@dataclass(frozen=True)
class Runner:
    """A candidate that may be chosen."""

    system: str
    """Rule and fabric that it is a form of. The best form of every system is timed, however high its price."""
    us: float
    error_us: float = 0.0


def shortlist(runners: Sequence[Runner]) -> tuple[int, ...]:
    """Positions of at most `MOST_TIMED` to time, the cheapest first.

    The best of every system, since a profile may be wrong about a system as a whole, and then those that are within
    the model's error of the best one.
    """
    order = sorted(range(len(runners)), key=lambda index: (runners[index].us, index))
    if not order:
        return ()
    heads: dict[str, int] = {}
    for index in order:
        heads.setdefault(runners[index].system, index)
    best = runners[order[0]]
    close = [index for index in order if runners[index].us - runners[index].error_us <= best.us + best.error_us]
    taken = list(dict.fromkeys((*heads.values(), *close)))[:MOST_TIMED]
    return tuple(sorted(taken, key=order.index))


def error_of(spread: float) -> float:
    """Relative error of a median of times; `spread` is (third quartile - first quartile) / median."""
    return max(LEAST_ERROR, SPREAD_SHARE * spread)


def nearest(known: Sequence[int], tokens: int) -> int | None:
    """Measured token count nearest to `tokens` by ratio; None if none is near."""
    near = [count for count in known if max(count, tokens) <= NEAR * min(count, tokens)]
    return min(near, key=lambda count: (max(count, tokens) / min(count, tokens), count), default=None)
