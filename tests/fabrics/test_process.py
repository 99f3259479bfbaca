"""When a process counts as gone: only if the system says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tests.ranks.descriptors import exhausted
from weaveopt import _native

_IN_TIME_NAMESPACE = ("unshare", "--time", "--boottime", "100000", "--fork")


def _can_make_time_namespaces() -> bool:
    try:
        return subprocess.run([*_IN_TIME_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def other_than(identity: str, clock: int = 0, ticks: int = 0, inode: int | None = None) -> str:
    """Identity of a process in another time namespace, with a later start or another inode (0: not known)."""
    boot, namespace, time_namespace, start, own = identity.split(":")
    found = int(own) if inode is None else inode
    return f"{boot}:{namespace}:{int(time_namespace) + clock}:{int(start) + ticks}:{found}"


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    own, identity = os.getpid(), _native.process_identity(os.getpid())
    boot, *numbers = identity.split(":")
    assert len(boot) == 36 and len(numbers) == 4 and all(number.isdigit() for number in numbers)
    process = _native.Process(own, identity)
    assert process.has_descriptor and not process.has_ended()
    others = [other_than(identity, ticks=1, inode=0)]
    if int(numbers[-1]):  # this system gives each process's descriptor an inode of its own
        others += [other_than(identity, inode=int(numbers[-1]) + 1)]
    for each in others:
        other = _native.Process(own, each)
        assert not other.has_descriptor and other.has_ended(), each


def test_a_live_process_of_another_time_namespace_has_not_ended() -> None:
    """Start times count from a boot that each time namespace has for itself: two of them say nothing together."""
    with sleeper() as child:
        identity = _native.process_identity(child.pid)
        seen_elsewhere = other_than(identity, clock=1, ticks=100_000), other_than(identity, clock=1, ticks=7, inode=0)
        for each in seen_elsewhere:
            process = _native.Process(child.pid, each)
            with exhausted():
                by_number = _native.Process(child.pid, other_than(each, inode=0))
            assert process.has_descriptor and not process.has_ended(), each
            assert not by_number.has_ended(), each
        child.kill()
        child.wait()
        assert process.has_ended() and by_number.has_ended()


@pytest.mark.skipif(not _can_make_time_namespaces(), reason="the system lets nobody make time namespaces here")
def test_ranks_in_two_time_namespaces_see_each_other_alive() -> None:
    """The identity of this process as one of a later boot time sees it."""
    program = (
        "import sys; from weaveopt import _native\n"
        "own, other = sys.argv[1], _native.process_identity(int(sys.argv[2]))\n"
        "print(other, _native.Process(int(sys.argv[2]), own).has_ended())"
    )
    own = os.getpid()
    command = [*_IN_TIME_NAMESPACE, sys.executable, "-c", program, _native.process_identity(own), str(own)]
    identity, has_ended = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert identity.split(":")[3] != _native.process_identity(own).split(":")[3], "it counts from another boot"
    assert has_ended == "False" and not _native.Process(own, identity).has_ended()


@pytest.mark.parametrize("has_descriptor", [True, False])
@pytest.mark.parametrize("can_open", [True, False])
def test_a_killed_process_has_ended(has_descriptor: bool, can_open: bool) -> None:
    """A killed process is recognized by a descriptor opened before or by its number, with descriptors left or not."""
    own = os.getpid()
    with sleeper() as child:
        identities = _native.process_identity(child.pid), _native.process_identity(own)
        with nullcontext() if has_descriptor else exhausted():
            process, alive = _native.Process(child.pid, identities[0]), _native.Process(own, identities[1])
        assert process.has_descriptor is alive.has_descriptor is has_descriptor
        os.kill(child.pid, signal.SIGSTOP)
        with nullcontext() if can_open else exhausted():
            assert not process.has_ended() and not alive.has_ended(), "a stopped process may go on"
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            # Its parent has not waited for it yet. The number alone does not tell its remains from itself.
            assert process.has_ended() is (has_descriptor or can_open)
            child.wait()
            assert process.has_ended() and not alive.has_ended()


def test_a_process_whose_first_thread_has_ended_goes_on() -> None:
    """It looks like a zombie in /proc."""
    program = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print('there', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        identity = _native.process_identity(child.pid)
        with exhausted():
            by_number = _native.Process(child.pid, identity)
        by_descriptor = _native.Process(child.pid, identity)
        while " Z " not in _stat(child.pid):
            assert child.poll() is None
        assert not by_number.has_ended() and not by_descriptor.has_ended()
    finally:
        child.kill()
        child.communicate()
    assert by_number.has_ended() and by_descriptor.has_ended()


def _stat(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read()


def test_a_process_of_another_host_or_namespace_never_ends() -> None:
    nobody = 1 << 30
    boot, namespace, mark = _native.process_identity(os.getpid()).split(":", 2)
    assert _native.Process(nobody, f"{boot}:{namespace}:{mark}").has_ended()
    elsewhere = (
        "", f"{boot[::-1]}:{namespace}:{mark}", f"{boot}:{namespace}1:{mark}", f"{boot}:1:{mark}", "1",
        f"{boot}:{namespace}:", f"{boot}:{namespace}:1:0:0", f"{boot}:{namespace}:no number",
    )  # fmt: skip
    for identity in elsewhere:
        for pid in (nobody, os.getpid()):
            assert not _native.Process(pid, identity).has_ended(), identity
    assert _native.process_identity(nobody) == ""


def test_a_descriptor_that_was_closed_and_used_again_says_nothing() -> None:
    """A file looks readable at once, as the descriptor of a process that has ended does."""
    with sleeper() as child:
        process = _native.Process(child.pid, _native.process_identity(child.pid))
        names = [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
        descriptor = next(int(name) for name in names if "pidfd" in os.readlink(f"/proc/self/fd/{name}"))
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, descriptor)
        os.close(null)
        assert not process.has_ended()
        child.kill()
        child.wait()
        assert process.has_ended()
