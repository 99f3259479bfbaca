"""Ranks that wait for each other: who is gone, who gave up, and what a process forked from a rank may do."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import time
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from tests.ranks import collect, run_ranks
from tests.ranks.descriptors import exhausted
from tests.ranks.shm_ranks import check, make_call, partial_of, reserve, run_op
from weaveopt.errors import AgreementError, PeerTimeoutError, WeaveError
from weaveopt.fabrics import shm

# --- descriptors


def run_without_descriptors(rank: int, world: int, at_bind: bool) -> tuple[str, float] | None:
    """None are left on rank 0, from when peers' processes would be looked at first, or from after the first calls."""
    everyone = tuple(range(world))
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # which imports more at its first call
    with contextlib.ExitStack() as stack:
        if at_bind and rank == 0:
            before = shm.num_local_processes

            def last_before_the_group_is_made() -> int:
                found = before()
                stack.enter_context(exhausted())
                return found

            stack.enter_context(mock.patch.object(shm, "num_local_processes", last_before_the_group_is_made))
        # Not one-shot: a rank waits twice in each call.
        call = make_call("few", "0", world, one_shot=False, timeout_s=30.0)
        reserve()
        if not at_bind:
            check(call, everyone, rank)
            if rank == 0:
                stack.enter_context(exhausted())
        for step in range(3):
            # Long enough for the others to sleep, and to look whether this rank is still there.
            if step % world == rank:
                time.sleep(0.3)
            check(call, everyone, rank, step)
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(PeerTimeoutError) as caught:
            run_op(call, partial_of(rank))
        return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(("world", "at_bind"), [(2, False), (2, True), (3, False), (3, True)])
def test_a_rank_without_descriptors_goes_on_and_still_sees_who_died(world: int, at_bind: bool) -> None:
    outcomes = collect(run_without_descriptors, world, world, at_bind)
    for outcome in outcomes[:-1]:
        assert isinstance(outcome.value, tuple), outcome.error
        message, seconds = outcome.value
        assert f"rank {world - 1} exited" in message and seconds < 5.0
    assert "exit code -9" in outcomes[-1].error


# --- ranks that give up


def run_gives_up_and_lives(rank: int, world: int) -> tuple[str, float]:
    """Rank 0 gives up on rank 1, catches that and lives on. Rank 2 began to wait for rank 1 later."""
    reserve()
    call = make_call("last", "0", world, one_shot=False, timeout_s=2.0)
    check(call, tuple(range(world)), rank)
    store = c10d._get_default_store()
    if rank == 2:
        time.sleep(1.0)
    if rank == 1:
        # Between two calls: it hears in its next one.
        store.wait(["over/0", "over/2"])
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        run_op(call, partial_of(rank))
    seconds = time.monotonic() - start
    store.set(f"over/{rank}", "")
    store.wait([f"over/{other}" for other in range(world)])
    return str(caught.value), seconds


def test_a_rank_that_gave_up_and_lives_ends_the_waits_of_all() -> None:
    first, late, third = run_ranks(run_gives_up_and_lives, 3, 3)
    assert "peer rank 1 did not signal within 2 s" in first[0]
    assert "peer rank 0 gave up waiting itself" in third[0] and third[1] < 1.6, "2 s by its own timeout"
    assert "gave up waiting itself" in late[0] and late[1] < 1.0


def run_one_differs(rank: int, world: int) -> str:
    """Rank 1 comes late to another call. Whoever is not the first to see it hears the same, not that one gave up."""
    reserve()
    if rank == 1:
        time.sleep(0.5)
    with pytest.raises(AgreementError) as caught:
        run_op(make_call("second" if rank == 1 else "first", "0", world), partial_of(rank))
    return str(caught.value)


def test_every_rank_is_told_who_differs() -> None:
    first, second, third = run_ranks(run_one_differs, 3, 3)
    for text in (first, third):
        assert "runs site first with 5 tokens, but rank 1 runs" in text
    assert "runs site second with 5 tokens, but rank " in second


# --- processes that were forked from a rank


def run_forks(rank: int, world: int) -> None:
    """Children that end at once, and in the order of an interpreter: nothing of their parent's is touched."""
    memory = reserve()
    call = make_call("forks", "0", world, timeout_s=20.0)
    everyone = tuple(range(world))
    check(call, everyone, rank)
    for how in ("at once", "in order", "released", "called"):
        child = os.fork() if rank == 0 else 0
        if rank == 0 and child == 0:
            status = 1
            try:
                if how == "in order":
                    shm.release_all()
                    atexit._run_exitfuncs()
                    del memory
                    gc.collect()
                elif how == "released":
                    memory.close()
                elif how == "called":
                    with pytest.raises(WeaveError, match=r"rank 0: this process was forked from the one that is that"):
                        run_op(call, partial_of(rank))
                status = 0
            finally:
                os._exit(status)
        if rank == 0:
            assert os.waitpid(child, 0)[1] == 0, how
        for step in range(3):
            if step == rank:
                time.sleep(0.1)  # the other one looks whether this one is still there
            check(call, everyone, rank, step)
    shm.release("0")


def test_a_forked_process_leaves_its_parents_memory_alone() -> None:
    run_ranks(run_forks, 2, 2)
