"""A process that has loaded all that programs on GPUs import, and forks one for each: `python -m tests.gpu.server FD`.

A program that loads torch, transformers and weaveopt itself, after a launcher that loads torch, begins 10 to 20 s
later. The server never touches a GPU, so each program begins with a driver of its own, has a process of its own, and
may end it as it likes. Requests come on the socket FD, one message each, with the files for standard output and error;
the pid goes back at once, and the exit code when it has ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

MESSAGE_BYTES = 1 << 18
LOADED = (
    "torch", "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx", "torch.testing", "transformers",
    "transformers.generation.utils", "transformers.modeling_utils", "transformers.models.llama.modeling_llama",
    "triton", "weaveopt.backend", "weaveopt.reporting.printed_report", "weaveopt.rewrites", "weaveopt.ops",
    "tests.graphs.forms",
)  # fmt: skip
"""Most of what programs import; what is not installed they do not import either."""


@dataclass(frozen=True)
class Request:
    """A program, as `python -m` takes it."""

    program: str
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> Request:
        fields = json.loads(message)
        return cls(fields["program"], tuple(fields["arguments"]), fields["environment"])


def load() -> None:
    for name in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # programs share these pages as long as nobody writes to them


def serve(channel: socket.socket) -> Callable[[], None] | None:
    """Forks until the channel is closed. Returns in a forked process, with its program."""
    running: set[int] = set()
    while True:
        if select.select([channel], [], [], 0.02)[0]:
            message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
            if not message:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                return None
            pid = os.fork()
            if pid == 0:
                channel.close()
                for descriptor, standard in zip(descriptors, (1, 2), strict=True):
                    os.dup2(descriptor, standard)
                return partial(run, Request.decode(message))
            for descriptor in descriptors:
                os.close(descriptor)
            running.add(pid)
            channel.send(json.dumps({"pid": pid}).encode())
        for pid in tuple(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                channel.send(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def run(request: Request) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = [request.program, *request.arguments]
    runpy.run_module(request.program, run_name="__main__", alter_sys=True)


def main() -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # from a terminal it goes to the test as well, which closes the channel
    load()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.send(b"{}")
    program = serve(channel)
    if program is not None:
        program()


if __name__ == "__main__":
    main()
