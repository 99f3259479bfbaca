"""Recorded times of exchanges between emulated hosts: the terms of some sizes predict the other sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from weaveopt import cost_model
from weaveopt.measure.cases.reduction.hosts import HIDDEN, HostExchanges
from weaveopt.measure.clock import Sample
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.variant import ALGORITHMS, Algorithm, Transfer
from weaveopt.records.candidate import Fabric

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu" / "between_hosts.json"
FITTED_KIB = (16, 128, 2048)
BEFORE = cost_model.load("cpu")


def recorded(hosts: int) -> dict[tuple[Algorithm, int], float]:
    """One rank a host on the kernel's links of 10 Gbit/s: microseconds by exchange and KiB."""
    found = {}
    for row in json.loads(FILE.read_text())["rows"]:
        case = row["case"]
        if (case["hosts"], case["ranks_per_host"], case["gbit"], case["delay_us"]) == (hosts, 1, 10.0, 0.0):
            for algorithm in ALGORITHMS[Transfer.MESSAGE]:
                if f"{algorithm.value}_us" in row["parameters"]:
                    found[algorithm, case["kib"]] = float(row["parameters"][f"{algorithm.value}_us"])
    return found


def errors(hosts: int, fitted_hosts: int) -> dict[tuple[Algorithm, int], float]:
    """Relative errors at all sizes, by terms fitted to some sizes among `fitted_hosts`; the machine has two cores."""
    seen = {case: us for case, us in recorded(fitted_hosts).items() if case[1] in FITTED_KIB}
    times = {(algorithm, kib * 1024 // (2 * HIDDEN)): Sample(us, 0.0) for (algorithm, kib), us in seen.items()}
    terms = HostExchanges(fitted_hosts, 1, times, slowdown=fitted_hosts / 2).terms(BEFORE)
    machine, here = replace(BEFORE, busy_hosts=(terms,)), HostExchanges(hosts, 1)
    return {
        (algorithm, kib): estimate_fused(
            machine, here.workload(kib * 1024 // (2 * HIDDEN)), Fabric.TCP, algorithm
        ).us / us - 1
        for (algorithm, kib), us in recorded(hosts).items()
    }  # fmt: skip


@pytest.mark.parametrize("hosts", [2, 3, 4, 6, 8])
def test_terms_of_three_sizes_predict_two_others(hosts: int) -> None:
    found = errors(hosts, hosts)
    others = [abs(error) for (_, kib), error in found.items() if kib not in FITTED_KIB]
    assert len(others) >= 6 and fmean(others) < 0.12, others


@pytest.mark.parametrize("hosts", [3, 8])
def test_terms_carry_over_to_other_numbers_of_hosts_that_share_the_processors(hosts: int) -> None:
    found = [abs(error) for error in errors(hosts, 4).values()]
    assert fmean(found) < 0.2, found


def test_the_choice_by_terms_is_seldom_far_from_the_best() -> None:
    ratios = []
    for hosts in (2, 3, 4, 6, 8):
        found, times = errors(hosts, hosts), recorded(hosts)
        for kib in {kib for _, kib in times}:
            us = {algorithm: each for (algorithm, size), each in times.items() if size == kib}
            chosen = min(us, key=lambda algorithm: us[algorithm] * (1 + found[algorithm, kib]))
            ratios.append(us[chosen] / min(us.values()))
    assert sum(ratio <= 1.05 for ratio in ratios) > 0.6 * len(ratios) and max(ratios) < 1.35, ratios
