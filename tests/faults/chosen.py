"""Which cases are run: every fault at every moment, and combinations drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.faults.case import Case, Mode, Moment
from tests.faults.faults import FAULTS, timeouts

OUTSIDE_S = {Mode.EAGER: 0.15, Mode.GRAPH: 1.5, Mode.REGIONS: 2.0}
"""How long a run takes, about: signals from outside come in this time."""
EAGER_SHARE = 0.7
"""Of the random combinations; compiling costs more."""


def make_case(
    fault: str, moment: Moment, mode: Mode, world: int, victim: int, *, one_shot: bool = True, catches: bool = False,
    store_on_rank: bool = False, delay_s: float = 0.0,
) -> Case:  # fmt: skip
    timeout_s, compile_timeout_s = timeouts(fault, moment)
    return Case(
        fault, moment, mode, world, victim, timeout_s, compile_timeout_s, one_shot, catches, store_on_rank, delay_s
    )


def every_fault() -> Iterator[Case]:
    """Each fault at each of its moments, once in each mode; the rest goes round."""
    for index, (name, fault) in enumerate(FAULTS.items()):
        for at, moment in enumerate(m for m in fault.moments if m is not Moment.ANY):
            for which, mode in enumerate(mode for mode in Mode if fault.fits(mode, moment)):
                turn = index + at + which
                world = (2, 3)[turn % 2] if mode is not Mode.PAIRS else 3
                yield make_case(
                    name, moment, mode, world, 0 if mode is Mode.PAIRS else turn % world, one_shot=turn % 3 != 0,
                    catches=turn % 2 == 0 or mode is Mode.PAIRS,
                )  # fmt: skip


def random_case(seed: int) -> Case:
    """A combination of rank, moment and fault; the same for the same seed."""
    draw = random.Random(seed)
    mode = Mode.EAGER if draw.random() < EAGER_SHARE else draw.choice((Mode.GRAPH, Mode.REGIONS, Mode.PAIRS))
    pairs = [(name, moment) for name, fault in FAULTS.items() for moment in fault.moments if fault.fits(mode, moment)]
    name = draw.choice(sorted({name for name, _ in pairs}))
    moment = draw.choice([moment for other, moment in pairs if other == name])
    world = draw.choice((2, 3, 4) if mode is not Mode.PAIRS else (3, 4))
    delay_s = draw.uniform(0.0, OUTSIDE_S[mode]) if moment is Moment.ANY else 0.0
    return make_case(
        name, moment, mode, world, draw.randrange(world), one_shot=draw.random() < 0.5, catches=draw.random() < 0.5,
        store_on_rank=draw.random() < 0.2, delay_s=delay_s,
    )  # fmt: skip


