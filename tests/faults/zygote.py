"""A process that has loaded and compiled everything once, and forks the ranks of one case after the other.

A rank that has to load torch itself costs seconds; forked from here it costs milliseconds, and compiles with warm
caches. `python -m tests.faults.zygote` gets cases on the socket that its argument names, each as one message, and sends
their outcomes back. Every case has a supervisor of its own, forked from here, whose children the ranks are: it holds
the store, continues stopped ranks, collects what ranks say, and looks for what remains of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable

MESSAGE_BYTES = 1 << 20


def warm() -> None:
    """Loads and compiles all that ranks will need, without starting a thread."""
    import torch
    import torch.distributed as dist
    import tqdm
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.faults import programs
    from tests.graphs.executing import without_code
    from tests.ranks import quick_tracing
    from weaveopt.errors import ArenaError
    from weaveopt.rewrites import RULES

    quick_tracing.install()
    without_code().__enter__()  # for good: what faults do to ranks does not depend on it
    tqdm.tqdm.monitor_interval = 0  # else it starts a thread
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    for num_layers in (1, programs.NUM_LAYERS):
        # Without peers there is no arena, but by then all of the graph has been compiled.
        with contextlib.suppress(ArenaError):
            programs.compiled(num_layers, {})(*programs.inputs(0, 0))
        torch._dynamo.reset()
        nothing = {"force": [], "disable": list(RULES.names)}
        programs.compiled(num_layers, nothing)(*programs.inputs(0, 0))
        torch._dynamo.reset()
    dist.destroy_process_group()
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"a process that forks ranks must have one thread, found {len(tasks)}"


def serve(channel: socket.socket) -> Callable[[], None] | None:
    """Forks until the channel is closed. Returns in a forked rank, which what it returns is the program of."""
    import tests.faults.rank  # noqa: F401  # what ranks would load each
    from tests.faults.case import case_from_json
    from tests.faults.supervisor import supervise

    running: dict[int, int] = {}
    while True:
        if select.select([channel], [], [], 0.05)[0]:
            message = channel.recv(MESSAGE_BYTES).decode()
            if not message:
                return None
            number, _, text = message.partition("\n")
            pid = os.fork()
            if pid == 0:
                return supervise(case_from_json(text), int(number), channel)
            running[pid] = int(number)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            number_done = running.pop(pid)
            if status != 0:
                channel.send(f"{number_done}\nthe supervisor ended with status {status}".encode())


def main() -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # from a terminal it goes to the test as well, which closes the channel
    warm()
    gc.collect()
    gc.freeze()  # ranks share these pages as long as nobody writes to them
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.send(b"ready\n")
    program = serve(channel)
    if program is not None:
        program()  # a rank: it ends as any Python program does


if __name__ == "__main__":
    main()
