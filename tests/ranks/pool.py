"""Warm ranks: processes that run one test's function after the other, each time in a new process group.

What a fork, the first graph that is compiled, and modules that tests import cost is paid once a run. A rank that
raised, died, took too long or left its process changed (`tests/ranks/state.py`) runs nothing more, and neither do those
that it ran with.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from tests.ranks.own import server, starting
from tests.ranks.records import Job, Outcome, no_gpus

GRACE_S = 5.0
"""Time that ranks have to end once their channel is closed."""


@dataclass(frozen=True)
class _Rank:
    """A warm rank's process, and the channel to it."""

    process: BaseProcess
    channel: Connection


_ranks: list[_Rank] = []
"""Those that are there, by rank: a call of n ranks takes the first n."""


def run(job: Job, timeout_s: float) -> list[Outcome]:
    """How each rank ended, by rank."""
    while len(_ranks) < job.world:
        _ranks.append(_start())
    ranks = _ranks[: job.world]
    outcomes: dict[int, Outcome] = {}
    try:
        for rank, each in enumerate(ranks):
            _send(each, (job, rank))
        _receive(ranks, outcomes, time.monotonic() + timeout_s)
    finally:
        if len(outcomes) < job.world or any(each.error or each.spoiled for each in outcomes.values()):
            close()
    late = f"no result within {timeout_s:g} s"
    return [outcomes.get(rank, Outcome(rank, error=late)) for rank in range(job.world)]


def _start() -> _Rank:
    context = server()
    ours, theirs = context.Pipe()
    with starting, no_gpus():
        process = context.Process(target=_serve, args=(theirs,))
        process.start()
    theirs.close()
    return _Rank(process, ours)


def _send(rank: _Rank, message: tuple[Job, int]) -> None:
    with contextlib.suppress(OSError):  # it has ended, which is what its channel says when it is read
        rank.channel.send(message)


def _receive(ranks: list[_Rank], outcomes: dict[int, Outcome], deadline: float) -> None:
    left = {each.channel: rank for rank, each in enumerate(ranks)}
    while left and (remaining := deadline - time.monotonic()) > 0:
        for channel in wait(list(left), remaining):
            assert isinstance(channel, Connection)
            rank = left.pop(channel)
            try:
                outcomes[rank] = channel.recv()
            except (EOFError, OSError):
                process = ranks[rank].process
                process.join(GRACE_S)
                outcomes[rank] = Outcome(rank, error=f"process ended with exit code {process.exitcode}")


@atexit.register
def close() -> None:
    """Ends all ranks; those of the next call are new."""
    ranks = tuple(_ranks)
    _ranks.clear()
    for each in ranks:
        each.channel.close()
        each.process.kill()
    for each in ranks:
        each.process.join(GRACE_S)


def _serve(channel: Connection) -> None:
    """Main loop of a warm rank, until its channel is closed or its process cannot be restored."""
    from tests.ranks.state import State  # it loads torch, which the server has loaded already

    before = State.now()
    while True:
        try:
            job, rank = channel.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(job.environment_of(rank))
        outcome = job.run(rank)
        if not outcome.error:
            outcome = replace(outcome, spoiled=before.restore())
        try:
            channel.send(outcome)
        except Exception as error:  # a value that does not pickle
            outcome = Outcome(rank, error=f"{type(error).__name__}: {error}")
            channel.send(outcome)
        if outcome.error or outcome.spoiled:
            return
