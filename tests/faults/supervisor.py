"""The parent of a case's ranks: starts them, continues those that stop, collects what they say, sees what is left."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import inf

from tests.faults.case import Case, Ended, Moment, Outcome, Said, said_of
from tests.faults.faults import FAULTS

POLL_S = 0.01
OUTPUT_BYTES = 3000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass
class _Child:
    """A rank's process."""

    pid: int
    words: int
    """Pipe for its reports."""
    output: int
    text: bytes = b""
    said: Said | None = None
    code: int | None = None
    is_stopped: bool = False
    continue_at: float = inf


@dataclass
class _Run:
    case: Case
    children: list[_Child] = field(default_factory=list)
    injected_at: float | None = None
    num_ready: int = 0
    """Ranks that have met."""
    names: frozenset[str] = field(default_factory=lambda: frozenset(os.listdir("/dev/shm")))
    """Names in /dev/shm before the case."""


def prctl(option: int, argument: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(argument), 0, 0, 0)


def supervise(case: Case, number: int, channel: socket.socket) -> Callable[[], None]:
    """Runs `case` and sends its outcome; does not return but in a forked rank, with that rank's program."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    started = time.monotonic()
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(64)
    port = listening.getsockname()[1]
    release_read, release_write = os.pipe()
    run = _Run(case)
    for rank in range(case.world):
        words_read, words_write = os.pipe()
        output = os.open(os.environ["TMPDIR"], os.O_TMPFILE | os.O_RDWR, 0o600)
        pid = os.fork()
        if pid == 0:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(output, 2)
            for descriptor in (words_read, release_write, channel.fileno(), output):
                os.close(descriptor)
            if not (case.store_on_rank and rank == 0):
                listening.close()
            from tests.faults.rank import run_rank

            listen_on = listening.detach() if case.store_on_rank and rank == 0 else None
            return partial(run_rank, case, rank, port, listen_on, words_write, release_read)
        os.close(words_write)
        os.set_blocking(words_read, False)
        run.children.append(_Child(pid, words_read, output))
    os.close(release_read)
    store = None if case.store_on_rank else _store(port, listening)
    if case.store_on_rank:
        listening.close()
    _await_ranks(run, started, release_write)
    _end_all(run)
    left = _left(run)
    del store
    ranks = tuple(Ended(c.said, c.code, _text(c.output)) for c in run.children)
    outcome = Outcome(ranks, run.injected_at, tuple(left), time.monotonic() - started)
    channel.send(f"{number}\n{outcome.to_json()}".encode())
    os._exit(0)


def _store(port: int, listening: socket.socket) -> object:
    """As an agent of torchrun has it: it outlives the ranks."""
    import torch.distributed as dist

    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300),
        master_listen_fd=listening.detach(),
    )  # fmt: skip


def _await_ranks(run: _Run, started: float, release: int) -> None:
    """Waits until every rank has ended or reported its end, or has stopped for good."""
    case, fault = run.case, FAULTS[run.case.fault]
    deadline = started + fault.deadline_s(case)
    signal_at: float | None = None
    is_released = False
    while any(child.code is None for child in run.children) and time.monotonic() < deadline:
        now = time.monotonic()
        victim = run.children[case.victim]
        if run.num_ready == case.world and case.moment is Moment.ANY:
            run.num_ready, signal_at = 0, now + case.delay_s
        if signal_at is not None and now >= signal_at:
            signal_at = None
            if victim.code is None:
                run.injected_at = now
                os.kill(victim.pid, fault.signal)
        words = [child.words for child in run.children if child.words >= 0]
        for ready in select.select(words, [], [], POLL_S)[0] if words else ():
            _read(run, ready)
        if not words:
            time.sleep(POLL_S)
        _reap(run, fault.stop_s)
        for child in run.children:
            others_told = all(c.said is not None or c.code is not None for c in run.children if c is not child)
            if child.is_stopped and (now >= child.continue_at or (fault.stops_until_told and others_told)):
                child.is_stopped = False
                os.kill(child.pid, signal.SIGCONT)
        stays = fault.stop_s == inf and not fault.stops_until_told
        for_good = [child for child in run.children if child.is_stopped and stays]
        if not is_released and all(c.said is not None or c.code is not None or c in for_good for c in run.children):
            is_released = True
            os.close(release)
        if is_released and all(c.code is not None or c in for_good for c in run.children):
            return


def _read(run: _Run, words: int) -> None:
    child = next(child for child in run.children if child.words == words)
    data = os.read(words, 1 << 16)
    if not data:
        os.close(words)
        child.words = -1
        return
    child.text += data
    *lines, child.text = child.text.split(b"\n")
    for line in lines:
        record = json.loads(line)
        if "is_ready" in record:
            run.num_ready += 1
        elif "injected_at" in record:
            run.injected_at = run.injected_at or record["injected_at"]
        else:
            child.said = said_of(record)


def _reap(run: _Run, stopped_for_s: float) -> None:
    """Takes note of children that ended or stopped, a rank's orphans among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return
        if pid == 0:
            return
        child = next((child for child in run.children if child.pid == pid), None)
        if child is None:
            continue
        if os.WIFSTOPPED(status):
            child.is_stopped = True
            child.continue_at = time.monotonic() + stopped_for_s
        else:
            child.code = os.waitstatus_to_exitcode(status)


def _end_all(run: _Run) -> None:
    """Ends ranks that are stopped, or that outlived the deadline: their exit code stays unknown."""
    for child in run.children:
        if child.code is None:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        while child.words >= 0:
            if not select.select([child.words], [], [], 0.5)[0]:
                break  # somebody who was forked from the rank holds it
            _read(run, child.words)


def _left(run: _Run) -> list[str]:
    """Remains of the ranks after their end: their processes, and names in /dev/shm."""
    found = []
    for pid in _children():
        with open(f"/proc/{pid}/cmdline") as file:
            found.append(f"process {pid} {file.read()[:80]!r}")
        os.kill(pid, signal.SIGKILL)
    found += [f"/dev/shm/{name}" for name in sorted(os.listdir("/dev/shm")) if _is_of(run, name)]
    return found


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(word) for word in file.read().split()]


def _is_of(run: _Run, name: str) -> bool:
    """True if a name in /dev/shm is weaveopt's, appeared since this case began, and stays."""
    if "weave" not in name or name in run.names:
        return False
    time.sleep(0.2)  # a rank of somebody else may be between making and unlinking it
    return os.path.exists(f"/dev/shm/{name}")


def _text(output: int) -> str:
    size = os.lseek(output, 0, os.SEEK_END)
    return os.pread(output, OUTPUT_BYTES, max(size - OUTPUT_BYTES, 0)).decode(errors="replace")
