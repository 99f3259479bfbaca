"""When a process counts as gone: only if the system says so."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

from weaveopt import _native


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    own = os.getpid()
    start = _native.process_start(own)
    assert start.isdigit() and not _native.process_has_ended(own, start)
    assert _native.process_has_ended(own, str(int(start) + 1))


def test_a_killed_process_has_ended_before_and_after_its_parent_waits() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = _native.process_start(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    assert not _native.process_has_ended(child.pid, start), "a stopped process may go on"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert _native.process_has_ended(child.pid, start), "a zombie"
    assert _native.process_start(child.pid) == ""
    child.communicate()
    assert _native.process_has_ended(child.pid, start)


def test_a_process_without_a_known_start_never_ends() -> None:
    assert not _native.process_has_ended(1 << 30, "")
    assert _native.process_start(1 << 30) == "" and _native.process_has_ended(1 << 30, "1")


def test_a_process_that_cannot_be_asked_about_counts_as_alive() -> None:
    own, start = os.getpid(), _native.process_start(os.getpid())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        seen = _native.process_has_ended(own, start), _native.process_has_ended(own, "1"), _native.process_start(own)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert seen == (False, False, ""), "no descriptor was left"
