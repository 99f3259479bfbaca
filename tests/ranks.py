"""Runs a function on spawned ranks with a real gloo process group, and always comes back.

The function and its arguments must pickle (a module-level function). A rank that fails ends the others. Ranks may run
on emulated hosts (`network`): evenly, the first of them on the first.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import TypeVar

from tests.emulated_hosts import Network

R = TypeVar("R")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_starting = threading.Lock()
"""Held by a thread that starts ranks: it changes the environment."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    rank: int
    value: object = None
    error: str = ""
    """Traceback, or how the process died."""


class RankError(AssertionError):
    """At least one rank failed; the message holds every rank's traceback."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(
    rank: int, fn: Callable[..., object], world: int, port: int, args: tuple[object, ...], threads: int,
    results: multiprocessing.Queue[Outcome], environment: dict[str, str], network: Network | None, grouped: bool,
) -> None:  # fmt: skip
    # The server that ranks are forked from has the environment of its own start.
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    try:
        if network is not None:
            host = network[rank * len(network) // world]
            host.enter()
            os.environ.update(host.environment(network[0]))
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        if grouped:
            dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
        outcome = Outcome(rank, fn(rank, *args))
        if grouped:
            dist.destroy_process_group()
    except BaseException:
        outcome = Outcome(rank, error=traceback.format_exc())
    results.put(outcome)


@contextmanager
def _no_gpus() -> Iterator[None]:
    """CPU ranks see no GPU, from before torch is loaded: libraries would pick it up where there is one."""
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ""
    try:
        yield
    finally:
        os.environ.pop(_VISIBLE)
        if before is not None:
            os.environ[_VISIBLE] = before


def collect(
    fn: Callable[..., object],
    world: int,
    *args: object,
    timeout_s: float = 120.0,
    threads: int = 1,
    network: Network | None = None,
    grouped: bool = True,
) -> list[Outcome]:
    """`fn(rank, *args)` on `world` ranks: how each ended, by rank. For tests in which ranks are meant to die.

    Without `grouped` ranks have all that a launcher tells them, and `fn` makes the process group.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    results: multiprocessing.Queue[Outcome] = context.Queue()
    port = free_port()
    with _starting, _no_gpus():
        job = (fn, world, port, args, threads, results, dict(os.environ), network, grouped)
        processes = [context.Process(target=_main, args=(rank, *job)) for rank in range(world)]
        for process in processes:
            process.start()
    try:
        return _wait(processes, results, timeout_s)
    finally:
        for process in processes:
            process.kill()  # nothing to a process that has ended meanwhile
            process.join(10)


def run_ranks(
    fn: Callable[..., R],
    world: int,
    *args: object,
    timeout_s: float = 120.0,
    threads: int = 1,
    network: Network | None = None,
    grouped: bool = True,
) -> list[R]:
    """What `fn(rank, *args)` returned on each rank. Raises `RankError` if one failed, died or took too long."""
    outcomes = collect(fn, world, *args, timeout_s=timeout_s, threads=threads, network=network, grouped=grouped)
    failed = [f"--- rank {outcome.rank} of {world}\n{outcome.error}" for outcome in outcomes if outcome.error]
    if failed:
        raise RankError("\n".join(failed))
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]


def _wait(processes: list[BaseProcess], results: multiprocessing.Queue[Outcome], timeout_s: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(outcomes) < len(processes) and time.monotonic() < deadline:
        try:
            outcome = results.get(timeout=0.1)
            outcomes[outcome.rank] = outcome
            continue
        except queue.Empty:
            pass
        for rank, process in enumerate(processes):
            if rank not in outcomes and process.exitcode is not None and results.empty():
                # One more look: its last words may still be in the pipe.
                try:
                    outcome = results.get(timeout=0.5)
                    outcomes[outcome.rank] = outcome
                except queue.Empty:
                    outcomes[rank] = Outcome(rank, error=f"process ended with exit code {process.exitcode}")
    late = f"no result within {timeout_s:g} s"
    return [outcomes.get(rank, Outcome(rank, error=late)) for rank in range(len(processes))]
