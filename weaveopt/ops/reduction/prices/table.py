"""Which kernel serves which token count: a function of what all sites of a chain share, and of nothing else.

So sites that share a token-sharded residual always agree on who holds which rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.hosts_curves import curves_between
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.token_grid import LARGEST_TOKENS, corners_of, grid_of, last_where
from weaveopt.ops.reduction.prices.estimate import estimate_fused, estimate_unfused
from weaveopt.ops.reduction.prices.kernels import (
    KernelVariant,
    exchange_us,
    kernel_variants,
)
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.site import DTYPE_BYTES
from weaveopt.wording import counted


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
) -> tuple[KernelRow, ...]:
    """The run-time table of `fabric` up to `max_tokens` tokens: at each count the kernel predicted fastest.

    It ends where `all_reduce` by the library and then one kernel for addition and norm is faster from there on
    (`against_library` False: it does not compare). Below that, the library may be faster by no more than the model's
    own error; where it is by more, the table ends before. Fewer than `min_tokens` tokens never come: there nothing
    is compared, and the first row serves them. LL packets are never used beyond their last measured size.
    Empty: the library is faster at every size that comes, or the fabric has no kernel for such a group. On `shm`
    the library is not compared with, and what one-shot does not serve is two-shot.
    """
    if fabric is Fabric.SHM:
        return _by_threshold(one_shot_max_tokens(machine, fabric, hidden, dtype, world, hosts), max_tokens)
    known = kernel_variants(machine, fabric, hidden, world, hosts)
    if not known or max_tokens < 1:
        return ()
    race = _Race(machine, fabric, hidden, dtype, world, hosts, known, min_tokens if against_library else None)
    grid = grid_of(race.corners(), max_tokens, min_tokens)
    unbroken = _until(grid, lambda tokens: not race.lost(tokens))
    won = [tokens for tokens in unbroken if race.won(tokens)]
    if not won:
        return ()
    end = won[-1]
    if end < max_tokens:
        end = last_where(end, next(tokens for tokens in grid if tokens > end), race.won)
    return tuple(_rows(race, [tokens for tokens in grid if tokens < end] + [end]))


def _by_threshold(threshold: int, max_tokens: int) -> tuple[KernelRow, ...]:
    rows = []
    if threshold > 0:
        rows.append(KernelRow(min(threshold, max_tokens), Algorithm.ONE_SHOT, Transfer.SEGMENT))
    if threshold < max_tokens:
        rows.append(KernelRow(max_tokens, Algorithm.TWO_SHOT, Transfer.SEGMENT))
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
        hosts: int,
        known: tuple[KernelVariant, ...],
        compared_from: int | None,
    ) -> None:
        self._machine, self._fabric, self._known = machine, fabric, known
        self._hidden, self._dtype, self._world, self._hosts = hidden, dtype, world, hosts
        self._compared_from = compared_from
        self._seen: dict[int, tuple[KernelVariant | None, float, float]] = {}

    def _at(self, tokens: int) -> tuple[KernelVariant | None, float, float]:
        """The fastest kernel, if any is known at that size; its time; the library's."""
        if tokens not in self._seen:
            workload = Workload(tokens, tokens, self._hidden, self._dtype, self._world, self._hosts)
            able = [variant for variant in self._known if variant.covers(workload.message_bytes)]
            times = [(exchange_us(self._machine, workload, self._fabric, variant), variant) for variant in able]
            us, best = min(times, key=lambda pair: pair[0], default=(float("inf"), None))
            compared = self._compared_from is not None and tokens >= self._compared_from
            library_us = estimate_unfused(self._machine, workload).us if compared else float("inf")
            self._seen[tokens] = best, us, library_us
        return self._seen[tokens]

    def best(self, tokens: int) -> KernelVariant:
        variant = self._at(tokens)[0]
        assert variant is not None, f"no kernel for {counted(tokens, 'token')} inside a table"
        return variant

    def won(self, tokens: int) -> bool:
        variant, us, library_us = self._at(tokens)
        return variant is not None and us <= library_us

    def lost(self, tokens: int) -> bool:
        """True if no kernel can serve, or the library is faster by more than the model's error."""
        variant, us, library_us = self._at(tokens)
        return variant is None or us > library_us * (1 + self._machine.relative_error)

    def corners(self) -> tuple[int, ...]:
        """Token counts on both sides of every point of the curves."""
        points = set(self._machine.memory.points)
        for variant in self._known:
            points.update(variant.curve.points if variant.curve is not None else ())
        library = fabric_costs(self._machine, Fabric.LIBRARY)
        between = curves_between(library, "all_reduce", ranks_of_host=self._world // self._hosts)
        for curve in (*library.curves_of("all_reduce"), *between):
            points.update(curve.points)
        return corners_of(points, self._hidden * DTYPE_BYTES[self._dtype])


def _until(grid: Iterable[int], continues: Callable[[int], bool]) -> Iterator[int]:
    for tokens in grid:
        if not continues(tokens):
            return
        yield tokens


def _rows(race: _Race, grid: list[int]) -> Iterator[KernelRow]:
    """One row for each stretch with the same kernel."""
    low = grid[0]
    for high in grid:
        while race.best(low) != race.best(high):
            best = race.best(low)
            end = last_where(low, high, lambda tokens, best=best: race.best(tokens) == best)  # type: ignore[misc]
            yield KernelRow(end, best.algorithm, best.transfer, best.num_ctas)
            low = end + 1
    best = race.best(grid[-1])
    yield KernelRow(grid[-1], best.algorithm, best.transfer, best.num_ctas)


def _one_shot_wins(
    machine: Machine, fabric: Fabric, tokens: int, hidden: int, dtype: str, world: int, hosts: int
) -> bool:
    workload = Workload(tokens, tokens, hidden, dtype, world, hosts)
    one_shot = estimate_fused(machine, workload, fabric, Algorithm.ONE_SHOT)
    return one_shot.us <= estimate_fused(machine, workload, fabric, Algorithm.TWO_SHOT).us


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
    return last_where(low, 2 * low, wins)
