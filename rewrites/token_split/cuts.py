"""Cuts of an axis: candidates by the tiles of GEMMs, judged by a schedule of stages before any graph is built.

A stage is the work between two all-reduces. Each part runs each stage at its share of the tokens, and its all-reduce
while the other parts run theirs; kernels that do not scale with the tokens are counted once for each part. TokenWeave,
appendix A.2: the cut is at a multiple of a wave, so that two halves have no more waves than the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from weaveopt.cost_model import Machine, measured_contention, schedule
from weaveopt.cost_model.schedule import contention_row
from weaveopt.graph.pattern import is_call
from weaveopt.records.candidate import Scalar
from weaveopt.records.task import Stream, Task
from weaveopt.rewrites.token_split.axis import TokenAxis
from weaveopt.rewrites.token_split.local import STARTS
from weaveopt.rewrites.token_split.values import Cut, fraction
from weaveopt.rule import Exposure, GraphWork

MOST_CUTS = 6
"""Candidates of a graph, over all of its axes."""
UNEVEN = 8 / 15
"""Share of the first part in an uneven cut: it has fewer keys to attend to."""
LINK_TIMES = (1.5, 2.0, 4.0, 8.0)
"""Changes of the link's bandwidth that are tried: so many times as fast, or as slow. Both may turn a choice: little is
left to hide, or the exchange itself is the bound."""
GEMM_TIMES = (1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Contention that is tried: how many times as long GEMMs take while the library exchanges."""


@dataclass(frozen=True)
class JudgedCut:
    """A cut and its predicted time."""

    axis: TokenAxis
    cut: Cut
    us: float
    """Lower bound where the contention of streams was not measured."""
    upper_us: float
    exposed_us: float


def candidates(axis: TokenAxis, tile: int, may_have_more: bool) -> Iterator[Cut]:
    """Cuts of an axis: in two at the half, at the multiple of a tile next to it, uneven, and in three and four."""
    length, hint = axis.length, axis.hint
    bounds: list[tuple[int, ...]] = [(hint // 2,)]
    if isinstance(length, int):
        aligned = round(hint / 2 / tile) * tile
        bounds += [(aligned,), (round(hint * UNEVEN / tile) * tile,)]
        if may_have_more:
            bounds += [tuple(round(hint * part / num / tile) * tile for part in range(1, num)) for num in (3, 4)]
    seen = set()
    for each in bounds:
        if each in seen or sorted(set(each)) != list(each) or each[0] < 1 or each[-1] >= hint:
            continue
        seen.add(each)
        yield Cut(axis.name, (0, *(at if isinstance(length, int) else fraction(length, 1, 2) for at in each), length))


def judged(axes: Sequence[TokenAxis], exposure: Exposure, machine: Machine) -> list[JudgedCut]:
    """Candidates of all axes with their predicted times, the fastest first."""
    shares = exposure.work
    compute_us = sum(work.us_at(1.0) for work in shares if work.stream is Stream.COMPUTE)
    exchange_us = sum(work.us_at(1.0) for work in shares if work.stream is Stream.COMMUNICATION)
    found = []
    for axis in axes:
        rows = 1 if axis.name == "batch" else largest_tile(machine)
        cuts = list(candidates(axis, rows, exchange_us >= compute_us / 2))
        found += [_judged(axis, cut, exposure, machine) for cut in cuts[: MOST_CUTS // len(axes) + 1]]
    return sorted(found[:MOST_CUTS], key=lambda each: (each.upper_us, each.us))


def pays(cut: JudgedCut, exposure: Exposure, machine: Machine) -> bool:
    """True if the cut saves more than the model's own error, with overlap whose contention was measured."""
    assert exposure.total_us is not None, "a graph that was not priced is not judged"
    return exposure.total_us - cut.upper_us > machine.relative_error * cut.upper_us


def turning_points(cut: JudgedCut, exposure: Exposure, machine: Machine) -> tuple[tuple[str, Scalar], ...]:
    """Changes that turn the choice, all else held: `turns_at_link`, the link's bandwidth relative to the profile's, and
    `turns_at_contention`, the time of GEMMs while the library exchanges; each left out where nothing tried turns it."""
    now = pays(cut, exposure, machine)

    def turns(changed: Exposure, on: Machine) -> bool:
        return pays(_judged(cut.axis, cut.cut, changed, on), changed, on) is not now

    found: list[tuple[str, Scalar]] = []
    for times in (times for each in LINK_TIMES for times in (each, round(1 / each, 3))):
        if turns(_with_exchanges(exposure, 1 / times), machine):
            found.append(("turns_at_link", times))
            break
    contention = machine.contention
    ctas = max((work.ctas for work in exposure.work), default=0)
    row = contention_row(machine, ctas)
    if contention is not None and row is not None:
        tried = [each for each in GEMM_TIMES if (each > row.gemm if now else each < row.gemm)]
        for times in tried if now else reversed(tried):
            rows = tuple(replace(each, gemm=times) for each in contention.rows)
            if turns(exposure, replace(machine, contention=replace(contention, rows=rows))):
                found.append(("turns_at_contention", times))
                break
    return tuple(found)


def _with_exchanges(exposure: Exposure, times: float) -> Exposure:
    """The same graph where all communication takes so many times as long."""

    def scaled(work: GraphWork) -> GraphWork:
        us_at: Callable[[float], float] = lambda share: work.us_at(share) * times  # noqa: E731
        return replace(work, us_at=us_at) if work.stream is Stream.COMMUNICATION else work

    groups = {group: us * times for group, us in exposure.by_group.items()}
    total_us = None if exposure.total_us is None else exposure.total_us + exposure.us * (times - 1)
    return Exposure(groups, total_us, tuple(map(scaled, exposure.work)))


def largest_tile(machine: Machine) -> int:
    """Rows of the largest tile of a GEMM."""
    return max((tile.m for costs in machine.gemms for tile in costs.tiles), default=1)


def _judged(axis: TokenAxis, cut: Cut, exposure: Exposure, machine: Machine) -> JudgedCut:
    parts = [cut.part(part) for part in range(cut.num_parts)]
    shares = [part / axis.hint if isinstance(part, int) else 1 / cut.num_parts for part in parts]
    tasks = list(_tasks(shares, exposure))
    contention = measured_contention(machine)
    found = schedule(tasks, contention)
    upper = schedule(tasks, contention, serial=True) if found.not_measured else found
    computing = sum(task.us for task in tasks if task.stream is Stream.COMPUTE)
    return JudgedCut(axis, cut, found.us, upper.us, max(upper.us - computing, 0.0))


def _tasks(shares: Sequence[float], exposure: Exposure) -> Iterator[Task]:
    """Stages of all parts in their order; what follows the last all-reduce runs once, for all tokens."""
    stages: list[list[int]] = [[]]
    for index, work in enumerate(exposure.work):
        if is_call(work.node, STARTS):
            stages.append([])
        else:
            stages[-1].append(index)
    starts = [work for work in exposure.work if is_call(work.node, STARTS)]
    position = 0
    last: list[tuple[int, ...]] = [()] * len(shares)
    for at, stage in enumerate(stages):
        is_last = at == len(starts)
        for part, share in enumerate([1.0] if is_last else shares):
            waits = tuple(sorted({each for waits in last for each in waits})) if is_last else last[part]
            us = sum(exposure.work[index].us_at(share) for index in stage)
            yield Task(us, waits_for=waits)
            position += 1
            if not is_last:
                work = starts[at]
                yield Task(work.us_at(share), Stream.COMMUNICATION, (position - 1,), ctas=work.ctas)
                last[part] = (position,)
                position += 1
