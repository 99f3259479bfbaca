"""One rank of a case: its process group, its program, and what it says about how that ended."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist
import torch.library

import weaveopt.backend
from tests.faults.case import Case, Mode, Moment, Said
from tests.faults.faults import FAULTS
from tests.faults.injections import INJECTIONS
from tests.faults.programs import Rank, run_program
from weaveopt import _native
from weaveopt.errors import WeaveError
from weaveopt.fabrics import shm
from weaveopt.ops.reduction import replication

NUM_LATER = 2
"""Calls after the one that failed, where errors are caught."""
HOLD_S = 60.0


def rank_program(case: Case, rank: int, port: int, listen_on: int | None, words: int, release: int) -> None:
    """Runs one rank. It writes its messages to `words`, and may end when `release` is closed."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(case.world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(case.world)
    )
    store = dist.TCPStore(
        "127.0.0.1", port, case.world if listen_on is not None else None, is_master=listen_on is not None,
        wait_for_workers=False, timeout=timedelta(seconds=300), master_listen_fd=listen_on,
    )  # fmt: skip
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world, timeout=timedelta(seconds=60))
    dist.barrier()
    os.write(words, json.dumps({"is_ready": True}).encode() + b"\n")
    fault = FAULTS[case.fault]
    this = Rank(case, rank, lambda: None, is_struck=fault.strikes_all or rank == case.victim)

    def inject() -> None:
        os.write(words, json.dumps({"injected_at": time.monotonic()}).encode() + b"\n")
        INJECTIONS[case.fault](this)

    this.inject = inject
    _place_hooks(this)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own_pid = os.getpid()
    said = None
    try:
        run_program(this)
        said = _said(this, None)
    except WeaveError as error:
        said = _said(this, error)
        if not case.catches:
            raise
    except BaseException as error:
        said = _said(this, error)
        raise
    finally:
        if said is not None and os.getpid() == own_pid:  # else a child that the program forked
            os.write(words, json.dumps(asdict(said)).encode() + b"\n")
    if case.catches:
        select.select([release], [], [], HOLD_S)  # until all others have ended or told
    if not said.error:
        dist.destroy_process_group()


def run_rank(case: Case, rank: int, port: int, listen_on: int | None, words: int, release: int) -> None:
    """The whole life of a rank's process. Returns where the interpreter itself is to end it.

    Taking down an interpreter with all of torch in it takes a second, so most ranks only run their `atexit` handlers.
    """
    if case.ends_interpreter:
        rank_program(case, rank, port, listen_on, words, release)
        return
    code = 0
    try:
        rank_program(case, rank, port, listen_on, words, release)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    _keep_operators()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _keep_operators() -> None:
    """Keep torch from taking its operator libraries apart at exit, which would be much of a rank's CPU time."""
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (alive := each.peek()) is not None and alive[1] is torch.library._del_library:
            each.atexit = False


def _said(this: Rank, error: BaseException | None) -> Said:
    ended_at = time.monotonic()
    later = []
    # In pairs a step would be made again with neighbours that have made it already.
    again_makes_sense = this.case.mode is not Mode.PAIRS and this.steps is not None
    if this.case.catches and isinstance(error, WeaveError) and again_makes_sense:
        assert this.steps is not None
        for _ in range(NUM_LATER):
            try:
                this.steps(len(this.digests))
                later.append("no error")
            except Exception as again:
                later.append(_text(again))
    return Said(
        tuple(this.digests), "" if error is None else _text(error), isinstance(error, WeaveError), tuple(later),
        this.began_at, ended_at, _held(),
    )  # fmt: skip


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _held() -> tuple[str, ...]:
    """Open descriptors of shared memory that weaveopt made."""
    found = []
    for descriptor in os.listdir("/proc/self/fd") if _may_open() else ():
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if "weaveopt" in target.rpartition("/")[2] or target.startswith("/dev/shm/#"):
            found.append(target)
    return tuple(found)


def _may_open() -> bool:
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return False
    return True


def _place_hooks(this: Rank) -> None:
    """Has moments inside of weaveopt come by."""

    def before(owner: object, name: str, moment: Moment) -> None:
        inner: Callable[..., object] = getattr(owner, name)

        def outer(*arguments: object, **named: object) -> object:
            this.reach(moment)
            return inner(*arguments, **named)

        setattr(owner, name, outer)

    before(weaveopt.backend, "agree", Moment.COMPILING)
    before(shm, "reserve", Moment.AGREED)
    before(_native.Segment, "open", Moment.MAPPING)
    before(weaveopt.pipeline.bind, "await_peers", Moment.COMPILED)
    before(replication, "compare", Moment.FIRST_CALL)
