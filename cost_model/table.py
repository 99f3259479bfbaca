"""Which kernel serves which token count: a function of what all sites of a chain share, and of nothing else.

So sites that hand a token-sharded residual to each other always agree on who holds which rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import cache

from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.estimate import estimate_all_reduce_norm, estimate_unfused
from weaveopt.cost_model.fused import Way, exchange_us, ways
from weaveopt.cost_model.machine import Machine, Point
from weaveopt.records.candidate import Algorithm, Fabric, Form, Lowering
from weaveopt.records.site import DTYPE_BYTES, Workload

LARGEST_TOKENS = 1 << 20
"""Where the search for a threshold ends."""


@cache
def lowerings(
    machine: Machine,
    fabric: Fabric,
    hidden: int,
    dtype: str,
    world: int,
    hosts: int,
    max_tokens: int,
    min_tokens: int = 1,
    against_library: bool = True,
) -> tuple[Lowering, ...]:
    """The run-time table of `fabric` up to `max_tokens` tokens: at each count the kernel predicted fastest.

    It ends where `all_reduce` by the library and then one kernel for addition and norm is faster from there on
    (`against_library` False: it does not compare). Below that, the library may be faster by no more than the model's
    own error; where it is by more, the table ends before. Fewer than `min_tokens` tokens never come: there nothing
    is compared, and the first row serves them. Mail is never used beyond its last measured size.
    Empty: the library is faster at every size that comes, or the fabric has no kernel for such a group. On `shm`
    the library is not compared with, and what one-shot does not serve is two-shot.
    """
    if fabric is Fabric.SHM:
        return _by_threshold(one_shot_max_tokens(machine, fabric, hidden, dtype, world, hosts), max_tokens)
    known = ways(machine, fabric, hidden, world, hosts)
    if not known or max_tokens < 1:
        return ()
    race = _Race(machine, fabric, hidden, dtype, world, known, min_tokens if against_library else None)
    grid = _grid(race.corners(), max_tokens, min_tokens)
    unbroken = _until(grid, lambda tokens: not race.lost(tokens))
    won = [tokens for tokens in unbroken if race.won(tokens)]
    if not won:
        return ()
    end = won[-1]
    if end < max_tokens:
        end = _last(end, next(tokens for tokens in grid if tokens > end), race.won)
    return tuple(_rows(race, [tokens for tokens in grid if tokens < end] + [end]))


def _by_threshold(threshold: int, max_tokens: int) -> tuple[Lowering, ...]:
    rows = []
    if threshold > 0:
        rows.append(Lowering(min(threshold, max_tokens), Algorithm.ONE_SHOT, Form.SEGMENT))
    if threshold < max_tokens:
        rows.append(Lowering(max_tokens, Algorithm.TWO_SHOT, Form.SEGMENT))
    return tuple(rows)


class _Race:
    """The kernels against each other and the library, by token count."""

    def __init__(
        self,
        machine: Machine,
        fabric: Fabric,
        hidden: int,
        dtype: str,
        world: int,
        known: tuple[Way, ...],
        compared_from: int | None,
    ) -> None:
        self._machine, self._fabric, self._known = machine, fabric, known
        self._hidden, self._dtype, self._world = hidden, dtype, world
        self._compared_from = compared_from
        self._seen: dict[int, tuple[Way | None, float, float]] = {}

    def _at(self, tokens: int) -> tuple[Way | None, float, float]:
        """The fastest kernel, if any is known at that size; its time; the library's."""
        if tokens not in self._seen:
            workload = Workload(tokens, tokens, self._hidden, self._dtype, self._world)
            able = [way for way in self._known if way.reaches(workload.message_bytes)]
            times = [(exchange_us(self._machine, workload, self._fabric, way), way) for way in able]
            us, best = min(times, key=lambda pair: pair[0], default=(float("inf"), None))
            compared = self._compared_from is not None and tokens >= self._compared_from
            library_us = estimate_unfused(self._machine, workload).us if compared else float("inf")
            self._seen[tokens] = best, us, library_us
        return self._seen[tokens]

    def best(self, tokens: int) -> Way:
        way = self._at(tokens)[0]
        assert way is not None, f"no kernel for {tokens} tokens inside a table"
        return way

    def won(self, tokens: int) -> bool:
        way, us, library_us = self._at(tokens)
        return way is not None and us <= library_us

    def lost(self, tokens: int) -> bool:
        """Whether no kernel can serve, or the library is faster by more than the model's error."""
        way, us, library_us = self._at(tokens)
        return way is None or us > library_us * (1 + self._machine.relative_error)

    def corners(self) -> list[int]:
        """Token counts on both sides of every point of the curves: between two of them, times are power laws."""
        row = self._hidden * DTYPE_BYTES[self._dtype]
        points: set[Point] = set(self._machine.memory.points)
        for way in self._known:
            points.update(way.curve.points if way.curve is not None else ())
        for curve in fabric_costs(self._machine, Fabric.LIBRARY).all_reduce:
            points.update(curve.points)
        return _corners(points, row)


def token_grid(machine: Machine, hidden: int, dtype: str, min_tokens: int, max_tokens: int) -> tuple[int, ...]:
    """Token counts between which predictions for rows of `hidden` change smoothly.

    From `min_tokens` to `max_tokens` in steps of an eighth, and both sides of every size that was measured.
    """
    row = hidden * DTYPE_BYTES[dtype]
    points: set[Point] = set(machine.memory.points)
    for costs in machine.fabric_costs:
        for curve in (*costs.all_reduce, *costs.all_reduce_norm):
            points.update(curve.points)
    return tuple(_grid(_corners(points, row), max_tokens, min_tokens))


def _corners(points: Iterable[Point], row_bytes: int) -> list[int]:
    return [tokens for point in points for tokens in (point.bytes // row_bytes, point.bytes // row_bytes + 1)]


def _grid(corners: list[int], max_tokens: int, min_tokens: int = 1) -> list[int]:
    """`min_tokens` to `max_tokens` in steps of an eighth, and the corners between."""
    grid = {max_tokens, *(tokens for tokens in corners if min_tokens <= tokens <= max_tokens)}
    tokens = min_tokens
    while tokens < max_tokens:
        grid.add(tokens)
        tokens = max(tokens + 1, tokens * 9 // 8)
    return sorted(grid)


def _until(grid: list[int], goes_on: Callable[[int], bool]) -> Iterator[int]:
    for tokens in grid:
        if not goes_on(tokens):
            return
        yield tokens


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The last count from `low`, where it holds, before `high`, where it does not (or nobody asks)."""
    return low + bisect_left(range(low + 1, high), True, key=lambda tokens: not holds(tokens))


def _rows(race: _Race, grid: list[int]) -> Iterator[Lowering]:
    """One row for each stretch with the same kernel."""
    low = grid[0]
    for high in grid:
        while race.best(low) != race.best(high):
            way = race.best(low)
            end = _last(low, high, lambda tokens, way=way: race.best(tokens) == way)  # type: ignore[misc]
            yield Lowering(end, way.algorithm, way.form, way.num_ctas)
            low = end + 1
    way = race.best(grid[-1])
    yield Lowering(grid[-1], way.algorithm, way.form, way.num_ctas)


def _one_shot_wins(
    machine: Machine, fabric: Fabric, tokens: int, hidden: int, dtype: str, world: int, hosts: int
) -> bool:
    workload = Workload(tokens, tokens, hidden, dtype, world, hosts)
    one_shot = estimate_all_reduce_norm(machine, workload, fabric, Algorithm.ONE_SHOT)
    return one_shot.us <= estimate_all_reduce_norm(machine, workload, fabric, Algorithm.TWO_SHOT).us


@cache
def one_shot_max_tokens(machine: Machine, fabric: Fabric, hidden: int, dtype: str, world: int, hosts: int = 1) -> int:
    """The largest token count up to which one-shot is predicted no slower than two-shot (0: never).

    Depends on nothing else, so every site of a chain has the same threshold. At most `LARGEST_TOKENS`.
    """
    if fabric is Fabric.LIBRARY:
        return 0
    if world <= 1:
        return LARGEST_TOKENS

    def wins(tokens: int) -> bool:
        return _one_shot_wins(machine, fabric, tokens, hidden, dtype, world, hosts)

    if not wins(1):
        return 0
    low = 1
    while low < LARGEST_TOKENS and wins(2 * low):
        low *= 2
    if low >= LARGEST_TOKENS:
        return LARGEST_TOKENS
    return _last(low, 2 * low, wins)
