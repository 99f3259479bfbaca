"""Injection of each fault into a rank when its moment comes; `tests.faults.faults` says what must follow."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import weaveopt.backend
from tests.faults import programs
from tests.faults.case import Moment
from tests.faults.kernel_filter import Syscall, drop_privilege_to_look, end_at, hide_from_peers, refuse
from tests.faults.programs import PROGRAMS, Rank
from weaveopt import _native
from weaveopt.cost_model import Machine
from weaveopt.errors import WeaveError
from weaveopt.fabrics import shm

WITHIN_S = programs.LATE_S / 2
"""After which a rank that entered its call before the others is struck within it."""


class UserError(Exception):
    """Error raised by the program around weaveopt."""


def send_itself(number: signal.Signals) -> Callable[[Rank], None]:
    def inject(rank: Rank) -> None:
        if rank.case.moment is not Moment.WITHIN:
            os.kill(os.getpid(), number)
            return
        timer = threading.Timer(WITHIN_S, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    return inject


def raise_error(rank: Rank) -> None:
    raise UserError("of the program, not of weaveopt")


def leave(rank: Rank) -> None:
    sys.exit(0)


def never_come(rank: Rank) -> None:
    time.sleep(rank.case.compile_timeout_s + 2)
    sys.exit(0)


def exhaust_descriptors(rank: Rank) -> None:
    taken = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(len(os.listdir("/proc/self/fd")) + 20, limits[0]), limits[1]))
    while True:
        try:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
            return


def only_while_binding(limit: Callable[[], None], undo: Callable[[], None]) -> None:
    """`limit` holds until the arena is there, or is not."""
    inner = shm._make

    def make(*arguments: object) -> object:
        limit()
        try:
            return inner(*arguments)  # type: ignore[arg-type]
        finally:
            undo()

    shm._make = make  # type: ignore[assignment]


def limit_while_binding(which: int, most: Callable[[], int]) -> Callable[[Rank], None]:
    def inject(rank: Rank) -> None:
        limits = resource.getrlimit(which)
        only_while_binding(
            lambda: resource.setrlimit(which, (most(), limits[1])), lambda: resource.setrlimit(which, limits)
        )

    return inject


def lowest_free_descriptor() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def limit_memory(rank: Rank) -> None:
    """A control group of version 2 that leaves 4096 bytes. The files in which it says so are made up."""
    inner = _native.Segment.create

    def create(num_bytes: int, cookie: int, first_epoch: int, num_segments: int) -> object:
        with tempfile.TemporaryDirectory() as root:
            files = {
                "proc/self/cgroup": "0::/job\n",
                "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
                "sys/fs/cgroup/job/memory.max": "8192\n",
                "sys/fs/cgroup/job/memory.current": "4096\n",
            }
            for name, text in files.items():
                path = Path(root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return inner(num_bytes, cookie, first_epoch, num_segments, root)

    _native.Segment.create = create  # type: ignore[method-assign, assignment]


def refuse_space(rank: Rank) -> None:
    refuse(Syscall.FALLOCATE, errno.ENOSPC)


def refuse_space_and_memfd(rank: Rank) -> None:
    refuse_space(rank)
    refuse_memfd(rank)


def refuse_memfd(rank: Rank) -> None:
    refuse(Syscall.MEMFD_CREATE, errno.EPERM)


def refuse_pidfd_and_die(rank: Rank) -> None:
    """The survivors have no pidfd of the one that is killed."""
    if rank.rank == rank.case.victim:
        inner = rank.reach

        def reach(moment: Moment) -> None:
            if moment is Moment.BETWEEN:
                os.kill(os.getpid(), signal.SIGKILL)
            inner(moment)

        rank.reach = reach  # type: ignore[method-assign]
    else:
        refuse(Syscall.PIDFD_OPEN, errno.EPERM)


def exhaust_descriptors_and_die(rank: Rank) -> None:
    """The survivors cannot open anything when they look after the one that is killed."""
    if rank.rank == rank.case.victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    exhaust_descriptors(rank)


def die_at_unlink(rank: Rank) -> None:
    end_at(Syscall.UNLINK)


def hide_memory(rank: Rank) -> None:
    """A rank of a hardened container: peers may not open its files."""
    if rank.rank == rank.case.victim:
        hide_from_peers()
    else:
        drop_privilege_to_look()


def fork_child(end: Callable[[], None]) -> Callable[[Rank], None]:
    def inject(rank: Rank) -> None:
        pid = os.fork()
        if pid == 0:
            end()
        os.waitpid(pid, 0)

    return inject


def other_options(rank: Rank) -> None:
    rank.options["max_tokens"] = 64


def other_version(rank: Rank) -> None:
    weaveopt.__version__ = "0.0.1"  # type: ignore[misc]


def other_constants(rank: Rank) -> None:
    inner = weaveopt.cost_model.load

    def load(name: str) -> Machine:
        return replace(inner(name), relative_error=0.77)

    weaveopt.cost_model.load = load  # type: ignore[assignment]


def other_model(rank: Rank) -> None:
    rank.form = programs.other_layers


def fail_in_rule(rank: Rank) -> None:
    def plan(*arguments: object) -> object:
        raise ValueError("a step that fails")

    weaveopt.backend.plan = plan  # type: ignore[assignment]


def one_graph_more(rank: Rank) -> None:
    rank.num_layers += 1


def other_tokens(rank: Rank) -> None:
    rank.tokens += 1


def reserve_more(rank: Rank) -> None:
    group = programs.group_name()
    call = replace(programs.make_call(rank, "more", group, rank.case.world), max_tokens=4 * programs.MAX_TOKENS)
    programs.reserve(rank, group, [call])


def other_residual(rank: Rank) -> None:
    rank.seed = programs.OTHER_SEED


def destroy_group(rank: Rank) -> None:
    dist.destroy_process_group()


def remake_group(rank: Rank) -> None:
    """A group of the same name, on which the program starts anew."""
    store = dist.distributed_c10d._get_default_store()
    name = programs.group_name()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank.rank, world_size=rank.case.world)
    assert programs.group_name() == name
    torch._dynamo.reset()
    rank.steps = PROGRAMS[rank.case.mode](rank)


def collect_compiled(rank: Rank) -> None:
    """The compiled functions are garbage; the program compiles again."""
    rank.steps = None
    torch._dynamo.reset()
    gc.collect()
    rank.steps = PROGRAMS[rank.case.mode](rank)


def call_from_second_thread(rank: Rank) -> None:
    """While the main thread waits for its peers within a call, another one makes the same call."""
    steps = rank.steps
    assert steps is not None

    def call() -> None:
        time.sleep(WITHIN_S)
        try:
            steps(0)
        except WeaveError as error:
            assert "another thread runs an operation of the same group" in str(error), error
            return
        os._exit(70)  # the call of this thread was taken for one of the main thread's

    threading.Thread(target=call, daemon=True).start()


def exit_child() -> None:
    sys.exit(0)


INJECTIONS: dict[str, Callable[[Rank], None]] = {
    "killed": send_itself(signal.SIGKILL),
    "terminated": send_itself(signal.SIGTERM),
    "interrupted": send_itself(signal.SIGINT),
    "stopped": send_itself(signal.SIGSTOP),
    "stopped for long": send_itself(signal.SIGSTOP),
    "stopped for a moment": send_itself(signal.SIGSTOP),
    "raises": raise_error,
    "leaves": leave,
    "never comes": never_come,
    "no descriptors": exhaust_descriptors,
    "no descriptors to bind": limit_while_binding(resource.RLIMIT_NOFILE, lowest_free_descriptor),
    "no descriptors, a peer killed": exhaust_descriptors_and_die,
    "files limited": limit_while_binding(resource.RLIMIT_FSIZE, lambda: 4096),
    "no shared memory": refuse_space,
    "no shared memory, no memfd": refuse_space_and_memfd,
    "no memfd": refuse_memfd,
    "no pidfd, a peer killed": refuse_pidfd_and_die,
    "killed while making memory": die_at_unlink,
    "memory limited": limit_memory,
    "memory hidden": hide_memory,
    "forked child, _exit": fork_child(lambda: os._exit(0)),
    "forked child, sys.exit": fork_child(exit_child),
    "other options": other_options,
    "other version": other_version,
    "other profile": other_constants,
    "other model": other_model,
    "a step fails": fail_in_rule,
    "one graph more": one_graph_more,
    "other token count": other_tokens,
    "other rendezvous": reserve_more,
    "other residual": other_residual,
    "group destroyed": destroy_group,
    "group made again": remake_group,
    "compiled code collected": collect_compiled,
    "second thread": call_from_second_thread,
}
