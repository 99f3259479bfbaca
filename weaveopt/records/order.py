"""Order in which the communication of a graph begins and ends, where data alone does not give it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weaveopt.records.candidate import Rejection

CODE = "order_not_kept"


@dataclass(frozen=True)
class Order:
    """Pairs of graph nodes by name: a wait, and the start of another communication that has to come before it.

    A start is a collective or a `_begin` operator, a wait is what waits for it: `wait_tensor` or the `_end` operator.
    For two halves A and B of a token split, whose stages are the nodes between two collectives, `(wait A, start B)`
    and `(wait B, next start A)` give the whole order: B's stage comes before B's start, so it runs while A's
    collective is in flight.
    """

    pairs: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pairs)

    @property
    def waits(self) -> tuple[str, ...]:
        """Names of the waits, each once, in the order of the record."""
        return tuple(dict.fromkeys(wait for wait, _ in self.pairs))

    def starts_before(self, wait: str) -> tuple[str, ...]:
        """Names of the starts that have to come before a wait."""
        return tuple(dict.fromkeys(start for each, start in self.pairs if each == wait))

    def within(self, names: Mapping[str, object]) -> Order:
        """The pairs of which both nodes are among `names`: a rewrite may have removed the others."""
        return Order(tuple(pair for pair in self.pairs if pair[0] in names and pair[1] in names))


ANY_ORDER = Order()
"""Order of a graph that asks for none."""


def order_kept(order: Order, written: Sequence[str]) -> Rejection | None:
    """Compare `order` with the names of the calls that were written, in their order; None if it is kept.

    A name that was written several times, as where code is generated in two passes, counts by its occurrences: the
    second wait needs the second start.
    """
    return next(_broken(order, written), None)


def _broken(order: Order, written: Sequence[str]) -> Iterator[Rejection]:
    places: dict[str, list[int]] = {}
    for place, name in enumerate(written):
        places.setdefault(name, []).append(place)
    for wait, start in order.pairs:
        values = (("wait", wait), ("start", start))
        waits, starts = places.get(wait, []), places.get(start, [])
        missing = [name for name, found in ((wait, waits), (start, starts)) if not found]
        if missing:
            yield Rejection(CODE, f"the compiled graph has no call of {missing[0]}", values)
        elif len(starts) < len(waits) or any(s > w for s, w in zip(starts, waits, strict=False)):
            yield Rejection(CODE, f"the compiled graph waits in {wait} before it starts {start}", values)
