"""All-to-all with unequal ranks, against counting."""

from __future__ import annotations

import random

import pytest

from weaveopt.cost_model.alpha_beta import NOTHING
from weaveopt.cost_model.machine import Link
from weaveopt.cost_model.planned.all_to_all import all_to_all_cost, busiest_bytes, imbalance, uneven_all_to_all_cost

LOCAL, INTER = Link("", 2.0, 1e11), Link("", 10.0, 1e10)


@pytest.mark.parametrize(
    ("loads", "expected"), [((5, 5, 5), 1.0), ((3, 1), 1.5), ((0, 0, 8, 0), 4.0), ((0, 0), 1.0), ((7,), 1.0)]
)
def test_imbalance_is_busiest_over_mean(loads: tuple[int, ...], expected: float) -> None:
    assert imbalance(loads) == expected


def test_balanced_by_hand() -> None:
    """Four ranks that hold 1 MB each: three quarters leave; over two hosts of two, a quarter stays within."""
    one_host = all_to_all_cost(1e6, 4, 1, LOCAL, INTER)
    assert one_host.us == pytest.approx(2.0 + 0.75 * 1e6 / 1e11 * 1e6)
    two_hosts = all_to_all_cost(1e6, 2, 2, LOCAL, INTER)
    assert two_hosts.us == pytest.approx(10.0 + 0.5 * 1e6 / 1e10 * 1e6)


def test_one_rank_a_host_uses_only_links_between() -> None:
    assert all_to_all_cost(1e6, 1, 4, LOCAL, INTER).us == pytest.approx(10.0 + 0.75 * 1e6 / 1e10 * 1e6)


def test_nothing_to_send_costs_nothing() -> None:
    assert all_to_all_cost(0, 4, 2, LOCAL, INTER) == NOTHING
    assert all_to_all_cost(1e6, 1, 1, LOCAL, INTER) == NOTHING
    assert uneven_all_to_all_cost([[9.0, 0.0], [0.0, 9.0]], 2, LOCAL, INTER) == NOTHING
    assert uneven_all_to_all_cost([], 1, LOCAL, INTER) == NOTHING


@pytest.mark.parametrize("imbalance", [1.0, 1.32, 4.0])
def test_transfer_grows_with_imbalance_and_latency_does_not(imbalance: float) -> None:
    even, uneven = (all_to_all_cost(1e6, 4, 2, LOCAL, INTER, each) for each in (1.0, imbalance))
    assert uneven.transfer_us == pytest.approx(imbalance * even.transfer_us)
    assert uneven.latency_us == even.latency_us


@pytest.mark.parametrize(("ranks_per_host", "hosts"), [(4, 1), (3, 1), (2, 3), (1, 5), (4, 2)])
def test_equal_counts_are_the_balanced_form(ranks_per_host: int, hosts: int) -> None:
    ranks = ranks_per_host * hosts
    sent = [[1e6 / ranks] * ranks for _ in range(ranks)]
    uneven = uneven_all_to_all_cost(sent, ranks_per_host, LOCAL, INTER)
    even = all_to_all_cost(1e6, ranks_per_host, hosts, LOCAL, INTER)
    assert uneven.us == pytest.approx(even.us)


def test_a_receiver_may_be_the_busiest() -> None:
    """All tokens go to one expert: its rank receives what three ranks send."""
    sent = [[100.0, 0, 0, 0]] * 4
    assert busiest_bytes(sent) == 300.0
    assert busiest_bytes(sent, ranks_per_host=2) == 100.0
    assert busiest_bytes(sent, ranks_per_host=2, between=True) == 200.0


def test_busiest_rank_by_counting_messages() -> None:
    """Every byte is counted at the rank that it leaves and at the one that it reaches, on one kind of link."""
    generator = random.Random(5)
    for _ in range(50):
        ranks, size = generator.choice([(2, 1), (4, 2), (6, 3), (6, 2), (5, 5)])
        sent = [[float(generator.randrange(100)) for _ in range(ranks)] for _ in range(ranks)]
        for between in (False, True):
            leaving, coming = [0.0] * ranks, [0.0] * ranks
            for source in range(ranks):
                for target in range(ranks):
                    if source != target and (source // size != target // size) is between:
                        leaving[source] += sent[source][target]
                        coming[target] += sent[source][target]
            assert busiest_bytes(sent, size, between) == max(leaving + coming)


def test_more_tokens_for_one_rank_never_help() -> None:
    generator = random.Random(7)
    for _ in range(50):
        sent = [[float(generator.randrange(1000)) for _ in range(6)] for _ in range(6)]
        before = uneven_all_to_all_cost(sent, 3, LOCAL, INTER).us
        sent[generator.randrange(6)][generator.randrange(6)] += 5000.0
        assert uneven_all_to_all_cost(sent, 3, LOCAL, INTER).us >= before
