"""The ranks that tests run on."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist

from tests.ranks import RankError, pool, run_ranks
from weaveopt.autotune import site_timing
from weaveopt.fabrics import shm, topology, watchdog
from weaveopt.pipeline import compilation
from weaveopt.reporting import registry


def _begins_with(_: int) -> tuple[bool, bool]:
    return "torch._inductor.compile_fx" in sys.modules, gc.get_freeze_count() > 0


def test_ranks_begin_with_what_the_server_loaded() -> None:
    """multiprocessing says nothing where it cannot load a module it was given; each rank would then load it all."""
    assert run_ranks(_begins_with, 2) == [(True, True)] * 2


def _process_and_group(_: int) -> tuple[int, int]:
    return os.getpid(), dist.get_world_size()


def test_ranks_are_warm() -> None:
    """Calls run in the same processes, of more ranks in those of fewer too."""
    two = run_ranks(_process_and_group, 2)
    three = run_ranks(_process_and_group, 3)
    assert [size for _, size in two] == [2, 2] and [size for _, size in three] == [3, 3, 3]
    assert run_ranks(_process_and_group, 2) == two and [pid for pid, _ in three][:2] == [pid for pid, _ in two]
    assert not {pid for pid, _ in run_ranks(_process_and_group, 3, own=True)} & {pid for pid, _ in three}


def _leaves(rank: int) -> None:
    os.environ["WEAVE_LEFT"] = "1"
    os.chdir("/")
    torch.manual_seed(rank + 7)
    torch._inductor.config.max_fusion_size = 3
    torch.set_default_dtype(torch.float64)
    registry.open_entry(())
    watchdog._suspected.add(1)
    site_timing._runs["left"] = {}
    next(compilation.graph_numbers)
    topology.RecordExchange._times_made["0", (0, 1)] = 5 + rank


def _finds(rank: int) -> tuple[object, ...]:
    left = (
        len(registry._entries),
        len(watchdog._suspected),
        len(site_timing._runs),
        dict(topology.RecordExchange._times_made),
        repr(compilation.graph_numbers),
    )
    size = torch._inductor.config.max_fusion_size
    return os.environ.get("WEAVE_LEFT"), os.getcwd(), float(torch.rand(1)), size, torch.get_default_dtype(), left


def test_warm_ranks_begin_like_new_ones() -> None:
    before = run_ranks(_process_and_group, 2)
    run_ranks(_leaves, 2)
    assert run_ranks(_finds, 2) == run_ranks(_finds, 2, own=True)
    assert run_ranks(_process_and_group, 2) == before, "nothing that cannot be restored"


def _replaces(rank: int, what: str) -> None:
    if rank == 1 and what == "function":
        registry.open_entry = lambda *_: None  # type: ignore[assignment,return-value]
    elif rank == 1 and what == "module":
        shm._native = SimpleNamespace()  # type: ignore[assignment]
    elif rank == 1 and what == "method":
        shm.ShmArena.close = lambda *_: None  # type: ignore[method-assign]
    elif rank == 1 and what == "thread":
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    elif rank == 1 and what == "handler":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@pytest.mark.parametrize("what", ["function", "module", "method", "thread", "handler"])
def test_ranks_that_are_not_what_they_were_run_nothing_more(what: str) -> None:
    before = {pid for pid, _ in run_ranks(_process_and_group, 2)}
    run_ranks(_replaces, 2, what)
    after = {pid for pid, _ in run_ranks(_process_and_group, 2)}
    assert len(after) == 2 and not after & before


def _ends(rank: int, how: str) -> object:
    if rank == 1 and how == "raises":
        raise ValueError("no more")
    if rank == 1 and how == "dies":
        os._exit(3)
    if rank == 1 and how == "is late":
        time.sleep(100)
    if rank == 1 and how == "does not pickle":
        return lambda: 0
    return None


@pytest.mark.parametrize(
    ("how", "says"),
    [("raises", "ValueError: no more"), ("dies", "exit code 3"), ("is late", "no result within 1 s"),
     ("does not pickle", "pickle")],
)  # fmt: skip
def test_ranks_after_a_failure_are_new(how: str, says: str) -> None:
    before = {pid for pid, _ in run_ranks(_process_and_group, 2)}
    with pytest.raises(RankError, match=says):
        run_ranks(_ends, 2, how, timeout_s=1 if how == "is late" else 60)
    after = {pid for pid, _ in run_ranks(_process_and_group, 2)}
    assert len(after) == 2 and not after & before
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before)


def test_closed_pool_leaves_no_process() -> None:
    pids = [pid for pid, _ in run_ranks(_process_and_group, 2)]
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    pool.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
