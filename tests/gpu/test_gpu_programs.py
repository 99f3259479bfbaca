"""How programs of tests on GPUs are started: forked from a process that has loaded everything, or by themselves."""

from __future__ import annotations

import os

import pytest

from tests.gpu import programs
from tests.gpu.programs import Ended, Ranks
from tests.graphs.nonempty import some

PROGRAM = "tests.gpu.greeting_ranks"


def _ended(how: str, timeout_s: float = 60.0) -> list[Ended]:
    ranks = Ranks([(how, "a", "b")] * 2, PROGRAM, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    found = ranks.end(timeout_s)
    assert not any(os.path.exists(f"/proc/{each.pid}") for each in ranks.programs), "a rank is left"
    return found


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "by themselves"])
def test_ranks_meet(forked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "can_fork", lambda: forked)
    for _ in some(range(1 + forked)):
        found = _ended("ends")
        assert [each.code for each in found] == [0, 0], found
        assert [each.out for each in found] == [f"rank {rank} of 2 says ['a', 'b']\n" for rank in range(2)]


def test_ranks_end_with_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "END_S", 1.0)
    other, failed = _ended("fails")
    assert failed.code == 1 and "ValueError: no more" in failed.err
    assert other.code is None, "it would have slept"


def test_ranks_that_take_too_long_are_ended() -> None:
    late, other = _ended("stays", timeout_s=10.0)
    assert late.code is None and other.code == 0


def test_hosts_without_gpus_can_fork() -> None:
    assert programs.can_fork()
