"""Closed forms of all-reduces among hosts: they count what the schedules send, and the cheapest is chosen by price."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest

from tests.cost_model.host_exchange import execute
from weaveopt import cost_model
from weaveopt.cost_model.alpha_beta import NOTHING
from weaveopt.cost_model.host_algorithms import HOST_ALGORITHMS, HostAllReduce, host_algorithm, hosts_choice
from weaveopt.cost_model.host_schedules import DOUBLING, HALVING, ONE_SHOT, RING, TWO_SHOT, Payload, host_schedule
from weaveopt.cost_model.machine import Link

EVERY = tuple(algorithm.name for algorithm in HOST_ALGORITHMS)
LOCAL, INTER = Link("", 1.0, 1e11), Link("", 10.0, 1e10)
KIB = 1024
ELEMENT = 2


def _bytes(counted: dict[Payload, int], ranks_per_host: int) -> int:
    widths = {Payload.PARTIALS: ELEMENT * ranks_per_host, Payload.SUMS: 4, Payload.TOTALS: ELEMENT}
    return sum(widths[payload] * count for payload, count in counted.items())


@pytest.mark.parametrize("ranks_per_host", [1, 3])
@pytest.mark.parametrize("name", EVERY)
def test_closed_forms_count_what_is_sent(name: str, ranks_per_host: int) -> None:
    """Messages, bytes, connections and rounds of the busiest host of an executed schedule."""
    for hosts in range(2, 34):
        length = 8 * hosts * (1 << hosts.bit_length())  # every number of parts divides it
        done = execute(name, [np.zeros(length, np.float32)] * hosts, ranks_per_host)
        problem = HostAllReduce(length * ELEMENT * ranks_per_host, ranks_per_host, hosts, ELEMENT)
        traffic = host_algorithm(name).traffic(problem)
        what = f"{name}, {hosts} hosts"
        assert traffic.messages == max(done.num_messages), what
        assert traffic.sent_bytes == max(_bytes(each, ranks_per_host) for each in done.sent), what
        assert traffic.received_bytes == max(_bytes(each, ranks_per_host) for each in done.received), what
        assert traffic.peers == max(map(len, done.peers)), what
        longest = max(len(host_schedule(name, host, hosts, ranks_per_host).rounds) for host in range(hosts))
        assert traffic.steps == longest, what


@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 12])
def test_direct_forms_by_hand(hosts: int) -> None:
    """`α + G (N - 1) M / β` and `2 α + (G + 1) (N - 1) / N · M / β` over the one link of the host's ranks."""
    ranks, message = 3, 1e6
    wire_us = message / INTER.bytes_per_s * 1e6
    problem = HostAllReduce(message, ranks, hosts)
    one = host_algorithm(ONE_SHOT).between_cost(problem, INTER, ranks)
    assert one.us == pytest.approx(10 + ranks * (hosts - 1) * wire_us)
    two = host_algorithm(TWO_SHOT).between_cost(problem, INTER, ranks)
    # The first half ends when its last byte left, not when it arrived: the other ranks' halves fill the link.
    whole = 2 * 10 + (ranks + 1) * (hosts - 1) / hosts * wire_us
    assert whole - 10 <= two.us <= whole


def test_doubling_by_hand() -> None:
    """Eight hosts of one rank: bf16 in the first round and fp32 in the two others; of two ranks fp32 in all three."""
    us = 1e6 / INTER.bytes_per_s * 1e6
    single = host_algorithm(DOUBLING).cost(HostAllReduce(1e6, 1, 8), LOCAL, INTER)
    assert (single.latency_us, single.us) == (30.0, pytest.approx(30 + us + 2 * 2 * us))
    wide = host_algorithm(DOUBLING).cost(HostAllReduce(1e6, 1, 8, element_bytes=4), LOCAL, INTER)
    assert wide.us == pytest.approx(30 + 3 * us), "fp32 is no wider as a sum"
    own_links = host_algorithm(DOUBLING).between_cost(HostAllReduce(1e6, 2, 8), INTER, ranks_per_link=1)
    assert own_links.us == pytest.approx(30 + 3 * 2 * us / 2)


def test_beyond_a_power_of_two_two_rounds_more() -> None:
    for name in (DOUBLING, HALVING):
        for hosts in (3, 5, 6, 7, 9, 100, 1000):
            power = 1 << (hosts.bit_length() - 1)
            here, below = (host_algorithm(name).traffic(HostAllReduce(1e6, 2, n)) for n in (hosts, power))
            assert here.steps == below.steps + 2 and here.peers == below.peers + 1


def test_memory_and_connections_grow_with_the_logarithm_of_hosts() -> None:
    """NVRAR §4.2.1: "negligible for small messages and logarithmic recursion depth"."""
    share, counts = 64 * KIB, (2, 4, 16, 64, 256, 1024)
    found = [host_algorithm(DOUBLING).traffic(HostAllReduce(share * 4, 4, hosts)) for hosts in counts]
    for hosts, traffic in zip(counts, found, strict=True):
        assert traffic.peers == traffic.steps == traffic.messages == log2(hosts)
        assert traffic.memory_bytes == 2 * share * (log2(hosts) + 1)
    direct = [host_algorithm(ONE_SHOT).traffic(HostAllReduce(share * 4, 4, hosts)) for hosts in counts]
    assert [each.peers for each in direct] == [hosts - 1 for hosts in counts]


def test_a_message_costs_both_its_ends() -> None:
    link = Link("", 10.0, 1e10, overhead_us=3.0)
    assert link.step_us == 16
    assert host_algorithm(DOUBLING).cost(HostAllReduce(8, 1, 2), LOCAL, link).latency_us == 16
    assert host_algorithm(RING).cost(HostAllReduce(8, 1, 4), LOCAL, link).latency_us == 6 * 16
    # Nine messages out and nine in are a rank's own work; fewer hide in the latency.
    assert host_algorithm(ONE_SHOT).cost(HostAllReduce(8, 1, 10), LOCAL, link).latency_us == 2 * 9 * 3
    assert host_algorithm(ONE_SHOT).cost(HostAllReduce(8, 1, 3), LOCAL, link).latency_us == 10 + 3 * 3
    assert cost_model.ring_cost(8, 4, link).latency_us == 6 * 16, "the library's messages cost as much"


@pytest.mark.parametrize("name", EVERY)
def test_never_falls_with_bytes_and_is_nothing_for_none(name: str) -> None:
    algorithm = host_algorithm(name)
    for hosts in range(1, 18):
        times = [algorithm.cost(HostAllReduce(1 << size, 2, hosts), LOCAL, INTER).us for size in range(0, 33, 4)]
        assert times == sorted(times)
        assert algorithm.cost(HostAllReduce(0, 2, hosts), LOCAL, INTER) == NOTHING
    assert algorithm.cost(HostAllReduce(1e6, 1, 1), LOCAL, INTER) == NOTHING


def test_the_choice_is_by_price_and_then_by_name() -> None:
    for message_bytes in (1, 16 * KIB, 1 << 20, 1 << 26):
        for hosts in (2, 3, 8, 100):
            found = hosts_choice(message_bytes, 2, hosts, LOCAL, INTER)
            assert sorted(name for name, _ in found) == sorted(EVERY)
            keys = [(cost.us, name) for name, cost in found]
            assert keys == sorted(keys)
    assert [name for name, _ in hosts_choice(1e6, 2, 1, LOCAL, INTER)] == sorted(EVERY), "one host: all the same"
    assert [name for name, _ in hosts_choice(1e6, 2, 4, LOCAL, INTER, names=(RING, DOUBLING))] in (
        [RING, DOUBLING],
        [DOUBLING, RING],
    )


def test_each_has_its_place() -> None:
    """Few bytes: few steps. Where messages cost, few messages; many bytes of many ranks: sums on the way."""
    costly = Link("", 10.0, 1e10, overhead_us=5.0)
    assert hosts_choice(64, 1, 3, LOCAL, INTER)[0][0] == ONE_SHOT
    assert hosts_choice(16 * KIB, 1, 64, LOCAL, costly)[0][0] == DOUBLING
    assert hosts_choice(1 << 24, 1, 64, LOCAL, INTER)[0][0] == TWO_SHOT, "3 bytes of sums and totals, 2 of partials"
    assert hosts_choice(1 << 24, 4, 64, LOCAL, INTER)[0][0] == HALVING, "four partial results a share"
    assert hosts_choice(1 << 28, 4, 63, LOCAL, INTER)[0][0] == RING, "no host works for another one"
