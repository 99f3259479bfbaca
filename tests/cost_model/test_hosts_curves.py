"""Curves between hosts of one rank each: read as they are, and carried over as bounds."""

from __future__ import annotations

import pytest

from tests.emulation.gpu_hosts import library_us, machine
from weaveopt import cost_model
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.host_schedules import host_schedule
from weaveopt.cost_model.hosts_curves import at_least, at_most, curves_between, gpu_doubling, hosts_parts_us
from weaveopt.cost_model.machine import Curve, Point
from weaveopt.records.candidate import Fabric

CURVE = Curve("", "all_reduce", "library", 4, (Point(1 << 13, 10.0), Point(1 << 20, 50.0)), hosts=4)


@pytest.mark.parametrize(("hosts", "rounds", "sent"), [(2, 1, 1.0), (4, 2, 3.0), (8, 3, 5.0), (1024, 10, 19.0)])
def test_rounds_of_a_power_of_two(hosts: int, rounds: int, sent: float) -> None:
    """bf16 goes out as it is once, then sums of twice its bytes."""
    steps = gpu_doubling(hosts, 2)
    assert (steps.num_steps, steps.traffic) == (rounds, sent) and gpu_doubling(hosts, 4).traffic == rounds


@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 6, 7, 8, 12, 100])
def test_no_host_waits_or_sends_more_often_than_is_counted(hosts: int) -> None:
    steps = gpu_doubling(hosts, 4)
    schedules = [host_schedule("doubling", host, hosts) for host in range(hosts)]
    sends = max(sum(bool(each.sends) for each in schedule.rounds) for schedule in schedules)
    assert sends == steps.traffic
    assert max(len(schedule.rounds) for schedule in schedules) <= steps.num_steps


def test_among_as_many_hosts_it_is_what_was_measured() -> None:
    for carry in (at_least, at_most):
        assert sum(hosts_parts_us(machine(), CURVE, 1 << 20, 4, lambda hosts: gpu_doubling(hosts, 2), carry)) == 50.0


def test_a_kernel_takes_no_less_among_fewer_hosts_and_grows_with_rounds_and_bytes() -> None:
    def steps(hosts: int) -> cost_model.Steps:
        return gpu_doubling(hosts, 2)

    assert hosts_parts_us(machine(), CURVE, 1 << 20, 16, steps, at_least) == pytest.approx((20.0, 40.0 * 7 / 3))
    assert hosts_parts_us(machine(), CURVE, 1 << 20, 2, steps, at_least) == (10.0, 40.0)


def test_the_library_takes_no_more_among_more_hosts() -> None:
    made = machine()
    for size in (1 << 13, 1 << 20, 1 << 26):
        two, four, eight = (cost_model.collective_us(made, "all_reduce", size, hosts, hosts) for hosts in (2, 4, 8))
        assert two == four == eight == pytest.approx(library_us(size), rel=1e-3)
    of_four = machine(hosts=4)
    few, many = (cost_model.collective_us(of_four, "all_reduce", 1 << 20, hosts, hosts) for hosts in (2, 4))
    assert few < many == pytest.approx(library_us(1 << 20), rel=1e-3)


def test_hosts_of_several_ranks_and_one_host_rest_on_what_they_rested_on() -> None:
    made, before = machine(), cost_model.load("h100x2")
    assert curves_between(fabric_costs(made, Fabric.LIBRARY), "all_reduce")
    for world, hosts in ((2, 1), (4, 2), (16, 2)):
        now, then = (cost_model.collective_us(each, "all_reduce", 1 << 20, world, hosts) for each in (made, before))
        assert now == then
    assert cost_model.library_algorithm(made, "all_reduce", 1 << 20, 2, 2) == "", "it was measured"
    assert cost_model.library_algorithm(made, "all_reduce", 1 << 20, 4, 2) in ("ring", "tree")
    assert cost_model.library_algorithm(before, "all_reduce", 1 << 20, 2, 2) in ("ring", "tree")
