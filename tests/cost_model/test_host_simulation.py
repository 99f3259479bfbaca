"""The simulation among hosts: by hand where that is possible, against the closed forms everywhere."""

from __future__ import annotations

from itertools import pairwise, product
from math import log2

import pytest

from weaveopt import cost_model
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.host_algorithms import HOST_ALGORITHMS, HostAllReduce, host_algorithm
from weaveopt.cost_model.host_schedules import DOUBLING, HALVING, ONE_SHOT, RING, TWO_SHOT
from weaveopt.cost_model.host_simulation import simulate
from weaveopt.cost_model.machine import Link
from weaveopt.records.candidate import Fabric

KIB = 1024
LOCAL, INTER = Link("", 1.0, 1e11), Link("", 10.0, 1e10)
COSTLY = Link("", 30.0, 1.25e9, overhead_us=10.0)


def _close(name: str, problem: HostAllReduce, inter: Link, ranks_per_link: int) -> float:
    """The closed form over the simulation."""
    seen = simulate(name, problem, LOCAL, inter, ranks_per_link)
    return host_algorithm(name).cost(problem, LOCAL, inter, ranks_per_link).us / seen.us


def test_one_exchange_by_hand() -> None:
    """Two hosts of one rank: `o + M / β + α + o`; two ranks that share a link wait for each other's message."""
    us = 1e6 / COSTLY.bytes_per_s * 1e6
    assert simulate(DOUBLING, HostAllReduce(1e6, 1, 2), LOCAL, COSTLY).us == pytest.approx(30 + 2 * 10 + us)
    within = 2 * 1 + 1e6 / 1e11 * 1e6
    shared = simulate(DOUBLING, HostAllReduce(1e6, 2, 2), LOCAL, COSTLY)
    assert shared.us == pytest.approx(within + 30 + 2 * 10 + 2 * us), "a share of half the elements, twice as wide"
    assert simulate(DOUBLING, HostAllReduce(1e6, 2, 2), LOCAL, COSTLY, 1).us == pytest.approx(within + 50 + us)


def test_an_early_message_waits_for_one_that_is_awaited() -> None:
    """Three hosts: host 1 sends its sum at once, but host 0 first needs the message of host 2."""
    us = 1e6 / INTER.bytes_per_s * 1e6
    three = simulate(DOUBLING, HostAllReduce(1e6, 1, 3), LOCAL, INTER)
    sent, traded, returned = us, 2 * us, us
    # Host 0's sum leaves before the total that it returns, on the same link.
    assert three.us == pytest.approx(sent + traded + returned + 2 * 10)


@pytest.mark.parametrize(("ranks_per_host", "ranks_per_link"), [(1, 1), (4, 1), (4, 4)])
@pytest.mark.parametrize("name", [algorithm.name for algorithm in HOST_ALGORITHMS])
def test_closed_forms_agree(name: str, ranks_per_host: int, ranks_per_link: int) -> None:
    """Within 10 %; where one host stands in for another, whose messages meet others on its link, within 20 %."""
    slingshot = cost_model.load("a100x4-slingshot").inter_host
    for inter, hosts, kib in product((slingshot, COSTLY), (2, 3, 4, 6, 7, 8, 13, 16), (1, 16, 128, 512, 2048)):
        ratio = _close(name, HostAllReduce(kib * KIB, ranks_per_host, hosts), inter, ranks_per_link)
        stands_in = name in (DOUBLING, HALVING) and hosts & (hosts - 1)
        assert abs(ratio - 1) <= (0.2 if stands_in else 0.1), (name, inter, hosts, kib, ratio)


@pytest.mark.parametrize("name", [algorithm.name for algorithm in HOST_ALGORITHMS])
def test_counts_agree(name: str) -> None:
    for hosts, ranks_per_host in product((1, 2, 3, 5, 8, 12), (1, 3)):
        problem = HostAllReduce(64 * KIB, ranks_per_host, hosts)
        seen, told = simulate(name, problem, LOCAL, INTER), host_algorithm(name).traffic(problem)
        assert (seen.messages, seen.peers) == (told.messages, told.peers)
        assert seen.sent_bytes == pytest.approx(told.sent_bytes)
        assert seen.received_bytes == pytest.approx(told.received_bytes)
        assert seen.memory_bytes == pytest.approx(told.memory_bytes)


@pytest.mark.parametrize("machine", ["a100x4-slingshot", "gh200-infiniband"])
def test_doubling_grows_with_the_logarithm_of_hosts(machine: str) -> None:
    """Memory, connections and time of a rank to 1024 hosts: the same amount more for each doubling of the hosts."""
    profile = cost_model.load(machine)
    local, ranks = fabric_costs(profile, Fabric.NVSHMEM).link, min(profile.ranks_per_host, 2)
    counts = [1 << power for power in range(1, 11)]
    seen = [simulate(DOUBLING, HostAllReduce(64 * KIB, ranks, hosts), local, profile.inter_host, 1) for hosts in counts]
    assert [each.peers for each in seen] == [log2(hosts) for hosts in counts]
    assert [each.messages for each in seen] == [log2(hosts) for hosts in counts]
    for read in ("memory_bytes", "us"):
        steps = [getattr(after, read) - getattr(before, read) for before, after in pairwise(seen)]
        assert steps == pytest.approx([steps[0]] * len(steps)), read
    direct = [
        simulate(ONE_SHOT, HostAllReduce(64 * KIB, ranks, hosts), local, profile.inter_host, 1) for hosts in (2, 32)
    ]
    assert direct[1].memory_bytes == 31 * direct[0].memory_bytes and direct[1].peers == 31


def test_some_send_hardly_more_to_many_hosts() -> None:
    """To 32 hosts over to two, of one rank: bf16 in the first round, sums twice as wide in later ones."""

    def growth(name: str) -> float:
        few, many = (simulate(name, HostAllReduce(1 << 20, 1, hosts), LOCAL, INTER).sent_bytes for hosts in (2, 32))
        return many / few

    assert growth(TWO_SHOT) == pytest.approx(2 * 31 / 32)
    assert growth(HALVING) == pytest.approx(1 / 2 + 2 * (31 / 32 - 1 / 2) + 31 / 32)
    assert growth(RING) == pytest.approx(1 / 32 + 2 * 30 / 32 + 31 / 32)
    assert growth(DOUBLING) == 1 + 2 * 4
    assert growth(ONE_SHOT) == 31
