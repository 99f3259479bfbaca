"""Sums that may stay sharded by tokens between sites: one answer for their price and for their layout.

A rewritten site makes the sum, and all its readers vanish into rewritten sites that read just their own rows of it: the
residual of consecutive sites. Both ends must divide the tokens in the same way and switch between algorithms at the
same token count, or one would read rows that the other never wrote. Else every rank needs the whole sum, and a two-shot
exchange gathers its rows too: the term `gather` of an estimate (TokenWeave, section 4.2).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch.fx as fx

from weaveopt.rewrites.reduction.plan import ReductionPlan
from weaveopt.rule import Chosen, FoundSite, PricedSite, Proposal
from weaveopt.sites.reduction.matcher import Reduction

GATHER = "gather"
"""The term of an estimate for the rows of a sum that every rank needs whole."""


@dataclass(frozen=True)
class SharedSum:
    """A sum that may stay sharded if enough of the sites around it are rewritten; positions among the sites."""

    maker: int
    readers: tuple[int, ...]
    """At least one."""
    covered: tuple[bool, ...]
    """True, for each set of rewritten readers, if rewrites consume all readers of the sum: set `n` has those of `n`'s
    bits."""

    @property
    def sites(self) -> tuple[int, ...]:
        return (self.maker, *self.readers)

    @property
    def term(self) -> str:
        return GATHER

    @property
    def key(self) -> Hashable:
        return (GATHER, self.covered)

    def terms(self, members: Sequence[PricedSite]) -> Mapping[tuple[int, ...], float]:
        """Saving of the site that makes the sum, for all choices under which the sum stays sharded."""
        plans = [[plan_of(member.proposal(at)) for at in range(member.num_choices)] for member in members]
        found: dict[tuple[int, ...], float] = {}
        for choices in product(*(range(len(each)) for each in plans)):
            made, *read = (each[at] for each, at in zip(plans, choices, strict=True))
            rewritten = sum(1 << bit for bit, each in enumerate(read) if each is not None)
            readers = [each for each in read if each is not None]
            if made is not None and self.covered[rewritten] and _passes_rows(made, readers):
                found[choices] = -made.gather_us
        return found


def shared_sums(sites: Sequence[FoundSite]) -> tuple[SharedSum, ...]:
    """Every sum that nothing but its maker and the sites of which it is the residual reads."""
    readers: dict[fx.Node, list[int]] = {}
    for index, found in enumerate(sites):
        residual = residual_of(found)
        if residual is not None:
            readers.setdefault(residual, []).append(index)
    sums: list[SharedSum] = []
    for maker, found in enumerate(sites):
        total = total_of(found)
        if total is None:
            continue
        those = tuple(index for index in readers.get(total, ()) if index != maker)
        if those and _is_covered(total, found, [sites[index] for index in those]):
            sets = ([sites[each] for bit, each in enumerate(those) if n >> bit & 1] for n in range(1 << len(those)))
            sums.append(SharedSum(maker, those, tuple(bool(n) and _is_covered(total, found, n) for n in sets)))
    return tuple(sums)


def sharded_values(chosen: Sequence[Chosen]) -> frozenset[fx.Node]:
    """The sums of which every rank holds its own token rows only; `chosen`: all rewritten sites."""
    own = [each for each in chosen if plan_of(each.proposal) is not None]
    readers: dict[fx.Node, list[Chosen]] = {}
    for each in own:
        residual = residual_of(each.found)
        if residual is not None:
            readers.setdefault(residual, []).append(each)
    sharded: set[fx.Node] = set()
    for each in own:
        total, made = total_of(each.found), plan_of(each.proposal)
        if total is None or made is None:
            continue
        those = [other for other in readers.get(total, ()) if other is not each]
        read = [plan for other in those if (plan := plan_of(other.proposal)) is not None]
        if those and _passes_rows(made, read) and _is_covered(total, each.found, [other.found for other in those]):
            sharded.add(total)
    return frozenset(sharded)


def residual_of(found: FoundSite) -> fx.Node | None:
    """The value of which a rewritten site reads only its own token rows."""
    structure = found.structure
    if not isinstance(structure, Reduction) or len(structure.reduced.residuals) != 1:
        return None
    return structure.reduced.residuals[0]


def total_of(found: FoundSite) -> fx.Node | None:
    """The value that a rewritten site can produce for its own token rows only."""
    return found.structure.reduced.total if isinstance(found.structure, Reduction) else None


def plan_of(proposal: Proposal | None) -> ReductionPlan | None:
    """Plan of a rule that supports reductions; None if the site is left, or another kind of rule rewrites it."""
    return proposal.plan if proposal is not None and isinstance(proposal.plan, ReductionPlan) else None


def _passes_rows(made: ReductionPlan, readers: Sequence[ReductionPlan]) -> bool:
    """True if readers can use just their own rows of a sum: no norm stays in the maker's graph, which would read them
    all."""
    divided_equally = bool(readers) and all(reader.division == made.division for reader in readers)
    return divided_equally and made.division is not None and not made.unfused_norm


def _is_covered(value: fx.Node, maker: FoundSite, readers: Sequence[FoundSite]) -> bool:
    """True if these sites consume all readers of `value`."""
    inside = [vanishing(each) for each in (maker, *readers)]
    return all(any(user in nodes for nodes in inside) for user in value.users)


def vanishing(found: FoundSite) -> frozenset[fx.Node]:
    """Nodes that any rewrite of a site removes, and those of the quantization downstream of it."""
    structure = found.structure
    assert isinstance(structure, Reduction), f"{found.site.id} was not matched"
    quantized = frozenset() if structure.quantized is None else structure.quantized.nodes
    return structure.interior | quantized
