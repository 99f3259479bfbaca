"""Plan of a candidate at a reduction site, as neighbouring sites read it, whichever rule proposes it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, runtime_checkable

from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm
from weaveopt.records.candidate import Fabric
from weaveopt.wording import counted


@runtime_checkable
class ReductionPlan(Protocol):
    """The record that a rule keeps in `Proposal.plan`."""

    @property
    def division(self) -> tuple[Hashable, ...] | None:
        """All that says which rank holds which token rows, at every token count; None: as no other plan does."""
        ...

    @property
    def gather_us(self) -> float:
        """Cost of gathering the rows of the sum on every rank."""
        ...

    @property
    def unfused_norm(self) -> bool:
        """True if the operation returns the unsharded sum, and the norm stays in the graph, on every rank."""
        ...

    @property
    def may_alias_arena(self) -> bool:
        """True if peers can store normalized rows where they are read."""
        ...


def two_shot_division(group: str, fabric: Fabric, workload: Workload) -> tuple[Hashable, ...]:
    """Division of token rows by any two-shot exchange of all rows of a graph of one size, on GPUs or between CPU ranks
    of one host: rank `r` of `n` has the rows from `tokens * r // n`.

    It does not depend on the kernel that runs it, nor on its number of CTAs.
    """
    assert workload.is_static, (
        f"a graph of {workload.min_tokens} to {counted(workload.max_tokens, 'token')} goes by its table"
    )
    shape = (workload.world, workload.hidden, workload.dtype, workload.tokens)
    return (group, fabric, Algorithm.TWO_SHOT, *shape)
