"""Which cases are run: every fault at every moment, and combinations drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from tests.faults.case import COMPILE_ONLY, Case, Mode, Moment
from tests.faults.faults import COMPILED, FAULTS, timeouts

OUTSIDE_S = {Mode.EAGER: 0.1, Mode.GRAPH: 1.0, Mode.REGIONS: 1.5, Mode.PAIRS: 0.1}
"""How long a run takes, about: signals from outside come in this time."""
EAGER_SHARE = 0.6
"""Least share of eager mode among the random combinations that permit it; compiling costs more."""
OFTEN = 4
"""How much likelier signals are than other faults, and any moment than a certain one."""
IN_EVERY_MODE = ("killed", "stopped", "other token count", "other residual")


def make_case(
    fault: str, moment: Moment, mode: Mode, world: int, victim: int, *, one_shot: bool = True, catches: bool = False
) -> Case:
    timeout_s, compile_timeout_s = timeouts(fault, moment, mode, catches)
    return Case(fault, moment, mode, world, victim, timeout_s, compile_timeout_s, one_shot, catches)


def every_fault() -> Iterator[Case]:
    """Each fault at each of its moments: eagerly, and where compiling matters to it in a compiled model too."""
    turn = 0
    for name, fault in FAULTS.items():
        for moment in filter(lambda moment: moment is not Moment.ANY, fault.moments):
            modes = [mode for mode in Mode if fault.fits(mode, moment)]
            compiled = [mode for mode in modes if mode in COMPILED]
            if moment in COMPILE_ONLY or moment is Moment.AGREED or name in IN_EVERY_MODE or fault.strikes_all:
                compiled = compiled[turn % 2 : turn % 2 + 1] if len(compiled) > 1 else compiled
            elif Mode.EAGER in modes:
                compiled = []
            for mode in [mode for mode in modes if mode not in COMPILED or mode in compiled]:
                turn += 1
                world = 3 if mode is Mode.PAIRS else 2 + turn % 2
                case = make_case(
                    name, moment, mode, world, 0 if mode is Mode.PAIRS else turn // 2 % world,
                    one_shot=turn % 3 != 0, catches=turn // 2 % 2 == 0,
                )  # fmt: skip
                yield replace(case, ends_interpreter=moment is Moment.EXIT and mode is Mode.EAGER)
    for moment in (Moment.START, Moment.AGREED, Moment.FIRST_CALL, Moment.BETWEEN):
        yield replace(make_case("killed", moment, Mode.EAGER, 3, 0), store_on_rank=True)
        yield replace(make_case("killed", moment, Mode.GRAPH, 2, 0), store_on_rank=True)
        yield replace(make_case("stopped", moment, Mode.EAGER, 2, 0, catches=True), store_on_rank=True)


def random_case(seed: int) -> Case:
    """A combination of rank, moment and fault; the same for the same seed."""
    draw = random.Random(seed)
    names = sorted(FAULTS)
    fault = FAULTS[name := draw.choices(names, [OFTEN if FAULTS[name].signal else 1 for name in names])[0]]
    modes = [mode for mode in fault.modes if any(fault.fits(mode, moment) for moment in fault.moments)]
    mode = Mode.EAGER if Mode.EAGER in modes and draw.random() < EAGER_SHARE else draw.choice(modes)
    moments = [moment for moment in fault.moments if fault.fits(mode, moment)]
    moment = draw.choices(moments, [OFTEN if moment is Moment.ANY else 1 for moment in moments])[0]
    world = draw.choice((2, 3, 4) if mode is not Mode.PAIRS else (3, 4))
    case = make_case(
        name, moment, mode, world, draw.randrange(world), one_shot=draw.random() < 0.5, catches=draw.random() < 0.5
    )
    delay_s = draw.uniform(0.0, OUTSIDE_S[mode]) if moment is Moment.ANY else 0.0
    return replace(case, store_on_rank=draw.random() < 0.2, delay_s=delay_s)
