"""The kernels of this family by name: how a reduction is divided, how rows are transferred, and the run-time table of
them.

Profiles and reports name them `one_shot ll_packet`, `two_shot bulk ctas=16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from weaveopt.errors import ProfileError

OP = "all_reduce_norm"
"""The operation of these kernels' curves."""


class Algorithm(StrEnum):
    """How a reduction is divided among ranks."""

    LIBRARY = "library"
    """NCCL or Gloo decides."""
    ONE_SHOT = "one_shot"
    """Every rank reads all partial results and computes every token: one synchronization."""
    TWO_SHOT = "two_shot"
    """Every rank computes its share of the tokens and distributes the rows: two synchronizations."""
    DOUBLING = "doubling"
    """Between hosts: sums of all rows go to one host a step, in log2 steps (recursive doubling)."""
    HALVING = "halving"
    """Between hosts: sums of half as many rows a step, then the finished ones back (recursive halving and doubling)."""


class Transfer(StrEnum):
    """Transfer of rows between ranks."""

    SEGMENT = "segment"
    """CPU ranks read each other's shared segments."""
    LL_PACKET = "ll_packet"
    """Words that carry their own arrival (LL protocol), pushed into peers' mailboxes: no barrier, no flag."""
    BULK = "bulk"
    """Bulk copies (TMA) through a staging buffer with a signal after each: few CTAs fill the link."""
    MESSAGE = "message"
    """Messages between hosts, one connection a pair of ranks."""
    PACKET = "packet"
    """Words, each paired with the number of its call, put into another host's inbox: no barrier, no signal."""
    FLAGGED_ROW = "flagged_row"
    """Rows as they are, put into another host's inbox, and a flag after each: half the bytes of packets."""
    POSTED = "posted"
    """Plain stores of 16 bytes through a staging buffer with a signal after each unit: on memory of the host they are
    posted writes over PCIe, on any GPU."""
    DIRECT = "direct"
    """Loads that reduce and stores that broadcast, in place, between two barriers."""
    TILES = "tiles"
    """Tiles of a GEMM that the same kernel computes, pushed as they are finished: no kernel of this operation."""


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
        """The kernel's name: `two_shot bulk ctas=16`."""
        return variant_name(self.algorithm, self.transfer, self.num_ctas)


ALGORITHMS: dict[Transfer, tuple[Algorithm, ...]] = {
    Transfer.SEGMENT: (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT),
    Transfer.LL_PACKET: (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT),
    Transfer.BULK: (Algorithm.TWO_SHOT,),
    Transfer.POSTED: (Algorithm.TWO_SHOT,),
    Transfer.MESSAGE: (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT, Algorithm.DOUBLING, Algorithm.HALVING),
    Transfer.PACKET: (Algorithm.DOUBLING,),
    Transfer.FLAGGED_ROW: (Algorithm.DOUBLING,),
    Transfer.DIRECT: (Algorithm.TWO_SHOT,),
}
"""Algorithms that there are kernels of, by transfer."""
BETWEEN_GPUS = (Transfer.PACKET, Transfer.FLAGGED_ROW)
"""Transfers between GPUs of several hosts; the earlier one is taken where both are equally fast."""
_CTAS = " ctas="


def variant_name(algorithm: Algorithm, transfer: Transfer, num_ctas: int = 0) -> str:
    """The kernel's name in profiles; `num_ctas` 0: as many as are co-resident, which has no word."""
    return f"{algorithm.value} {transfer.value}" + (f"{_CTAS}{num_ctas}" if num_ctas else "")


@cache
def parse_variant(name: str) -> tuple[Algorithm, Transfer, int]:
    """Algorithm, transfer and number of CTAs. Raises `ProfileError` where there is no such kernel."""
    known = {variant_name(each, transfer): (each, transfer) for transfer in ALGORITHMS for each in ALGORITHMS[transfer]}
    words, separator, num_ctas = name.partition(_CTAS)
    if words not in known or (separator and not num_ctas.isdigit()):
        expected = f"one of {', '.join(known)}, followed by{_CTAS}N or nothing"
        raise ProfileError(f"a curve of {OP}: found variant {name!r}, expected {expected}")
    algorithm, transfer = known[words]
    return algorithm, transfer, int(num_ctas or 0)
