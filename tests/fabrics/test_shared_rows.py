"""Calls that synchronize once, of every family in one arena: in any order, and with ranks that die or never come."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.graphs.tolerances import KERNEL, assert_close
from tests.ops import test_all_gather_gemm_call as gathers
from tests.ops import test_gemm_reduce_scatter_call as scatters
from tests.ranks import collect, run_ranks
from tests.ranks.shm_ranks import check, make_call
from weaveopt.errors import AgreementError, PeerTimeoutError
from weaveopt.fabrics import shm, topology
from weaveopt.fabrics.rows_call import memory_plan
from weaveopt.fabrics.shm import ShmArena
from weaveopt.ops.gemm_comm.reduce_scatter.op import SITES
from weaveopt.ops.gemm_comm.reduce_scatter.reference import reference
from weaveopt.ops.reduction.buffers import memory_plan as plan_of_reductions
from weaveopt.records.candidate import Fabric

SCATTER, GATHER = scatters.Form(), gathers.Form(returns_rows=True)


def reserve_all(world: int) -> ShmArena:
    """Room for calls of all families: the buffers of partial results are the same."""
    widest = scatters.make_call(SCATTER, 64, "float32", world)
    plans = (
        plan_of_reductions("0", [make_call("reserved", "0", 1)]),
        memory_plan("0", [(widest, SITES[Fabric.SHM].buffers(widest))]),
    )
    for plan in plans:
        memory = shm.reserve(topology.discover("0", 30.0), plan, 0, 30.0)
    return memory


def scatter(rank: int, world: int, step: int, timeout_s: float = 30.0, site: str = "scatter") -> Tensor:
    call = replace(scatters.make_call(SCATTER, 64, "float32", world), timeout_s=timeout_s, site=site)
    inputs = scatters.make_inputs(SCATTER, 3 * world, 64, "float32", world, seed=step)
    got = scatters.run_op(inputs[rank], 1, call)
    assert_close(got, reference([each.compute() for each in inputs], 1, call)[rank], KERNEL, f"step {step}")
    return got


def gather(rank: int, world: int, step: int) -> None:
    call = gathers.make_call(GATHER, 64, "float32", world)
    shards, weights = gathers.make_inputs(GATHER, 5, 64, "float32", world, seed=step)
    want = gathers.reference(shards, weights[rank], 1, call)
    gathers.check(gathers.run_op(shards[rank], weights[rank], 1, call), want, f"step {step}")


def run_mixed(rank: int, world: int) -> int:
    """Calls of three families in random order, ranks at random speed; how many epochs they took beyond one each."""
    memory = reserve_all(world)
    order = torch.randint(3, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    own = torch.Generator().manual_seed(rank)
    everyone = tuple(range(world))
    for step, which in enumerate(order):
        if torch.rand((), generator=own) < 0.1:
            time.sleep(0.002)
        if which == 0:
            scatter(rank, world, step)
        elif which == 1:
            gather(rank, world, step)
        else:
            check(make_call("reduce", "0", world, one_shot=step % 2 == 0), everyone, rank, step)
    return memory.native.epoch - len(order)


@pytest.mark.parametrize("world", [2, 3])
def test_families_take_turns_without_a_barrier(world: int) -> None:
    """But for one, when output rows get their place."""
    assert set(run_ranks(run_mixed, world, world)) <= {0, 1}


def run_dies(rank: int, world: int, within: bool) -> tuple[str, float]:
    """The last rank dies between two calls, or while the others wait for it within one."""
    reserve_all(world)
    for step in range(3):
        scatter(rank, world, step)
        gather(rank, world, step)
    if rank == world - 1:
        time.sleep(0.3 if within else 0.0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.0 if within else 0.3)
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        (gather if rank else scatter)(rank, world, 3)
    seconds = time.monotonic() - start
    with pytest.raises(PeerTimeoutError, match="unusable since an earlier call failed"):
        gather(rank, world, 4)
    return str(caught.value), seconds


@pytest.mark.parametrize("within", [False, True])
def test_a_dead_rank_is_an_error_and_leaves_nothing(within: bool) -> None:
    before = set(Path("/dev/shm").iterdir())
    first, second = collect(run_dies, 2, 2, within)
    assert isinstance(first.value, tuple), first.error
    message, seconds = first.value
    assert "weave::gemm_reduce_scatter at site scatter" in message and "peer rank 1 exited" in message
    assert seconds < 5.0 and "exit code -9" in second.error
    left = {each for each in set(Path("/dev/shm").iterdir()) - before if "weave" in each.name}
    assert not left


def run_late(rank: int) -> str:
    """Rows that rank 0 stored before it gave up have arrived: the late rank ends that call, and fails in the next."""
    reserve_all(2)
    scatter(rank, 2, 0)
    if rank == 1:
        time.sleep(2.5)
        scatter(rank, 2, 1, timeout_s=1.0)
    with pytest.raises(PeerTimeoutError) as caught:
        scatter(rank, 2, 1 + rank, timeout_s=1.0)
    return str(caught.value)


def test_ranks_that_wait_too_long_and_come_too_late() -> None:
    first, second = run_ranks(run_late, 2)
    assert "peer rank 1 did not signal within 1 s" in first
    assert "peer rank 0 gave up waiting itself" in second or "peer rank 0 exited" in second


def run_another_site(rank: int) -> str:
    reserve_all(2)
    with pytest.raises(AgreementError) as caught:
        if rank:
            gather(rank, 2, 0)
        else:
            scatter(rank, 2, 0)
    return str(caught.value)


def test_ranks_at_different_sites_are_told_which() -> None:
    for message in run_ranks(run_another_site, 2):
        assert "ranks of a group must make the same calls in the same order" in message
