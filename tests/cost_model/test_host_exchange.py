"""Terms of exchanges among busy hosts: which of several is taken, what they add up to, and how they carry over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weaveopt import cost_model
from weaveopt.cost_model.host_exchange import HostExchangeTerms, nearest
from weaveopt.cost_model.machine import Machine
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm
from weaveopt.records.candidate import Fabric

HIDDEN, TOKENS = 4096, 64


def busy(hosts: int, ranks: int = 1, processors: float = 0.0) -> HostExchangeTerms:
    return HostExchangeTerms("between", hosts, ranks, 200.0, 50.0, 20.0, 0.001, 0.0005, processors)


def machine(*known: HostExchangeTerms) -> Machine:
    return replace(cost_model.load("cpu"), busy_hosts=known)


def priced_us(known: Machine, algorithm: Algorithm, hosts: int, ranks: int = 1, dtype: str = "bfloat16") -> float:
    """Without the passes over memory that other prices know: copy and norm."""
    workload = Workload(TOKENS, TOKENS, HIDDEN, dtype, hosts * ranks, hosts)
    estimate = estimate_fused(known, workload, Fabric.TCP, algorithm)
    return sum(term.us for term in estimate.terms if term.name not in ("copy", "norm"))


def test_the_nearest_of_those_that_were_measured() -> None:
    known = [busy(2), busy(8), busy(4, ranks=2)]
    assert nearest(known, 8, 1) is known[1] and nearest(known, 3, 1) is known[0] and nearest(known, 64, 1) is known[1]
    assert nearest(known, 8, 2) is known[2] and nearest([], 2, 1) is None


def test_terms_add_up() -> None:
    """4 hosts: a round and 3 messages of the whole; two rounds, and 6 messages of a quarter."""
    message = TOKENS * HIDDEN * 2
    rows_us = 0.0005 * message
    found = priced_us(machine(busy(4)), Algorithm.ONE_SHOT, 4)
    assert found == pytest.approx(200 + 50 + 3 * 20 + 3 * message * 0.001 + rows_us)
    found = priced_us(machine(busy(4)), Algorithm.TWO_SHOT, 4)
    assert found == pytest.approx(200 + 2 * 50 + 6 * 20 + 1.5 * message * 0.001 + rows_us)


def test_other_numbers_of_hosts_have_the_same_terms_unless_they_share_processors() -> None:
    own, shared = machine(busy(4)), machine(busy(4, processors=2.0))
    for algorithm in (Algorithm.DOUBLING, Algorithm.TWO_SHOT):
        assert priced_us(shared, algorithm, 4) == pytest.approx(priced_us(own, algorithm, 4))
        assert priced_us(shared, algorithm, 8) == pytest.approx(2 * priced_us(own, algorithm, 8))
        assert priced_us(shared, algorithm, 2) == pytest.approx(priced_us(own, algorithm, 2) / 2)


def test_ranks_beyond_a_hosts_cores_take_turns() -> None:
    at = machine(busy(4, ranks=2))
    cores = {count: priced_us(replace(at, ranks_per_host=count), Algorithm.DOUBLING, 4, ranks=4) for count in (2, 4)}
    assert cores[2] == pytest.approx(2 * cores[4])


@pytest.mark.parametrize("known", [(), (busy(8),)])
def test_sums_of_fp32_are_no_wider_than_its_rows(known: tuple[HostExchangeTerms, ...]) -> None:
    """For equal message bytes: bf16 doubles in the second round, as sums are fp32; fp32 doubles in none."""
    wide = Workload(TOKENS // 2, TOKENS // 2, HIDDEN, "float32", 8, 8)
    narrow = Workload(TOKENS, TOKENS, HIDDEN, "bfloat16", 8, 8)
    assert wide.message_bytes == narrow.message_bytes

    def us(workload: Workload, algorithm: Algorithm) -> float:
        return estimate_fused(machine(*known), workload, Fabric.TCP, algorithm).us

    assert us(wide, Algorithm.DOUBLING) < 0.8 * us(narrow, Algorithm.DOUBLING)
    assert us(wide, Algorithm.ONE_SHOT) == pytest.approx(us(narrow, Algorithm.ONE_SHOT))
