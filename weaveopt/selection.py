"""One choice for each of many sites that depend on each other, such that the sum of all costs is least: exact.

Minimized over the choices `x` of all sites::

    sum_i costs[i][x_i] + sum_k interactions[k].terms.get(x of its sites, 0)

Sites are taken one after the other; what is kept is the best way to every combination of choices of those sites
that a later one still depends on. A chain, a tree or a tangle of sites that exclude each other keeps few of them,
whatever its length: the work grows with the number of sites and with the combinations at the widest place.

Costs are added as integers, without rounding, so that two sums are equal or not whatever the order of their parts.
Of several best sets the one that changes fewest sites is taken; then the one whose first site (in the order given)
that differs has the earlier choice. Nothing else enters, so all ranks take the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

EXCLUDED = inf
"""As a term: these choices never go together."""


@dataclass(frozen=True)
class Interaction:
    """What some choices of a few sites cost together, beyond what each costs by itself."""

    sites: tuple[int, ...]
    """Positions of the sites, each once."""
    terms: Mapping[tuple[int, ...], float]
    """Choices of the sites, in their order -> microseconds, negative where they help; not listed: 0."""

    def us(self, choices: Sequence[int]) -> float:
        """What the choices of all sites cost here."""
        return self.terms.get(self.of(choices), 0.0)

    def of(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The choices of its own sites."""
        return tuple(choices[site] for site in self.sites)


_Key = tuple[int, int, int]
"""Cost; number of sites changed; all choices as digits of one number, the first site's the most significant."""


def select(costs_us: Sequence[Sequence[float]], interactions: Sequence[Interaction] = ()) -> tuple[int, ...]:
    """The best choice of every site. The last choice of a site is the one that changes nothing.

    `costs_us[i]` are finite. Asserts that some set has no excluded choices (that nothing is changed, say).
    """
    exact = _Exact(costs_us, interactions)
    order = _order(len(costs_us), interactions)
    place = {site: step for step, site in enumerate(order)}
    due: dict[int, list[Interaction]] = {}
    ends = dict(place)
    for interaction in interactions:
        last = max(interaction.sites, key=place.__getitem__)
        due.setdefault(last, []).append(interaction)
        ends.update((site, max(ends[site], place[last])) for site in interaction.sites)
    weights = _weights([len(row) for row in costs_us])
    states: dict[tuple[int, ...], _Key] = {(): (0, 0, 0)}
    waiting: list[int] = []
    for step, site in enumerate(order):
        scope = [*waiting, site]
        kept = [index for index, other in enumerate(scope) if ends[other] > step]
        terms = [([scope.index(other) for other in each.sites], exact.terms(each)) for each in due.get(site, ())]
        states = _extended(states, exact.costs(site), weights[site], terms, kept)
        waiting = [scope[index] for index in kept]
    assert states, "every set of choices is excluded"
    (_, _, digits) = states[()]
    return tuple(digits // weight % len(row) for weight, row in zip(weights, costs_us, strict=True))


def _extended(
    states: Mapping[tuple[int, ...], _Key],
    costs: Sequence[int],
    weight: int,
    interactions: Sequence[tuple[Sequence[int], Mapping[tuple[int, ...], int | None]]],
    kept: Sequence[int],
) -> dict[tuple[int, ...], _Key]:
    """Every state with every choice of one more site; of those alike in what is `kept`, the best."""
    found: dict[tuple[int, ...], _Key] = {}
    unchanged = len(costs) - 1
    for state, (cost, changed, digits) in states.items():
        for choice, own in enumerate(costs):
            choices = (*state, choice)
            total: int | None = cost + own
            for where, terms in interactions:
                term = terms.get(tuple([choices[index] for index in where]), 0)
                if term is None or total is None:
                    total = None
                    break
                total += term
            if total is None:
                continue
            key = (total, changed + (choice != unchanged), digits + choice * weight)
            rest = tuple([choices[index] for index in kept])
            if rest not in found or key < found[rest]:
                found[rest] = key
    return found


class _Exact:
    """Costs as integers: multiples of the finest power of two that occurs in any of them."""

    def __init__(self, costs_us: Sequence[Sequence[float]], interactions: Iterable[Interaction]) -> None:
        self._costs = costs_us
        values = {cost for row in costs_us for cost in row}
        assert all(map(isfinite, values)), f"costs must be finite: {sorted(values)}"
        values.update(term for each in interactions for term in each.terms.values() if term != EXCLUDED)
        self._scale = max((value.as_integer_ratio()[1] for value in values), default=1)

    def costs(self, site: int) -> list[int]:
        return [self._integer(cost) for cost in self._costs[site]]

    def terms(self, interaction: Interaction) -> dict[tuple[int, ...], int | None]:
        return {at: None if us == EXCLUDED else self._integer(us) for at, us in interaction.terms.items()}

    def _integer(self, value: float) -> int:
        numerator, denominator = value.as_integer_ratio()
        return numerator * (self._scale // denominator)


def _weights(sizes: Sequence[int]) -> list[int]:
    """Of each site's choice as a digit of one number."""
    weights = [1] * len(sizes)
    for site in range(len(sizes) - 1, 0, -1):
        weights[site - 1] = weights[site] * sizes[site]
    return weights


def _order(num_sites: int, interactions: Iterable[Interaction]) -> list[int]:
    """An order in which few sites wait for later ones: each time the one that leaves fewest waiting, then the earlier.

    It has no part in what is selected, only in the work.
    """
    later: list[set[int]] = [set() for _ in range(num_sites)]
    for interaction in interactions:
        for site in interaction.sites:
            later[site].update(other for other in interaction.sites if other != site)
    neighbours = [sorted(others) for others in later]
    order: list[int] = []
    waiting: set[int] = set()
    starts = sorted(range(num_sites), key=lambda site: (len(later[site]), site))
    taken = [False] * num_sites
    for start in starts:
        following = start
        while not taken[following]:
            order.append(following)
            taken[following] = True
            for other in neighbours[following]:
                later[other].discard(following)
            waiting = {site for site in (*waiting, following) if later[site]}
            reachable = {other for site in waiting for other in later[site]}
            if not reachable:
                break
            following = min(reachable, key=lambda site: (_left_waiting(site, later, waiting), site))
    return order


def _left_waiting(site: int, later: Sequence[set[int]], waiting: set[int]) -> int:
    """How many more sites wait for later ones once `site` is taken."""
    return bool(later[site]) - sum(later[other] == {site} for other in waiting)
