"""Distribution of the choices of a mixture's tokens over its experts: even, or more of them on some."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Skew:
    """A share `rows` of all choices is of a share `experts` of all experts; even among those, and among the others."""

    rows: float = 1.0
    experts: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.experts <= self.rows <= 1.0:
            raise ValueError(f"{self.rows:g}:{self.experts:g} is no share of rows and the smaller share of experts")

    @staticmethod
    def parse(text: str) -> Skew:
        """Parse `uniform`, or `ROWS:EXPERTS`: `0.5:0.125` is half of the rows on an eighth of the experts.

        Raises `ValueError` for anything else.
        """
        if text == "uniform":
            return UNIFORM
        rows, _, experts = text.partition(":")
        try:
            shares = float(rows), float(experts)
        except ValueError:
            raise ValueError(f"{text!r} is not of the form ROWS:EXPERTS, such as 0.5:0.125") from None
        return Skew(*shares)

    def __str__(self) -> str:
        return "uniform" if self.rows == self.experts else f"{self.rows:g}:{self.experts:g}"

    def busiest(self, experts: int) -> int:
        """Number of the busiest of `experts` experts."""
        return max(1, min(experts, round(experts * self.experts)))

    def rows_of_busiest(self, experts: int, rows: float) -> float:
        """Rows of the busiest one of `experts`, on average over routings."""
        busiest = self.busiest(experts)
        return rows / experts if busiest == experts else max(rows * self.rows / busiest, rows / experts)

    def active(self, experts: int, rows: int) -> int:
        """Experts that get any of `rows` rows: of `n` with a share `s` between them `n · (1 - (1 - s / n) ** rows)`."""
        busiest = self.busiest(experts)
        share = 1.0 if busiest == experts else self.rows
        parts = ((busiest, share), (experts - busiest, 1.0 - share))
        expected = sum(count * (1.0 - (1.0 - part / count) ** rows) for count, part in parts if count)
        return max(1, min(experts, rows, round(expected)))

    def of_busiest_rank(self, experts: int, world: int) -> tuple[float, Skew]:
        """Return the share of all rows that the busiest of `world` ranks of `experts` experts each has, and their
        skew there. The busiest experts are assumed to be adjacent: on one rank, as far as it can store them."""
        busiest = self.busiest(experts * world)
        if busiest == experts * world:
            return 1.0 / world, UNIFORM
        here = min(busiest, experts)
        theirs, others = self.rows * here / busiest, (1.0 - self.rows) / (experts * world - busiest)
        share = max(theirs + (experts - here) * others, 1.0 / world)
        spread = UNIFORM if here == experts else Skew(max(theirs / share, here / experts), here / experts)
        return share, spread


UNIFORM = Skew()
