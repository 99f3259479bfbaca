"""Runs a function on ranks with a real gloo process group, and always comes back.

The function and its arguments must pickle (a module-level function). A rank that fails ends the others. Ranks may run
on emulated hosts (`network`): evenly, the first of them on the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.emulation.emulated_hosts import Network
from tests.ranks import own as own_processes
from tests.ranks import pool
from tests.ranks.ports import free_port
from tests.ranks.records import Job, Outcome, environment

R = TypeVar("R")


class RankError(AssertionError):
    """At least one rank failed; the message holds every rank's traceback."""


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

    Without `grouped` ranks have all of a launcher's variables, and `fn` makes the process group.
    """
    job = Job(fn, args, world, free_port(), threads, grouped, environment())
    return own_processes.run(job, timeout_s, network)


def run_ranks(
    fn: Callable[..., R],
    world: int,
    *args: object,
    timeout_s: float = 120.0,
    threads: int = 1,
    network: Network | None = None,
    grouped: bool = True,
    own: bool = False,
) -> list[R]:
    """Runs `fn(rank, *args)` on each rank and returns the values. Raises `RankError` if one failed, died or took too
    long.

    Ranks are warm: their processes have run other tests. With `own` they are new ones that run nothing else, for an
    `fn` that changes its process for good, or counts on a process in which nothing has happened.
    """
    job = Job(fn, args, world, free_port(), threads, grouped, environment())
    if own or network is not None or not grouped or threads != 1:
        outcomes = own_processes.run(job, timeout_s, network)
    else:
        outcomes = pool.run(job, timeout_s)
    failed = [f"--- rank {outcome.rank} of {world}\n{outcome.error}" for outcome in outcomes if outcome.error]
    if failed:
        raise RankError("\n".join(failed))
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]
