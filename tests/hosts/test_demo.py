"""One small run of `make hosts-demo`: the README's command for several hosts, on hosts with networks of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.emulation.emulated_hosts import missing
from tests.hosts.demo import GENERATE, LAUNCHERS, LINK, Run, ended, runs


def test_generate_on_two_hosts_agrees_with_eager() -> None:
    if why := missing(LINK):
        pytest.skip(why)
    arguments = ("--hidden", "128", "--layers", "1", "--new-tokens", "8", "--rounds", "0")
    found = ended(Run(2, 1, "accelerate", replace(GENERATE, arguments=arguments)))
    assert found.agrees, found.output
    assert found.rewritten == 3 and found.left == 0, found.output


def test_every_program_is_started_by_every_launcher() -> None:
    made = list(runs([2, 3, 4], [1, 2], everything=True))
    assert len(made) == len(set(made)) == 24
    made = list(runs([2, 3, 4], [1, 2], everything=False))
    assert {(run.hosts, run.ranks) for run in made} == {(count, ranks) for count in (2, 3, 4) for ranks in (1, 2)}
    every = {(launcher, name) for launcher in LAUNCHERS for name in ("generate.py", "train_step.py")}
    assert {(run.launcher, run.program.name) for run in made} == every
    assert len(made) == 10
