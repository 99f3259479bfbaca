"""Torch's rendezvous of symmetric memory: ranks catch up first, and every wait of it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.fabrics.test_arena_gpu import TIMEOUT_S, make_up_gpus, plan_of, reserve
from tests.ranks import run_ranks
from weaveopt.errors import ArenaError
from weaveopt.fabrics import peer, symmetric, topology
from weaveopt.fabrics.topology import Group


def run_unequal_groups(rank: int) -> None:
    make_up_gpus(rank)
    met: list[tuple[int, int]] = []

    def rendezvous(memory: torch.Tensor, process_group: dist.ProcessGroup, timeout_s: float = 1.0) -> object:
        met.append((symmetric._num_rendezvous, process_group.size()))
        symmetric._num_rendezvous += 1
        return object()

    setattr(symmetric, "rendezvous", rendezvous)  # noqa: B010
    setattr(symmetric, "_little_memory", lambda: torch.zeros(1))  # noqa: B010
    module: object = peer

    def exchange(memory: torch.Tensor, group: Group, timeout_s: float, by_multicast: bool) -> tuple[object, list[int]]:
        handle = symmetric.rendezvous(memory, topology.process_group(group.name))
        return handle, [memory.data_ptr()] * len(group.ranks)

    setattr(module, "_exchange", exchange)  # noqa: B010
    pair = dist.new_group([0, 1])
    if rank < 2:
        reserve(group=pair.group_name)
        reserve(plan_of(output=4096), group=pair.group_name)
    dist.barrier()
    reserve()
    # By the count, torch names what it exchanges: the group of three met at the same one on all of them.
    assert met[-1] == (2, 3), met
    assert [size for _, size in met] == ([2, 2, 3] if rank < 2 else [1, 1, 3])


def test_ranks_that_met_less_often_catch_up_first() -> None:
    run_ranks(run_unequal_groups, 3)


def wait_as_torch_does(store: dist.Store, for_socket: bool) -> None:
    """For a peer that never answers: first by key, then on a datagram socket, Python's lock held all the time."""
    if not for_socket:
        store.wait(["a key that nobody sets"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        libc = ctypes.PyDLL(None, use_errno=True)
        if libc.recv(ours.fileno(), ctypes.create_string_buffer(2), 2, 0) < 0:
            raise RuntimeError(f"Failed to receive fd: {os.strerror(ctypes.get_errno())}")


def run_stuck(rank: int) -> list[list[str]]:
    """In torch's waits of either kind, in a process that never failed before."""
    exchange = peer._exchange
    make_up_gpus(rank)
    setattr(peer, "_exchange", exchange)  # noqa: B010
    said = []
    for for_socket in (False, True):
        setattr(symmetric, "_failed", "")  # noqa: B010
        said.append(stuck(rank, for_socket))
    return said


def stuck(rank: int, for_socket: bool) -> list[str]:
    """Rank 1 fails in torch's rendezvous, where rank 0 waits for it; returns this rank's errors, then and the
    next time."""
    store = c10d._get_process_group_store(topology.process_group("0"))
    before = store.timeout
    module: object = symmetric
    met: list[int] = []

    def meet(memory: torch.Tensor, process_group: dist.ProcessGroup) -> object:
        met.append(1)
        if rank == 1:
            raise RuntimeError("no permission to map the memory of rank 0\nand how it came")
        wait_as_torch_does(store, for_socket)
        raise AssertionError("nobody answered")

    for name, value in {"_join": meet, "RENDEZVOUS_S": 1.0}.items():
        setattr(module, name, value)
    ticks: list[float] = []
    signal.signal(signal.SIGALRM, lambda *_: ticks.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 1.8)
    said = []
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(ArenaError) as caught:
            reserve()
        said.append(str(caught.value))
    assert time.monotonic() - begin < TIMEOUT_S / 2, "not the store's own half hour"
    assert met == [1], "who failed once knows no longer where torch counts: it meets nobody again"
    assert store.timeout == before
    time.sleep(max(0.0, 2.5 - (time.monotonic() - begin)))
    assert len(ticks) == 1, "a timer of the program's own goes on"
    return said


def test_a_rank_stuck_in_torchs_rendezvous_ends_with_the_timeout() -> None:
    one, other = run_ranks(run_stuck, 2)
    assert one == other
    for first, again in one:
        assert "rank 0: the rendezvous for torch's symmetric memory did not complete within 1 s" in first
        assert "rank 1: no permission to map the memory of rank 0" in first and "how it came" not in first
        assert "rank 0: an earlier rendezvous of torch's symmetric memory failed" in again
