"""All-reduce among several hosts: the models of the NVRAR paper, §2.2 and §4.3, by the numbers of its equations.

`M` message bytes, `N` hosts, `G` ranks a host; `α`, `β` latency and bytes per second within a host and between. Here
every rank has a link of its own to the other hosts, as a GPU has its NIC; `host_algorithms` has what ranks that share a
host's link do.
"""

from __future__ import annotations

from math import log2

from weaveopt.cost_model.alpha_beta import NOTHING, Cost, all_gather, recursive_doubling, reduce_scatter, ring
from weaveopt.cost_model.machine import Link

FLAGGED_PAYLOAD = 2.0
"""η: data and arrival flag share a word between hosts (NVRAR §4.2.2: 4 bytes of data in 8 sent)."""


def ring_cost(message_bytes: float, ranks: int, inter: Link) -> Cost:
    """`2 (NG - 1) α_inter + 2 (NG - 1) / NG · M / β_inter` (eq. 1): one flat ring, as slow as its slowest links."""
    return ring(ranks).cost(message_bytes, inter)


def tree_cost(message_bytes: float, ranks_per_host: int, hosts: int, local: Link, inter: Link) -> Cost:
    """`2 (G - 1) α_intra + 2 log2(N) α_inter + 2 (N - 1) / N · M / β_inter` (eq. 2).

    A chain in each host and a double binary tree between them. The paper leaves the bandwidth in a host out; on
    one host, where nothing else would be left, it is that of a ring.
    """
    if message_bytes <= 0:
        return NOTHING
    chain_us = 2 * (ranks_per_host - 1) * local.step_us
    if hosts <= 1:
        return Cost(chain_us, ring(ranks_per_host).cost(message_bytes, local).transfer_us)
    transfer_us = inter.us(2 * (hosts - 1) / hosts * message_bytes)
    return Cost(chain_us + 2 * log2(hosts) * inter.step_us, transfer_us)


def doubling_cost(share_bytes: float, hosts: int, inter: Link, eta: float = FLAGGED_PAYLOAD) -> Cost:
    """`log2(N) α_inter + (N - 1) / N · η (M / G) / β_inter` (eq. 4), `share_bytes` being `M / G`.

    As printed, and so a lower bound: Algorithm 1 sends the whole share at every step, `log2(N) η (M / G)`, and no
    all-reduce can send less than `2 (N - 1) / N`. `doubling_sent_cost` counts what is sent. Where `N` is no power of
    two, two steps more than the power below (`recursive_doubling`).
    """
    if share_bytes <= 0:
        return NOTHING
    steps_us = recursive_doubling(hosts).num_steps * inter.step_us
    return Cost(steps_us, inter.us((hosts - 1) / hosts * eta * share_bytes))


def doubling_sent_cost(share_bytes: float, hosts: int, inter: Link, eta: float = FLAGGED_PAYLOAD) -> Cost:
    """`log2(N) (α_inter + η (M / G) / β_inter)`: the steps of eq. 4 with the bytes that Algorithm 1 sends."""
    return recursive_doubling(hosts).cost(eta * share_bytes, inter)


def hierarchical_cost(
    message_bytes: float, ranks_per_host: int, hosts: int, local: Link, inter: Link, eta: float = FLAGGED_PAYLOAD
) -> Cost:
    """`2 (G - 1) α_intra + log2(N) α_inter + M / G [2 (G - 1) / β_intra + (N - 1) η / (N β_inter)]` (eq. 6).

    Reduce-scatter in the host (eq. 3), recursive doubling between hosts (eq. 4), all-gather in the host (eq. 5).
    """
    scatter = reduce_scatter(ranks_per_host).cost(message_bytes, local)
    doubling = doubling_cost(message_bytes / ranks_per_host, hosts, inter, eta)
    return scatter + doubling + all_gather(ranks_per_host).cost(message_bytes, local)


def hierarchical_sent_cost(
    message_bytes: float, ranks_per_host: int, hosts: int, local: Link, inter: Link, eta: float = FLAGGED_PAYLOAD
) -> Cost:
    """Eq. 6 with the bytes that Algorithm 1 sends between hosts: never less than `hierarchical_cost`."""
    scatter = reduce_scatter(ranks_per_host).cost(message_bytes, local)
    doubling = doubling_sent_cost(message_bytes / ranks_per_host, hosts, inter, eta)
    return scatter + doubling + all_gather(ranks_per_host).cost(message_bytes, local)
