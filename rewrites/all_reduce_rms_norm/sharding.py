"""Which sums may stay sharded by tokens between sites: one answer, for what it saves and for what is laid out.

A rewritten site makes the sum, and all its readers vanish into rewritten sites that read just their own rows of
it: the residual of consecutive sites. Both ends must divide the tokens alike and switch between algorithms at the
same token count, or one would read rows that the other never wrote. Else every rank needs the sum whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.records.candidate import Candidate
from weaveopt.rule import Finding, Match

Rewritten = tuple[Finding, Candidate]
"""A site that is rewritten, and how."""


@dataclass(frozen=True)
class SharedSum:
    """A sum that may stay sharded if enough of the sites around it are rewritten; positions among the findings."""

    maker: int
    readers: tuple[int, ...]
    """At least one."""
    covered: tuple[bool, ...] = ()
    """Whether all that reads the sum vanishes, for every set of rewritten readers: set `n` has those of `n`'s bits."""


def shared_sums(findings: Sequence[Finding]) -> tuple[SharedSum, ...]:
    """Every sum that nothing but its maker and the sites of which it is the residual reads."""
    readers: dict[fx.Node, list[int]] = {}
    for index, finding in enumerate(findings):
        if finding.match is not None and finding.match.sharded_input is not None:
            readers.setdefault(finding.match.sharded_input, []).append(index)
    found: list[SharedSum] = []
    for maker, finding in enumerate(findings):
        value = None if finding.match is None else finding.match.sharded_output
        if finding.match is None or value is None:
            continue
        those = tuple(index for index in readers.get(value, ()) if index != maker)
        matches = [match for index in those if (match := findings[index].match) is not None]
        if those and _covered(value, finding.match, matches):
            found.append(SharedSum(maker, those, _by_readers(value, finding.match, matches)))
    return tuple(found)


def stays_sharded(maker: Rewritten, readers: Sequence[Rewritten]) -> bool:
    """Whether the sum that `maker` makes may stay sharded; `readers`: all rewritten sites with it as their residual."""
    match = maker[0].match
    if not readers or match is None or match.sharded_output is None:
        return False
    matches = [reader.match for reader, _ in readers if reader.match is not None]
    return all(division(*reader) == division(*maker) for reader in readers) and _covered(
        match.sharded_output, match, matches
    )


def sharded_values(rewritten: Sequence[Rewritten]) -> frozenset[fx.Node]:
    """The values of which every rank holds its own token rows only; `rewritten`: all sites that are."""
    found: set[fx.Node] = set()
    readers: dict[fx.Node, list[Rewritten]] = {}
    for each in rewritten:
        if each[0].match is not None and each[0].match.sharded_input is not None:
            readers.setdefault(each[0].match.sharded_input, []).append(each)
    for each in rewritten:
        value = None if each[0].match is None else each[0].match.sharded_output
        if value is not None and stays_sharded(each, [other for other in readers.get(value, ()) if other is not each]):
            found.add(value)
    return frozenset(found)


def division(finding: Finding, chosen: Candidate) -> tuple[object, ...]:
    """All that says which rank holds which token rows, at every token count."""
    workload = finding.site.workload
    assert workload is not None, f"{finding.site.id} was not matched"
    shape = (workload.world, workload.hidden, workload.dtype, workload.tokens, workload.max_tokens)
    return (finding.site.group, chosen.fabric, chosen.algorithm, *shape, chosen.parameters, chosen.lowerings)


def _by_readers(value: fx.Node, maker: Match, readers: Sequence[Match]) -> tuple[bool, ...]:
    sets = ([match for bit, match in enumerate(readers) if number >> bit & 1] for number in range(1 << len(readers)))
    return tuple(_covered(value, maker, each) for each in sets)


def _covered(value: fx.Node, maker: Match, readers: Sequence[Match]) -> bool:
    """Whether all that reads `value` vanishes into these sites."""
    return all(user in maker.interior or any(user in reader.interior for reader in readers) for user in value.users)
