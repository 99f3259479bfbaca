"""Schedules of all-reduces among hosts, executed: every host ends with the sum, and sends what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cost_model.host_exchange import execute
from tests.graphs.nonempty import some
from weaveopt.cost_model.host_schedules import DOUBLING, HALVING, ONE_SHOT, RING, TWO_SHOT, Payload, Then, host_schedule
from weaveopt.errors import WeaveError

EVERY = (ONE_SHOT, TWO_SHOT, DOUBLING, HALVING, RING)
LENGTH = 97
"""Elements of a share: no number of parts divides it."""


def _own(hosts: int, length: int = LENGTH) -> list[np.ndarray]:
    """Numbers whose sums are exact in fp32 in every order."""
    random = np.random.default_rng(hosts)
    return [random.integers(-1000, 1000, length).astype(np.float32) for _ in range(hosts)]


@pytest.mark.parametrize("algorithm", EVERY)
def test_every_host_ends_with_the_sum(algorithm: str) -> None:
    for hosts in range(1, 41):
        for ranks_per_host in (1, 2):
            own = _own(hosts)
            for result in some(execute(algorithm, own, ranks_per_host).results):
                np.testing.assert_array_equal(result, sum(own), err_msg=f"{algorithm}, {hosts} hosts")


@pytest.mark.parametrize("hosts", [64, 100, 128, 1000, 1024])
@pytest.mark.parametrize("algorithm", [DOUBLING, HALVING])
def test_up_to_1024_hosts(algorithm: str, hosts: int) -> None:
    own = _own(hosts, 5)
    total = sum(own)
    for result in some(execute(algorithm, own).results):
        np.testing.assert_array_equal(result, total)


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("hosts", [2, 3, 4, 6, 7, 8, 13, 16])
def test_all_hosts_end_with_the_same_bits(algorithm: str, hosts: int) -> None:
    """Also where the order of additions changes the result: sums of numbers that fp32 rounds."""
    random = np.random.default_rng(hosts)
    own = [(random.standard_normal(LENGTH) * 10.0 ** random.integers(-6, 6)).astype(np.float32) for _ in range(hosts)]
    results = execute(algorithm, own).results
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes()
    np.testing.assert_allclose(results[0], np.sum(np.array(own, np.float64), axis=0), rtol=1e-4, atol=1e-6)


def test_direct_sums_are_in_the_order_of_the_hosts() -> None:
    """So that the result is bit for bit that of the same ranks on one host."""
    own = [np.float32(value).reshape(1) for value in (1e8, 1.0, -1e8, 1.0)]
    in_order = ((own[0] + own[1]) + own[2]) + own[3]
    for algorithm in (ONE_SHOT, TWO_SHOT):
        assert execute(algorithm, own).results[2].tobytes() == in_order.tobytes()


def test_doubling_meets_the_hosts_of_algorithm_1() -> None:
    """NVRAR Algorithm 1, line 15: peer `r_n XOR 2^i` in step i."""
    for host in range(16):
        rounds = host_schedule(DOUBLING, host, 16).rounds
        assert [each.sends[0].peer for each in rounds] == [host ^ 1 << step for step in range(4)]
        assert [each.receives[0].peer for each in rounds] == [host ^ 1 << step for step in range(4)]


def test_only_the_first_messages_of_single_ranks_are_partial_results() -> None:
    """Every later message contains what arrived before, and sums are never rounded in between."""
    for hosts in (2, 3, 4, 7, 8):
        for algorithm in (DOUBLING, HALVING, RING):
            for ranks_per_host in (1, 4):
                num_sent = 0
                for host in range(hosts):
                    summed = False
                    for each in host_schedule(algorithm, host, hosts, ranks_per_host).rounds:
                        for send in each.sends:
                            assert (send.payload is Payload.PARTIALS) <= (ranks_per_host == 1 and not summed)
                        num_sent += len(each.sends)
                        summed |= any(receive.then is Then.REDUCE for receive in each.receives)
                assert num_sent >= hosts, f"{algorithm}: {num_sent} messages among {hosts} hosts"


def test_what_cannot_be_scheduled_is_refused() -> None:
    with pytest.raises(WeaveError, match="no algorithm between hosts is called 'tree'"):
        host_schedule("tree", 0, 2)
    with pytest.raises(WeaveError, match="host 2 of 2"):
        host_schedule(RING, 2, 2)
    assert host_schedule(RING, 0, 1).rounds == ()
