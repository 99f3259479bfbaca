"""Runs a fault on hosts of its own, and holds what ranks said against what they may say."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests.emulation.emulated_hosts import ROOT, Host, hosts
from tests.hosts.fault_ranks import NUM_STEPS, PORTS, STEP, STRANGER_S, STRUCK, Case, Said, run
from tests.hosts.faults import FAULTS, SLACK_S, STORE_S, Moment, Saying, Stranger
from tests.ranks import collect


@dataclass(frozen=True)
class Outcome:
    case: Case
    said: tuple[Said | None, ...]
    """Messages by rank; None for ranks that were killed."""
    errors: tuple[str, ...]
    """Tracebacks of ranks, which there should be none of."""
    struck_at: float
    strangers: tuple[int, int]
    """So many connections were made by strangers, and found closed."""
    left: tuple[str, ...]
    counts: Mapping[str, int]

    def waited_s(self, rank: int) -> float:
        """From the fault, or the begin of what failed if that came later."""
        said = self.said[rank]
        assert said is not None
        return said.ended_at - max(said.began_at, self.struck_at)


@contextlib.contextmanager
def _strangers(host: Host, stranger: Stranger, folder: str) -> Iterator[subprocess.Popen[str]]:
    words = host.command(sys.executable, "-m", "tests.hosts.strangers", stranger.name, str(Path(folder, PORTS)))
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def outcome_of(name: str, shape: tuple[int, int]) -> Outcome:
    fault = FAULTS[name]
    count, per_host = shape
    with (
        contextlib.ExitStack() as stack,
        tempfile.TemporaryDirectory() as folder,
        hosts(count + (fault.stranger is not None), fault.link, changing=True) as made,
    ):
        case = Case(name, count, per_host, folder)
        visitors = None
        if fault.stranger is not None:
            visitors = stack.enter_context(_strangers(made[count], fault.stranger, folder))
        network = replace(made, hosts=made.hosts[:count])
        found = collect(run, case.world, case, network, network=network)
        strangers = (0, 0)
        if visitors is not None:
            assert visitors.stdin is not None and visitors.stdout is not None
            visitors.stdin.close()
            visits, closed = map(int, visitors.stdout.readline().split())
            strangers = (visits, closed)
        counts = made.counts()
        struck = Path(folder, STRUCK)
        struck_at = float(struck.read_text()) if struck.exists() else 0.0
        left = tuple(f"{n} processes on host {host}" for host in range(count) if (n := network.kill(host)))
    left += tuple(name for name in os.listdir("/dev/shm") if "weave" in name)
    is_killed = [fault.itself is None and case.is_struck(rank) for rank in range(case.world)]
    said = tuple(each.value if isinstance(each.value, Said) else None for each in found)
    errors = tuple(each.error for each, killed in zip(found, is_killed, strict=True) if each.error and not killed)
    return Outcome(case, said, errors, struck_at, strangers, left, counts)


def outcomes(names: Iterable[str], at_once: int) -> Iterator[Outcome]:
    """Outcomes of every shape of these faults; `at_once` of them run at a time, since most of them wait."""
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda each: outcome_of(*each), [(n, shape) for n in names for shape in FAULTS[n].shapes])


def limit_s(name: str) -> float:
    """Seconds that a rank may wait for its error."""
    fault = FAULTS[name]
    beyond = STORE_S if fault.waits_s >= fault.meeting_timeout_s else 0.0
    return fault.waits_s + beyond + SLACK_S


def complaints(outcome: Outcome) -> list[str]:
    """Everything that is wrong with how a fault ended; nothing if all is as it must be."""
    case, fault = outcome.case, FAULTS[outcome.case.fault]
    found = [*outcome.errors, *(f"left behind: {each}" for each in outcome.left)]
    if fault.strike is not None and not outcome.struck_at:
        found.append("the fault never struck")
    if fault.counted and not outcome.counts[fault.counted]:
        found.append(f"the links counted no {fault.counted}")
    for rank, said in enumerate(outcome.said):
        allowed = fault.itself if case.is_struck(rank) else fault.others
        if said is None:
            if allowed is not None:
                found.append(f"rank {rank} said nothing")
            continue
        if allowed is None:
            found.append(f"rank {rank} was to be killed, and said {said.error!r}")
            continue
        found += [f"rank {rank} {text}" for text in _wrong(outcome, rank, said, allowed)]
    results = {steps for said in outcome.said if said is not None and len(steps := said.steps) == NUM_STEPS}
    if len(results) > 1:
        found.append("results are not the same on all ranks")
    visits, closed = outcome.strangers
    if fault.stranger is not None and (visits < case.world or closed != visits):
        found.append(f"of {visits} connections of strangers {closed} were closed")
    return found


def _wrong(outcome: Outcome, rank: int, said: Said, allowed: frozenset[Saying]) -> Iterator[str]:
    fault = FAULTS[outcome.case.fault]
    if not any(saying.matches(said.error, rank) for saying in allowed):
        yield f"said {said.error or 'that all is right'!r}, not one of {', '.join(sorted(x.name for x in allowed))}"
    if not said.error and len(said.steps) != NUM_STEPS:
        yield f"made {len(said.steps)} steps of {NUM_STEPS}"
    if said.error and fault.moment in (Moment.CALL, Moment.TRANSFER) and len(said.steps) != STEP:
        yield f"made {len(said.steps)} steps, not {STEP}"
    limit = limit_s(outcome.case.fault)
    if said.error and outcome.waited_s(rank) > limit:
        yield f"said {said.error!r} after {outcome.waited_s(rank):.1f} s, not within {limit:g} s"
    if said.error and not said.later.partition(": ")[2]:
        yield f"said {said.later!r} in a later call"
    if said.held > 0:
        yield f"still had {said.held} sockets"
    if fault.stranger is not None and said.connected_s > STRANGER_S + SLACK_S:
        yield f"took {said.connected_s:.1f} s to connect"
