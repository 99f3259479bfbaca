"""Runs cases on ranks that one warm process forks, several at a time."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.case import Case, Mode, Outcome, case_to_json
from tests.faults.zygote import MESSAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0
MOST_WORK_AT_ONCE = 44
"""Most of a case is waiting, so several run at a time."""
_WORK = {Mode.EAGER: 1, Mode.PAIRS: 1, Mode.GRAPH: 3, Mode.REGIONS: 4}
"""Relative work of a rank, from its start to its end."""


def _work(case: Case) -> int:
    return case.world * (_WORK[case.mode] + 4 * case.ends_interpreter)


class Pool:
    """The warm process. Temporary files of its ranks go to a folder of its own, which has to be empty in the end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weaveopt-faults-")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"weaveopt-tests-{os.getuid()}"),
            **os.environ, "TMPDIR": self._folder.name, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        }  # fmt: skip
        descriptor = theirs.fileno()
        command = [sys.executable, "-m", "tests.faults.zygote", str(descriptor)]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=(descriptor,))
        theirs.close()
        self._channel = ours
        if not select.select([ours], [], [], START_TIMEOUT_S)[0] or not ours.recv(MESSAGE_BYTES):
            self._process.kill()
            raise RuntimeError("the process that forks ranks did not start")

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
        """How each ended, in the order in which they do."""
        sent = running = 0
        for _ in cases:
            while sent < len(cases) and (not running or running + _work(cases[sent]) <= MOST_WORK_AT_ONCE):
                self._channel.send(f"{sent}\n{case_to_json(cases[sent])}".encode())
                running += _work(cases[sent])
                sent += 1
            number, _, text = self._channel.recv(MESSAGE_BYTES).decode().partition("\n")
            if not text.startswith("{"):
                raise RuntimeError(f"{cases[int(number)].name}: {text or 'the process that forks ranks has ended'}")
            running -= _work(cases[int(number)])
            yield cases[int(number)], Outcome.from_json(text)

    def close(self) -> list[str]:
        """Ends the process; returns the temporary files that ranks left."""
        self._channel.close()
        self._process.wait(30)
        left = [str(path) for path in Path(self._folder.name).rglob("*")]
        self._folder.cleanup()
        return left
