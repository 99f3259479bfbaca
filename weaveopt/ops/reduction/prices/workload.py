"""Workload of the rule's kernel at one site, with its token counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weaveopt.cost_model import Gemm
from weaveopt.records.site import DTYPE_BYTES


@dataclass(frozen=True)
class Workload:
    """Unfused computation of one site on every rank: all-reduce of `[tokens, hidden]`, add, norm.

    `tokens` is the token count that estimates are made for (the hint, if shapes are dynamic);
    `max_tokens` is the largest count that the compiled graph may see (equal to `tokens` if static).
    """

    tokens: int
    max_tokens: int
    hidden: int
    dtype: str
    world: int
    hosts: int = 1
    gemm: Gemm | None = None
    """The GEMM that makes the partial result, where the rule's operation takes it in."""
    num_partials: int = 1
    """All-reduces whose results are added (two where a mixture and its shared experts are added)."""
    num_norms: int = 1
    has_norm: bool = True
    """True if normalized rows are returned; false if the sum is the only result."""
    has_residual: bool = True
    sum_is_used: bool = True
    """True if the graph reads the sum (partials + residual) after this site."""
    sum_may_shard: bool = False
    """True if only other sites read the sum, as their residual: then every rank may keep just its own token rows."""
    out_dtype: str = ""
    """Dtype of the normalized rows, if it is not `dtype`."""
    min_tokens: int = 0
    """The least count that the compiled graph may see, where its count is not fixed; 0: nothing is known."""

    @property
    def is_static(self) -> bool:
        """True if the compiled graph sees this one count only."""
        return self.max_tokens == self.tokens and self.min_tokens in (0, self.tokens)

    @property
    def message_bytes(self) -> int:
        return self.tokens * self.hidden * DTYPE_BYTES[self.dtype]


def with_unfused_norm(workload: Workload) -> Workload:
    """The same with the norm of the sum left in the graph: every rank gets the whole sum and normalizes it."""
    assert workload.has_norm, "there is no norm to leave"
    return replace(
        workload,
        num_norms=workload.num_norms - 1,
        has_norm=False,
        sum_is_used=True,
        sum_may_shard=False,
        out_dtype="",
    )
