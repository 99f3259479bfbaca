"""The watchdog without a GPU: a made-up group says what kernels would say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import pytest

from tests.ranks.descriptors import exhausted
from weaveopt import _native
from weaveopt.errors import AgreementError, PeerTimeoutError, WeaveError
from weaveopt.fabrics import watchdog
from weaveopt.fabrics.topology import Group
from weaveopt.fabrics.watchdog import NamedSite, Process

CODES = _native.Code
TAG = watchdog.tag_of(0xABCDEF12)
OTHER_TAG = 0x000777


def word(call: int, tokens: int, tag: int) -> int:
    """As tag_word() in csrc/fabric/arena.h."""
    return call << 48 | tokens << 24 | tag


@dataclass
class SaidByKernels:
    """The fields of `_native.Status`."""

    code: _native.Code = CODES.OK
    peer: int = 1
    slot: str = "ll_packet"
    expected: int = 8
    seen: int = 7
    own_tag: int = word(8, 5, TAG)
    peer_tag: int = 0


@dataclass
class MadeUpGroup:
    status: SaidByKernels = field(default_factory=SaidByKernels)
    acknowledged: int = 0
    error_when_acknowledged: WeaveError | None = None
    aborted: list[_native.Code] = field(default_factory=list)
    retired: bool = False
    owner: MadeUpArena | None = None

    def acknowledge(self) -> None:
        self.acknowledged += 1
        if self.owner is not None:
            self.error_when_acknowledged = self.owner.error

    def abort(self, code: _native.Code) -> None:
        self.aborted.append(code)

    def retire(self) -> None:
        self.retired = True


@dataclass
class MadeUpArena:
    native: MadeUpGroup = field(default_factory=MadeUpGroup)
    group: Group = field(default_factory=lambda: Group("tp", (4, 6, 7), 0))
    peers: tuple[Process, ...] = ()
    error: WeaveError | None = None

    def __post_init__(self) -> None:
        self.native.owner = self


@pytest.fixture
def arena() -> Iterator[MadeUpArena]:
    watchdog.name_site(TAG, NamedSite("all_reduce_norm", "layers.3", 120.0))
    made = MadeUpArena()
    yield made
    watchdog.forget(made)


def wait_until(condition: object, seconds: float = 5.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (CODES.TIMEOUT, "peer rank 6 did not signal within 120 s"),
        (CODES.PEER_EXITED, "peer rank 6 exited"),
        (CODES.PEER_FAILED, "peer rank 6 gave up waiting itself"),
    ],
)
def test_a_wait_that_ended_names_all_that_is_known(arena: MadeUpArena, code: _native.Code, words: str) -> None:
    error = watchdog.describe(arena, SaidByKernels(code))
    assert isinstance(error, PeerTimeoutError)
    text = str(error)
    assert text.startswith("weave::all_reduce_norm at site layers.3 with 5 tokens, group 'tp', rank 4: ")
    assert words in text and "(slot ll_packet, expected 0x8, seen 0x7)" in text and "\n" not in text


def test_ranks_that_differ_are_named_with_what_they_run(arena: MadeUpArena) -> None:
    said = SaidByKernels(CODES.SITE_MISMATCH, peer=2, slot="tag", peer_tag=word(8, 9, OTHER_TAG))
    error = watchdog.describe(arena, said)
    assert isinstance(error, AgreementError)
    assert "runs site layers.3 with 5 tokens, but rank 7 runs site unknown here (tag 000777) with 9 tokens" in str(
        error
    )


def test_sites_of_one_name_are_distinguished(arena: MadeUpArena) -> None:
    """Two models of one class have sites of the same names."""
    said = SaidByKernels(CODES.SITE_MISMATCH, peer=2, slot="tag", peer_tag=word(8, 5, OTHER_TAG))
    with mock.patch.dict(watchdog._sites, {OTHER_TAG: NamedSite("all_reduce_norm", "layers.3", 120.0)}):
        text = str(watchdog.describe(arena, said))
    assert (
        "runs site layers.3 with 5 tokens, but rank 7 runs a site of the same name and size, of another graph" in text
    )


def test_the_peer_that_died_is_named_and_not_the_one_waited_for(arena: MadeUpArena) -> None:
    own = watchdog.this_process()
    arena.peers = (own, own, Process(1 << 30, own.start))
    for code in (CODES.PEER_EXITED, CODES.PEER_FAILED):
        text = str(watchdog.describe(arena, SaidByKernels(code)))
        assert "peer rank 7 exited (waited for rank 6: " in text


def test_the_main_thread_is_told_before_the_kernel_may_end(
    arena: MadeUpArena, capfd: pytest.CaptureFixture[str]
) -> None:
    watchdog.watch(arena)
    arena.native.status = SaidByKernels(CODES.TIMEOUT)
    with pytest.raises(PeerTimeoutError, match="did not signal within 120 s"):
        for _ in range(500):
            time.sleep(0.01)
    wait_until(lambda: arena.native.acknowledged)
    assert arena.native.acknowledged == 1 and arena.native.error_when_acknowledged is arena.error is not None
    time.sleep(3 * watchdog.POLL_S)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("weaveopt: PeerTimeoutError: ")]
    assert len(lines) == 1 and "layers.3" in lines[0], "told once, in one line"
    with pytest.raises(
        PeerTimeoutError, match=r"^the arena is unusable since an earlier call failed\. weave::"
    ) as first:
        watchdog.raise_again(arena.error)
    with pytest.raises(PeerTimeoutError) as second:
        watchdog.fail(arena, "the launch failed")
    assert str(first.value) == str(second.value), "what was told is not told twice in one message"


def test_a_failed_launch_is_what_the_kernel_said_or_else_what_cuda_said(arena: MadeUpArena) -> None:
    with pytest.raises(WeaveError, match="unspecified launch failure"):
        watchdog.fail(arena, "unspecified launch failure")
    arena.native.status = SaidByKernels(CODES.TIMEOUT)
    with pytest.raises(PeerTimeoutError, match="did not signal"):
        watchdog.fail(arena, "unspecified launch failure")
    assert arena.native.acknowledged == 1


def test_a_launch_that_fails_in_a_sound_arena_tells_of_the_one_that_broke(arena: MadeUpArena) -> None:
    sound = MadeUpArena(group=Group("dp", (4, 5), 0))
    arena.error = PeerTimeoutError("peer rank 6 exited")
    watchdog.watch(arena)
    with pytest.raises(PeerTimeoutError, match="peer rank 6 exited"):
        watchdog.fail(sound, "unspecified launch failure")


def test_an_arena_is_freed_on_the_thread_that_lets_it_go() -> None:
    """On the watchdog's own, freeing would wake up the first GPU, which may be a peer's."""
    freed_on: list[int] = []
    for _ in range(5):
        made = MadeUpArena()
        made.native.owner = None
        watchdog.watch(made)
        weakref.finalize(made, lambda: freed_on.append(threading.get_ident()))
        time.sleep(3 * watchdog.POLL_S)
        watchdog.forget(made)
        del made
    assert freed_on == [threading.get_ident()] * 5


def test_a_dead_peer_ends_the_waits(arena: MadeUpArena) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        peer = Process(child.pid, _native.process_identity(child.pid))
        assert peer.start and not peer.has_ended()
        arena.peers = (watchdog.this_process(), peer)
        watchdog.watch(arena)
        with exhausted():
            time.sleep(2 * watchdog.POLLS_PER_PEER_CHECK * watchdog.POLL_S)
            assert not arena.native.aborted, "a look that fails says nothing"
            os.kill(child.pid, signal.SIGSTOP)
            assert not peer.has_ended(), "a stopped process may go on"
            child.kill()
            started = time.monotonic()
            wait_until(lambda: arena.native.aborted)  # not waited for by its parent yet: only its remains are there
            assert time.monotonic() - started < 1.0
        assert arena.native.aborted[0] == CODES.PEER_EXITED
    finally:
        child.kill()
        child.wait()
    assert peer.has_ended()


def test_nothing_is_known_of_a_process_without_a_start_time() -> None:
    assert not Process(1 << 30, "").has_ended()
    assert watchdog.this_process() == Process(os.getpid(), _native.process_identity(os.getpid()))


def test_a_peer_that_looks_gone_once_is_not_given_up(arena: MadeUpArena) -> None:
    looks = iter((False, True, False, True, True))

    class Flickers(Process):
        def has_ended(self) -> bool:
            return next(looks)

    arena.peers = (Flickers(1, ""),)
    for seen in (False, False, False, False, True):
        watchdog._check_peers(arena)
        assert bool(arena.native.aborted) is seen


def test_a_forked_process_watches_nothing(arena: MadeUpArena) -> None:
    """The forked process ends without waiting, even if the lock was held at the fork."""
    watchdog.watch(arena)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with watchdog._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        child = os.fork()
        if child == 0:
            watchdog._stop()
            watchdog.forget(arena)
            os._exit(0 if not watchdog._watched and watchdog._thread is None else 1)
        deadline = time.monotonic() + 5
        ended, status = os.waitpid(child, os.WNOHANG)
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended and status == 0
    finally:
        done.set()
        thread.join()


def test_one_thread_watches_all_arenas(arena: MadeUpArena) -> None:
    others = [MadeUpArena() for _ in range(3)]
    for other in others:
        watchdog.watch(other)
    assert sum(thread.name == "weaveopt-watchdog" for thread in threading.enumerate()) == 1
    for other in others:
        watchdog.forget(other)
    assert all(other.native.retired for other in others), "before their memory is given back"
