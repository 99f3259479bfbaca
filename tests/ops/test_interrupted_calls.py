"""Exceptions that come in the middle of a call: of a signal's handler while it waits, or between any two steps.

The wait ends at once, the group is given back, and no later call of any rank is wrong: it is right, or one clear error.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.test_inference_mode import FAMILIES, Step
from tests.ranks import run_ranks, shm_ranks
from weaveopt.errors import PeerTimeoutError, WeaveError
from weaveopt.fabrics import shm
from weaveopt.ops.reduction.operands import DeferredGemm

HEARD_S = 1.0
"""From a signal to the exception that its handler raises."""
AFTER_S = 0.2


class Late(Exception):
    """Exception that a program's own handler raises."""


@contextmanager
def signalled(number: signal.Signals, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """This process gets the signal soon."""
    before = signal.signal(number, handler)
    timer = threading.Timer(AFTER_S, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(number, before)


def _same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def _interrupted(rank: int, step: Step, wanted: list[Tensor]) -> str:
    """Rank 0 is interrupted while it waits for rank 1, which comes later; what the ranks say in their next call."""
    if rank == 0:
        begin = time.monotonic()
        with signalled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
            step()
        assert time.monotonic() - begin < AFTER_S + HEARD_S
    dist.barrier()
    begin = time.monotonic()
    if rank == 1:
        try:  # rank 0 may have done its part
            assert _same(step(), wanted)
        except PeerTimeoutError as error:
            assert "peer rank 0 gave up waiting itself" in str(error)
    with pytest.raises(WeaveError) as failure:
        step()
    assert time.monotonic() - begin < 2 * HEARD_S, "nobody waits for the timeout"
    return str(failure.value)


def run_interrupted(rank: int) -> list[str]:
    said = []
    for family in FAMILIES:
        for index in range(len(family(rank))):
            step = family(rank)[index]
            wanted = step()
            dist.barrier()
            said.append(_interrupted(rank, step, wanted))
            dist.barrier()
            shm.release("0")
    return said


def test_ctrl_c_ends_the_wait_of_every_operation() -> None:
    first, second = run_ranks(run_interrupted, 2, timeout_s=240)
    assert len(first) == len(second) >= len(FAMILIES)
    for text in first:
        assert "the handler of a signal raised while this rank waited" in text and "unusable" in text, text
    for text in second:
        assert "peer rank 0 gave up waiting itself" in text, text


def run_handlers(rank: int) -> None:
    """A handler that raises something else, and one that raises nothing."""
    step = FAMILIES[0](rank)[0]
    wanted = step()
    dist.barrier()
    heard: list[int] = []
    if rank == 0:
        with signalled(signal.SIGUSR1, lambda number, _: heard.append(number)):
            assert _same(step(), wanted)
        assert heard == [signal.SIGUSR1]
    else:
        time.sleep(3 * AFTER_S)
        assert _same(step(), wanted)

    def raise_late(*_: object) -> None:
        with pytest.raises(WeaveError, match="run them one by one"):
            step()  # the handler itself comes to the same group
        raise Late

    if rank == 0:
        with signalled(signal.SIGUSR1, raise_late), pytest.raises(Late):
            step()
        with pytest.raises(WeaveError, match="the handler of a signal raised"):
            step()
    dist.barrier()


def test_handlers_of_a_program_run_while_a_rank_waits() -> None:
    run_ranks(run_handlers, 2)


def run_failing_gemm(rank: int) -> None:
    """Between the two native steps of one call, on one rank."""
    shm_ranks.reserve()
    call = shm_ranks.make_call("fails", "0", 2).encode()
    arguments = (torch.ones(5, 32), torch.ones(32, shm_ranks.HIDDEN), *[None] * 8, call)
    torch.ops.weave.mm_all_reduce_norm(*arguments)
    begin = time.monotonic()
    if rank == 0:

        def fail(*_: object) -> Tensor:
            raise MemoryError("no room")

        DeferredGemm.compute = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(MemoryError, match="no room"):
            torch.ops.weave.mm_all_reduce_norm(*arguments)
        with pytest.raises(WeaveError, match=r"unusable since an earlier call failed.*an exception ended the call"):
            torch.ops.weave.mm_all_reduce_norm(*arguments)
    else:
        with pytest.raises(PeerTimeoutError, match="peer rank 0 gave up waiting itself"):
            torch.ops.weave.mm_all_reduce_norm(*arguments)
    assert time.monotonic() - begin < 10, "far less than the timeout"
    dist.barrier()


def test_an_exception_between_two_steps_of_a_call_is_told_to_the_others() -> None:
    run_ranks(run_failing_gemm, 2)


def _raise_at(line: int, call: Callable[[], object]) -> bool:
    """Runs `call`, and raises `Late` before the `line`th line of this package that runs; false: it has fewer."""
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal seen
        if "/weaveopt/" not in frame.f_code.co_filename:
            return None
        seen += event == "line"
        if event == "line" and seen == line:
            sys.settrace(None)
            raise Late
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        call()
    except Late:
        return True
    finally:
        sys.settrace(None)
    return False


def run_every_line(rank: int) -> list[tuple[str, int, int]]:
    """For each family of operations: its name, its number of lines, and after how many of them the next call was an
    error."""
    found = []
    for family in FAMILIES:
        for index in range(len(family(rank))):
            line, errors = 1, 0
            step = family(rank)[index]
            wanted = step()
            while _raise_at(line, step):
                try:
                    assert _same(step(), wanted), f"{family.__name__} after line {line}"
                except WeaveError as error:
                    assert "an exception ended the call on this rank" in str(error), error
                    errors += 1
                    shm.release("0")
                    step = family(rank)[index]
                    wanted = step()
                line += 1
            shm.release("0")
            found.append((family.__name__, line, errors))
    return found


def test_an_exception_at_any_line_gives_the_group_back() -> None:
    """A signal's handler may raise between any two steps in Python."""
    [found] = run_ranks(run_every_line, 1, timeout_s=240)
    assert len(found) >= len(FAMILIES) and all(lines > 10 for _, lines, _ in found), found
    two_steps = [errors for name, _, errors in found if name in ("_scatter", "_exchange")]
    assert all(two_steps), "these take the group in one native step and give it back in another"
