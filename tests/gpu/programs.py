"""Programs of tests on GPUs, each in a process of its own that `tests/gpu/server.py` forks.

Where forked processes cannot use GPUs, as some import has touched the driver, Python starts them as any other program.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

from tests.gpu.server import MESSAGE_BYTES, Request
from weaveopt.cli.calibrate import NO_MULTICAST

ROOT = Path(__file__).resolve().parents[2]
START_S, PROBE_S, END_S, POLL_S = 180.0, 60.0, 10.0, 0.02
NEVER_FORKED = "WEAVE_TEST_NEVER_FORKED"
"""Set to 1, no program is forked."""


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code, minus a signal's number; None where it had to be killed."""

    code: int | None
    out: str
    err: str


class Program:
    """A program that runs."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], forked: bool) -> None:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  # until it has ended
        self._server = _server() if forked else None
        self._code: int | None = None
        environment = {**environment, **NO_MULTICAST}
        if self._server is not None:
            self.pid = self._server.fork(Request(name, tuple(arguments), environment), self._out, self._err)
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-m", name, *arguments], cwd=ROOT, env=environment, stdout=self._out,
                stderr=self._err,
            )  # fmt: skip
            self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self._code is None:
            self._code = self._process.poll() if self._server is None else self._server.code_of(self.pid)
        return self._code

    def wait(self, timeout_s: float) -> bool:
        """True if it has ended within that time."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.poll() is not None

    def end(self, timeout_s: float = 0.0) -> Ended:
        """Waits for the program's end, kills it after `timeout_s`, and returns its exit code and output."""
        ended = self.wait(timeout_s)
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(END_S)
        return Ended(self._code if ended else None, _text(self._out), _text(self._err))


class _Server:
    """The process that forks."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        # Whether there are GPUs torch then asks NVML, not the driver, which no fork may have behind it.
        environment = {**os.environ, **NO_MULTICAST, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        command = [sys.executable, "-m", "tests.gpu.server", str(theirs.fileno())]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._channel = ours
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        atexit.register(self.close)
        self._receive(START_S)

    def fork(self, request: Request, out: BinaryIO, err: BinaryIO) -> int:
        with self._lock:
            socket.send_fds(self._channel, [request.encode()], [out.fileno(), err.fileno()])
            while True:
                told = self._receive(START_S)
                if "code" not in told:
                    return told["pid"]

    def code_of(self, pid: int) -> int | None:
        with self._lock:
            while select.select([self._channel], [], [], 0)[0]:
                self._receive(0)
            return self._codes.get(pid)

    def _receive(self, timeout_s: float) -> dict[str, int]:
        if not select.select([self._channel], [], [], timeout_s)[0] or not (message := self._channel.recv(1 << 12)):
            raise RuntimeError(f"the process that forks programs on GPUs has ended or said nothing for {timeout_s:g} s")
        told: dict[str, int] = json.loads(message)
        if "code" in told:
            self._codes[told["pid"]] = told["code"]
        return told

    def close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


_starting = threading.Lock()


def _server() -> _Server:
    with _starting:
        return _the_server()


@cache
def _the_server() -> _Server:
    return _Server()


@cache
def can_fork() -> bool:
    """True if a forked program can use this host's GPUs, where there are any."""
    if os.environ.get(NEVER_FORKED) == "1":
        return False
    try:
        probed = Program("tests.gpu.probe", (), os.environ, forked=True).end(PROBE_S)
    except (RuntimeError, OSError) as error:
        probed = Ended(None, "", str(error))
    if probed.code != 0:
        print(f"programs on GPUs are not forked: {probed.err[-500:]}", file=sys.stderr)
    return probed.code == 0


def start(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Program:
    return Program(name, arguments, environment, forked=can_fork())


class Ranks:
    """A program's ranks, each with a launcher's variables. The store is this process's: it outlives them."""

    def __init__(
        self, arguments_of: Sequence[Sequence[str]], name: str, environment: Mapping[str, str], host: str = "127.0.0.1"
    ) -> None:
        import torch.distributed as dist

        world = str(len(arguments_of))
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        launched = {
            **environment, "MASTER_ADDR": host, "MASTER_PORT": str(self._store.port), "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
        self.programs = [
            start(name, arguments, {**launched, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, arguments in enumerate(arguments_of)
        ]

    def end(self, timeout_s: float) -> list[Ended]:
        """How all ended. Once one has failed the others get `END_S`."""
        deadline = time.monotonic() + timeout_s
        while any(each.poll() is None for each in self.programs) and time.monotonic() < deadline:
            if any(each.poll() for each in self.programs):
                deadline = min(deadline, time.monotonic() + END_S)
            time.sleep(POLL_S)
        return [each.end() for each in self.programs]


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
