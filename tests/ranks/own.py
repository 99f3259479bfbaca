"""Ranks with processes of their own, forked from a server that has loaded everything once.

For tests in which ranks are meant to die, run on emulated hosts, or change what belongs to the whole process.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
import traceback
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from tests.emulation.emulated_hosts import Network
from tests.ranks.records import Job, Outcome, no_gpus

starting = threading.Lock()
"""Held by a thread that starts ranks: it changes the environment."""


def server() -> ForkServerContext:
    """The fork server of the ranks, started with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.preload"])
    return context


def _main(rank: int, job: Job, results: multiprocessing.Queue[Outcome], network: Network | None) -> None:
    # The server that ranks are forked from has the environment of its own start.
    os.environ.clear()
    os.environ.update(job.environment_of(rank))
    try:
        if network is not None:
            host = network[rank * len(network) // job.world]
            host.enter()
            os.environ.update(host.environment(network[0]))
        outcome = job.run(rank)
    except BaseException:
        outcome = Outcome(rank, error=traceback.format_exc())
    results.put(outcome)


def run(job: Job, timeout_s: float, network: Network | None = None) -> list[Outcome]:
    """How each rank ended, by rank."""
    context = server()
    results: multiprocessing.Queue[Outcome] = context.Queue()
    with starting, no_gpus():
        processes = [context.Process(target=_main, args=(rank, job, results, network)) for rank in range(job.world)]
        for process in processes:
            process.start()
    try:
        return _wait(processes, results, timeout_s)
    finally:
        for process in processes:
            process.kill()  # nothing to a process that has ended meanwhile
            process.join(10)


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
