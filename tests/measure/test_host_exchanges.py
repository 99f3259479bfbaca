"""Terms of busy hosts from made-up times: what was put in comes out, and nothing of it is below zero."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weaveopt import cost_model
from weaveopt.cost_model.host_exchange import HostExchangeTerms
from weaveopt.measure.cases.reduction.hosts import TOKENS, HostExchanges
from weaveopt.measure.clock import Sample
from weaveopt.measure.fit import relative_nonnegative
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.variant import ALGORITHMS, Transfer
from weaveopt.records.candidate import Fabric

CPU = torch.device("cpu")
BEFORE = cost_model.load("cpu")


def measured(terms: HostExchangeTerms, slowdown: float = 1.0, noise: float = 0.0) -> HostExchanges:
    """As if exchanges took what `terms` say; every other one longer, and shorter, by `noise`, as on a chessboard."""
    found = HostExchanges(terms.hosts, terms.ranks_per_host, slowdown=slowdown)
    machine = replace(BEFORE, busy_hosts=(terms,))
    cases = [(algorithm, tokens) for tokens in TOKENS for algorithm in ALGORITHMS[Transfer.MESSAGE]]
    for index, (algorithm, tokens) in enumerate(cases):
        us = estimate_fused(machine, found.workload(tokens), Fabric.TCP, algorithm).us
        found.times[algorithm, tokens] = Sample(us * (1 + noise * (-1) ** (index + index // 4)), 0.1)
    return found


@pytest.mark.parametrize(("hosts", "ranks"), [(3, 1), (4, 1), (8, 1), (4, 2)])
def test_the_terms_come_out_as_they_are(hosts: int, ranks: int) -> None:
    terms = HostExchangeTerms("", hosts, ranks, 400.0, 30.0, 80.0, 0.0016, 0.001)
    found = measured(terms).terms(BEFORE)
    for name in ("call_us", "round_us", "message_us", "sent_byte_us", "row_byte_us"):
        assert getattr(found, name) == pytest.approx(getattr(terms, name), rel=0.01), name
    assert (found.hosts, found.ranks_per_host, found.processors) == (hosts, ranks, 0.0)


def test_between_two_hosts_bytes_are_sent_bytes() -> None:
    """There every exchange sends the rows once: nothing distinguishes the two."""
    found = measured(HostExchangeTerms("", 2, 1, 150.0, 0.0, 0.0, 0.001, 0.0)).terms(BEFORE)
    assert found.sent_byte_us == pytest.approx(0.001, rel=0.05) and found.row_byte_us == 0.0


def test_hosts_that_slow_each_other_down_share_processors() -> None:
    terms = HostExchangeTerms("", 8, 1, 400.0, 0.0, 80.0, 0.002, 0.0)
    assert measured(terms, slowdown=4.0).terms(BEFORE).processors == 2.0
    assert measured(terms, slowdown=1.1).terms(BEFORE).processors == 0.0, "noise"


def test_a_profile_keeps_the_terms_of_other_numbers_of_hosts(tmp_path: Path) -> None:
    one = measured(HostExchangeTerms("", 8, 1, 400.0, 30.0, 80.0, 0.0016, 0.001)).renewed(BEFORE, CPU)
    both = measured(HostExchangeTerms("", 4, 1, 300.0, 30.0, 60.0, 0.0016, 0.001)).renewed(one, CPU)
    again = measured(HostExchangeTerms("", 8, 1, 500.0, 30.0, 80.0, 0.0016, 0.001)).renewed(both, CPU)
    assert [each.hosts for each in again.busy_hosts] == [4, 8]
    assert again.busy_hosts[0] == both.busy_hosts[0]
    assert again.busy_hosts[1].call_us == pytest.approx(500.0, rel=0.01)
    assert dict(again.origins)["busy.8x1"].kind == "measured"
    path = tmp_path / "here.json"
    path.write_text(cost_model.dumps(again))
    assert cost_model.load(str(path)) == again
    names = [name for name, _ in again.summary(hosts=8).origins]
    assert "busy_hosts.8x1" in names and not any("busy" in name for name, _ in again.summary(hosts=1).origins)


def test_a_profile_claims_no_less_error_than_its_terms_have() -> None:
    terms = HostExchangeTerms("", 8, 1, 400.0, 30.0, 80.0, 0.0016, 0.001)
    assert measured(terms).renewed(BEFORE, CPU).relative_error == BEFORE.relative_error
    assert 0.1 < measured(terms, noise=0.15).renewed(BEFORE, CPU).relative_error < 0.2


def test_no_factor_is_below_zero() -> None:
    """A term with a negative factor is dropped, and the other terms are fitted again without it."""
    rows = [((1.0, x), 100.0 - x, 100.0 - x) for x in (1.0, 2.0, 5.0)]
    constant, slope = relative_nonnegative(rows)
    assert slope == 0.0 and 95.0 < constant < 100.0
    assert relative_nonnegative([((1.0,), -5.0, 5.0)]) == (0.0,)
