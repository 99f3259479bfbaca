"""What weights that are prefetched into L2 while an exchange waits save of the GEMM that reads them next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise

from weaveopt.cost_model.machine import KernelCurve, Machine
from weaveopt.errors import ProfileError

OPERATION = "l2_prefetch"
"""Of the curves of a profile: microseconds saved by bytes, variant `columns tokens=8 ranks=2`."""
L2_SHARE = 0.5
"""Of the cache that is measured, and so used, at most: activations and what is exchanged lie in it too, and hardware
that keeps the two halves of its cache apart may keep a line twice."""
NOTHING_US = 0.001
"""What a curve holds where nothing was saved: times of profiles are above zero."""
LINE_BYTES = 128
"""What L2 loads at once."""


class Order(StrEnum):
    """Which bytes of weights [n, k] are prefetched; of several weights those that are read first come first."""

    FRONT = "front"
    """The first ones as they lie in memory: whole rows."""
    COLUMNS = "columns"
    """The first ones of every row: what all tiles of a GEMM read first."""


@dataclass(frozen=True)
class Prefetched:
    """What is worth prefetching, and what it saves."""

    order: Order
    num_bytes: int
    saved_us: float
    max_tokens: int
    """The most tokens for which that was measured."""


def variant_of(order: Order, tokens: int, world: int) -> str:
    """A curve's variant."""
    return f"{order.value} tokens={tokens} ranks={world}"


@cache
def parse_variant(name: str) -> tuple[Order, int, int]:
    """Order, tokens and ranks. Raises `ProfileError` where there is no such variant."""
    order, *words = name.split()
    values = dict(word.split("=", 1) for word in words if "=" in word)
    numbers = [values.get(key, "") for key in ("tokens", "ranks")]
    if order not in frozenset(Order) or len(words) != len(numbers) or not all(each.isdigit() for each in numbers):
        expected = f"one of {', '.join(Order)}, then tokens=N ranks=N"
        raise ProfileError(f"a curve of {OPERATION}: found variant {name!r}, expected {expected}")
    tokens, world = map(int, numbers)
    return Order(order), tokens, world


def is_measured(machine: Machine) -> bool:
    """Whether the profile tells anything of prefetching."""
    return any(curve.op == OPERATION for curve in machine.kernels)


def prefetched(
    machine: Machine, world: int, tokens: int, exchange_us: float, weight_bytes: int, num_rows: int
) -> Prefetched | None:
    """Of `weight_bytes` in `num_rows` rows, what memory brings within `exchange_us`, in the order that saves most.

    As many bytes as were measured at most, and none where fewer ranks or tokens were measured, or nothing was gained.
    Of the saving the model's own error is taken off.
    """
    brought = min(exchange_us * 1e-6 * machine.memory.bytes_per_s, float(weight_bytes))
    found = []
    for order in Order:
        curve = _curve_for(machine, order, world, tokens)
        if curve is None:
            continue
        unit = LINE_BYTES * (num_rows if order is Order.COLUMNS else 1)
        num_bytes = int(min(brought, curve[0].points[-1].size)) // unit * unit
        saved_us = _saved_us(curve[0], num_bytes)
        if saved_us > NOTHING_US:
            found.append(Prefetched(order, num_bytes, saved_us * (1.0 - machine.relative_error), curve[1]))
    return max(found, key=lambda each: each.saved_us, default=None)


def _curve_for(machine: Machine, order: Order, world: int, tokens: int) -> tuple[KernelCurve, int] | None:
    """That of the least count of tokens that is no smaller, and this count."""
    found = []
    for curve in machine.kernels:
        if curve.op == OPERATION:
            measured = parse_variant(curve.variant)
            if measured[0] is order and measured[1] >= tokens and measured[2] == world:
                found.append((curve, measured[1]))
    return min(found, key=lambda each: each[1], default=None)


def _saved_us(curve: KernelCurve, num_bytes: int) -> float:
    """Linear between points; nothing below the first one, as nothing is known there."""
    points = curve.points
    if num_bytes < points[0].size:
        return 0.0
    for before, after in pairwise(points):
        if num_bytes < after.size:
            share = (num_bytes - before.size) / (after.size - before.size)
            return before.us + share * (after.us - before.us)
    return points[-1].us
