"""The kernels of this family by name: how a reduction is divided, how rows travel, and the run-time table of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Algorithm(StrEnum):
    """How a reduction is divided among ranks."""

    LIBRARY = "library"
    """NCCL or Gloo decides."""
    ONE_SHOT = "one_shot"
    """Every rank reads all partial results and computes every token: one synchronization."""
    TWO_SHOT = "two_shot"
    """Every rank computes its share of the tokens and hands the rows out: two synchronizations."""


class Transfer(StrEnum):
    """How rows travel between ranks."""

    SEGMENT = "segment"
    """CPU ranks read each other's shared segments."""
    LL_PACKET = "ll_packet"
    """Words that carry their own arrival (LL protocol), pushed into peers' mailboxes: no barrier, no flag."""
    BULK = "bulk"
    """Bulk copies (TMA) through a staging buffer with a signal behind each: few CTAs fill the link."""
    DIRECT = "direct"
    """Loads that reduce and stores that broadcast, in place, between two barriers."""


@dataclass(frozen=True)
class KernelRow:
    """One row of a site's run-time table: how calls of up to `max_tokens` tokens run. Equal on all ranks."""

    max_tokens: int
    algorithm: Algorithm
    transfer: Transfer
    num_ctas: int = 0
    """CTAs of the kernel; 0: as many as are co-resident."""

    @property
    def variant(self) -> str:
        """The kernel's name, as candidates and profiles have it: `two_shot bulk`."""
        return f"{self.algorithm.value} {self.transfer.value}"

    @staticmethod
    def of(max_tokens: int, variant: str, num_ctas: int = 0) -> KernelRow:
        """The row that runs `variant`. Raises `ValueError` if there is no such kernel name."""
        algorithm, transfer = variant.split()
        return KernelRow(max_tokens, Algorithm(algorithm), Transfer(transfer), num_ctas)
