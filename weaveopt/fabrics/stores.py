"""Bounded use of a process group's store: a store whose process is stopped or gone is an error, never a hang."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from weaveopt.errors import AgreementError

T = TypeVar("T")

STORE_ANSWERS_S = 5.0
"""Time that the store has to answer at once, beyond a timeout that it was asked to wait for."""


def bounded(work: Callable[[], T], where: str, what: str, timeout_s: float) -> T:
    """`work()`, which uses a store and takes at most `timeout_s` while the store answers.

    Raises `AgreementError` where the store fails or does not answer in time; `where` and `what` are words of it.
    """
    found: queue.SimpleQueue[tuple[bool, object]] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put((True, work()))
        except Exception as error:
            found.put((False, error))

    # A store whose process is stopped keeps its callers for good, whatever the timeout.
    threading.Thread(target=run, name="weaveopt-store", daemon=True).start()
    try:
        succeeded, answer = found.get(timeout=timeout_s + STORE_ANSWERS_S)
    except queue.Empty:
        raise AgreementError(
            f"{where}: the store did not answer within {timeout_s + STORE_ANSWERS_S:g} s for {what}: the process "
            "that has it, rank 0 or the launcher, may be stopped"
        ) from None
    if succeeded:
        return answer  # type: ignore[return-value]
    assert isinstance(answer, Exception)
    if isinstance(answer, RuntimeError) and not isinstance(answer, AgreementError):  # stores and connections raise it
        lines = str(answer).splitlines()
        raise AgreementError(
            f"{where}: the store failed while ranks synchronized for {what}: {lines[0] if lines else answer!r}"
        )
    raise answer
