"""Calls of a group of CPU ranks that run on a thread of their own, one after another in the order of their begin.

A call that is begun returns at once; whoever ends it waits for it and gets its error. All ranks begin the calls of a
group in one order, so no two ranks wait for each other. The thread blocks in native code, where Python's lock is free.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class BegunCall:
    """A call that was begun; `wait` ends it."""

    __slots__ = ("_call", "_ended", "_error")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the call on the current thread, and keep what it raises."""
        assert self._call is not None, "the call ran already"
        try:
            self._call()
        except BaseException as error:  # whoever ends the call raises it
            self._error = error
        finally:
            self._call = None  # its tensors
            self._ended.set()

    def settle(self) -> None:
        """Wait until the call has ended, whatever came of it."""
        self._ended.wait()

    def wait(self) -> None:
        """Wait until the call has ended; raises what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error


class CallQueue:
    """The thread of one group, started by the first call. A forked process has none: its calls run at once, in line."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[BegunCall | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: BegunCall | None = None
        self._maker = os.getpid()

    def begin(self, call: Callable[[], None]) -> BegunCall:
        """Run `call` after all that were begun before."""
        begun = BegunCall(call)
        if os.getpid() != self._maker:
            begun.run()
            return begun
        if self._thread is None:
            # A daemon, as one that waits for a peer must not keep a process alive that ends; `close` ends it in time.
            self._thread = threading.Thread(target=self._run, name=f"weaveopt {self._name}", daemon=True)
            self._thread.start()
        self._last = begun
        self._calls.put(begun)
        return begun

    def drain(self) -> None:
        """Wait until no call is in flight. A call on another thread may use the group then."""
        if self._last is not None and os.getpid() == self._maker:
            self._last.settle()
            self._last = None

    def close(self) -> None:
        """End the thread, once its calls have ended: each does within its timeout."""
        if self._thread is not None and os.getpid() == self._maker:
            self._calls.put(None)
            self._thread.join()
        self._thread = self._last = None

    def _run(self) -> None:
        while (begun := self._calls.get()) is not None:
            begun.run()
