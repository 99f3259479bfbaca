"""All-to-all in which ranks send unequally much: the busiest rank decides.

Every rank sends to every peer directly and at once, so it is one step; what goes to the own host and what goes to
others takes different links at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

from weaveopt.cost_model.alpha_beta import NOTHING, Cost, Steps
from weaveopt.cost_model.machine import Link


def imbalance(loads: Sequence[float]) -> float:
    """Busiest over mean: 1 where all are equal, `n` where one rank has everything; 1 where there is nothing."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total > 0 else 1.0


def all_to_all_cost(
    message_bytes: float, ranks_per_host: int, hosts: int, local: Link, inter: Link, imbalance: float = 1.0
) -> Cost:
    """The slower of `α_intra + i (G - 1) / n · M / β_intra` and `α_inter + i (n - G) / n · M / β_inter`.

    `M` are the bytes that a rank holds for all ranks, itself included, in the mean; `i` its `imbalance`: the busiest
    rank sends or receives `i M`, evenly spread over its peers (FlashOverlap §4.2.2 takes the maximum across GPUs).
    """
    ranks = ranks_per_host * hosts
    busiest_bytes = imbalance * message_bytes
    within = Steps(1, (ranks_per_host - 1) / ranks).cost(busiest_bytes, local) if ranks_per_host > 1 else NOTHING
    across = Steps(1, (ranks - ranks_per_host) / ranks).cost(busiest_bytes, inter) if hosts > 1 else NOTHING
    return max(within, across, key=lambda cost: cost.us)


def busiest_bytes(
    sent_bytes: Sequence[Sequence[float]], ranks_per_host: int | None = None, between: bool = False
) -> float:
    """The most that any rank sends or receives on one kind of link; row `i` says what rank `i` sends to each rank.

    Ranks are numbered host by host, `ranks_per_host` (None: all) on each. Within hosts, or `between` them; what a
    rank keeps never counts.
    """
    ranks = range(len(sent_bytes))
    size = ranks_per_host or len(sent_bytes)
    most = 0.0
    for rank in ranks:
        peers = [peer for peer in ranks if peer != rank and (peer // size != rank // size) == between]
        leaving = sum(sent_bytes[rank][peer] for peer in peers)
        coming = sum(sent_bytes[peer][rank] for peer in peers)
        most = max(most, leaving, coming)
    return most


def uneven_all_to_all_cost(
    sent_bytes: Sequence[Sequence[float]], ranks_per_host: int, local: Link, inter: Link
) -> Cost:
    """`all_to_all_cost` for known counts: `sent_bytes[i][j]` bytes go from rank `i` to rank `j`; 0 where none leave."""
    send = Steps(1, 1.0)
    within = send.cost(busiest_bytes(sent_bytes, ranks_per_host), local)
    across = send.cost(busiest_bytes(sent_bytes, ranks_per_host, between=True), inter)
    return max(within, across, key=lambda cost: cost.us)
