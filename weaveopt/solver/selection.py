"""Exact minimum-cost assignment by variable elimination: one choice for each of many sites that depend on each other.

Minimized over the choices `x` of all sites::

    sum_i costs[i][x_i] + sum_k interactions[k].terms.get(x of its sites, 0)

Sites are eliminated one after the other. Of all choices made so far only those of sites that a later one still
depends on are kept, with the least cost of each combination. A chain, a tree or a clique of sites that exclude each
other keeps few combinations, whatever its length: the work grows with the number of sites and with the combinations at
the widest place.

Costs are added as integers, without rounding, so that two sums are equal or not whatever the order of their parts.
Of several minima the one with the fewest changed sites is taken; then the one whose first site (in the order given)
that differs has the earlier choice. Nothing else enters, so all ranks take the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

EXCLUDED = inf
"""Term of choices that exclude each other."""


@dataclass(frozen=True)
class JointCost:
    """Joint cost of some choices at a few sites, beyond the cost of each by itself."""

    sites: tuple[int, ...]
    """Positions of the sites, each once."""
    terms: Mapping[tuple[int, ...], float]
    """Choices of the sites, in their order -> microseconds, negative where they help; not listed: 0."""

    def us(self, choices: Sequence[int]) -> float:
        """Contribution of this interaction to the cost of all sites' choices."""
        return self.terms.get(self.of(choices), 0.0)

    def of(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices at its sites."""
        return tuple(choices[site] for site in self.sites)


_Key = tuple[int, int, int]
"""Cost; number of sites changed; all choices as digits of one number, the first site's the most significant."""


@dataclass(frozen=True)
class SelectionStep:
    """One more site, whose choices extend the states of those that wait for later ones. They and it are the scope."""

    site: int
    scope: tuple[int, ...]
    """The scope's positions in itself."""
    due: tuple[tuple[int, tuple[int, ...]], ...]
    """Interactions all of whose sites are now known: position of each, and where in the scope its sites are."""
    kept: tuple[int, ...]
    """Positions in the scope of the sites that a later site depends on."""


def steps_of(num_sites: int, interacting: Sequence[tuple[int, ...]]) -> tuple[SelectionStep, ...]:
    """The order of the work, given the sites of every interaction: the same whatever they cost."""
    order = _order(num_sites, interacting)
    place = {site: step for step, site in enumerate(order)}
    due: dict[int, list[int]] = {}
    ends = dict(place)
    for position, sites in enumerate(interacting):
        last = max(sites, key=place.__getitem__)
        due.setdefault(last, []).append(position)
        ends.update((site, max(ends[site], place[last])) for site in sites)
    waiting: list[int] = []
    steps = []
    for step, site in enumerate(order):
        scope = [*waiting, site]
        kept = tuple(index for index, other in enumerate(scope) if ends[other] > step)
        where = tuple((each, tuple(map(scope.index, interacting[each]))) for each in due.get(site, ()))
        steps.append(SelectionStep(site, tuple(range(len(scope))), where, kept))
        waiting = [scope[index] for index in kept]
    return tuple(steps)


def select(
    costs_us: Sequence[Sequence[float]], interactions: Sequence[JointCost] = (), steps: Sequence[SelectionStep] = ()
) -> tuple[int, ...]:
    """The best choice of every site. The last choice of a site is the one that changes nothing.

    `costs_us[i]` are finite. `steps` are `steps_of` these interactions, where somebody has them already. Asserts that
    some set has no excluded choices (that nothing is changed, say).
    """
    exact = _Exact(costs_us, interactions)
    weights = _weights([len(row) for row in costs_us])
    states: dict[tuple[int, ...], _Key] = {(): (0, 0, 0)}
    for step in steps or steps_of(len(costs_us), [each.sites for each in interactions]):
        terms = [(None if where == step.scope else where, exact.terms(interactions[at])) for at, where in step.due]
        states = _extended(states, exact.costs(step.site), weights[step.site], terms, step.kept)
    assert states, "every set of choices is excluded"
    (_, _, digits) = states[()]
    return tuple(digits // weight % len(row) for weight, row in zip(weights, costs_us, strict=True))


def _extended(
    states: Mapping[tuple[int, ...], _Key],
    costs: Sequence[int],
    weight: int,
    interactions: Sequence[tuple[tuple[int, ...] | None, Mapping[tuple[int, ...], int | None]]],
    kept: Sequence[int],
) -> dict[tuple[int, ...], _Key]:
    """Every state with every choice of one more site; of those equal in what is `kept`, the best.

    An interaction comes with the places of its sites, None where it is of all of them in order.
    """
    found: dict[tuple[int, ...], _Key] = {}
    unchanged = len(costs) - 1
    for state, (cost, changed, digits) in states.items():
        for choice, own in enumerate(costs):
            choices = (*state, choice)
            total: int | None = cost + own
            for where, terms in interactions:
                term = terms.get(choices if where is None else tuple([choices[index] for index in where]), 0)
                if term is None or total is None:
                    total = None
                    break
                total += term
            if total is None:
                continue
            key = (total, changed + (choice != unchanged), digits + choice * weight)
            rest = choices[-1:] if len(kept) == 1 and kept[0] == len(state) else tuple([choices[at] for at in kept])
            best = found.get(rest)
            if best is None or key < best:
                found[rest] = key
    return found


class _Exact:
    """Costs as integers: multiples of the finest power of two that occurs in any of them.

    Many sites have the same row of costs, and many interactions the same terms (the same objects): each is read once.
    """

    def __init__(self, costs_us: Sequence[Sequence[float]], interactions: Iterable[JointCost]) -> None:
        self._rows = costs_us
        rows = {id(row): row for row in costs_us}
        terms = {id(each.terms): each.terms for each in interactions}
        values = {cost for row in rows.values() for cost in row}
        assert all(map(isfinite, values)), f"costs must be finite: {sorted(values)}"
        values.update(us for each in terms.values() for us in each.values() if us != EXCLUDED)
        self._scale = max((value.as_integer_ratio()[1] for value in values), default=1)
        self._costs = {at: [self._integer(cost) for cost in row] for at, row in rows.items()}
        self._terms = {
            at: {choices: None if us == EXCLUDED else self._integer(us) for choices, us in each.items()}
            for at, each in terms.items()
        }

    def costs(self, site: int) -> list[int]:
        return self._costs[id(self._rows[site])]

    def terms(self, interaction: JointCost) -> dict[tuple[int, ...], int | None]:
        return self._terms[id(interaction.terms)]

    def _integer(self, value: float) -> int:
        numerator, denominator = value.as_integer_ratio()
        return numerator * (self._scale // denominator)


def _weights(sizes: Sequence[int]) -> list[int]:
    """Weight of each site's choice as a digit of one mixed-radix number."""
    weights = [1] * len(sizes)
    for site in range(len(sizes) - 1, 0, -1):
        weights[site - 1] = weights[site] * sizes[site]
    return weights


def _order(num_sites: int, interacting: Iterable[tuple[int, ...]]) -> list[int]:
    """An order in which few sites wait for later ones: each time the one that leaves fewest waiting, then the earlier.

    It has no part in what is selected, only in the work.
    """
    later: list[set[int]] = [set() for _ in range(num_sites)]
    for together in interacting:
        for site in together:
            later[site].update(other for other in together if other != site)
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
    """Number of further sites that wait for later ones once `site` is taken."""
    return bool(later[site]) - sum(later[other] == {site} for other in waiting)
