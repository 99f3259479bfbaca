"""Every fault: how it is injected, when it may strike, and what must follow."""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from tests.faults.case import COMPILE_ONLY, MEETINGS, Case, Mode, Moment
from tests.faults.sayings import Saying

SHORT_S, LONG_S = 2.5, 20.0
"""Timeouts of cases in which somebody has to wait until it passes, and of the others: there, waiting is found out."""
COMPILE_SHORT_S, COMPILE_LONG_S = 4.0, 40.0
AT_ONCE_S = 5.0
"""Far above what hearing at once takes on a busy host, and far below the timeout."""
COMPILES_S = 20.0
"""The same where compiling is part of what is measured."""
SLACK_S = 6.0
"""Slack of a busy host, beyond a timeout."""
STORE_ANSWERS_S = 5.0
"""Time that a store has beyond a timeout."""
BRIEF_S = 0.3
START_UP_S = 30.0

RIGHT = frozenset({Saying.RIGHT})
HEARD = frozenset({Saying.EXITED, Saying.OTHER_EXITED, Saying.GAVE_UP})
WAITED = frozenset({Saying.LATE, Saying.GAVE_UP, Saying.OTHER_EXITED})
ABSENT = frozenset({Saying.ABSENT})
CAME_BACK = frozenset({Saying.GAVE_UP, Saying.OTHER_EXITED, Saying.OTHER_LATE, Saying.OTHERS_ABSENT, Saying.CLOSED})


@dataclass(frozen=True)
class Expected:
    """Outcome that must follow from a case."""

    others: frozenset[Saying]
    victim: frozenset[Saying] | None
    """None: it ends with one of `codes`, whatever it said."""
    codes: tuple[int | None, ...] = ()
    """None: it is still stopped."""
    waits_s: float = 0.0
    """Seconds that a rank may wait, slack included; 0: none has to."""
    compiles: bool = False
    """True if a rank compiles before the fault is found."""

    def limit_s(self, case: Case) -> float:
        """Between the fault, or the begin of the step that failed if that came later, and the error."""
        at_once = AT_ONCE_S if case.moment in (Moment.BETWEEN, Moment.WITHIN) and not self.compiles else COMPILES_S
        return self.waits_s or at_once


Modes = tuple[Mode, ...]
COMPILED: Modes = (Mode.GRAPH, Mode.REGIONS)
MOST: Modes = (Mode.EAGER, *COMPILED)
STRUCK_AT: tuple[Moment, ...] = tuple(moment for moment in Moment if moment is not Moment.ANY)


@dataclass(frozen=True)
class Fault:
    """One way to fail. `tests.faults.injections` does what `how` says."""

    how: str
    expect: Callable[[Case], Expected]
    moments: tuple[Moment, ...] = (Moment.START,)
    modes: Modes = MOST
    strikes_all: bool = False
    """All ranks do something when the moment comes, and not the victim alone."""
    signal: int = 0
    """Signal that the supervisor sends, at any moment."""
    stop_s: float = inf
    """How long a rank stays stopped."""
    stops_until_told: bool = False
    """True if a rank stays stopped until the others have reported their end."""

    def fits(self, mode: Mode, moment: Moment) -> bool:
        """True if the fault can strike in this mode at this moment."""
        if mode is Mode.PAIRS and moment not in (Moment.BETWEEN, Moment.WITHIN):
            return False
        return mode in self.modes and moment in self.moments and (mode in COMPILED or moment not in COMPILE_ONLY)

    def deadline_s(self, case: Case) -> float:
        """After which ranks count as hung."""
        return START_UP_S + 2 * (case.compile_timeout_s + case.timeout_s)


def timeout_of(case: Case) -> float:
    """Timeout in seconds of the peers that wait for the struck rank at the case's moment."""
    if case.moment is Moment.ANY:
        return case.compile_timeout_s + case.timeout_s
    return case.compile_timeout_s if case.moment in MEETINGS else case.timeout_s


def gone(*codes: int) -> Callable[[Case], Expected]:
    """The rank is gone, by itself or not."""

    def expect(case: Case) -> Expected:
        absent = ABSENT | ({Saying.STORE_LOST} if case.store_on_rank and case.victim == 0 else set())
        if case.moment is Moment.EXIT:
            return Expected(RIGHT, None, codes)
        if case.moment is Moment.ANY:
            return Expected(RIGHT | HEARD | absent | {Saying.GONE}, None, (*codes, 0), timeout_of(case) + SLACK_S)
        if case.mode is Mode.PAIRS and case.catches:
            # Whoever waits for a survivor that caught the error and stays waits for as long as it may.
            return Expected(HEARD | {Saying.OTHER_LATE}, None, codes, case.timeout_s + SLACK_S)
        if case.moment in (Moment.BETWEEN, Moment.WITHIN):
            return Expected(HEARD, None, codes)
        return Expected(absent, None, codes, timeout_of(case) + SLACK_S)

    return expect


def stopped(case: Case, victim: frozenset[Saying] | None = None) -> Expected:
    """The rank is there and does nothing."""
    has_store = case.store_on_rank and case.victim == 0
    waits_s = timeout_of(case) + SLACK_S + (STORE_ANSWERS_S if has_store else 0.0)
    absent = ABSENT | ({Saying.STORE_SILENT} if has_store else set())
    if case.moment is Moment.EXIT:
        return Expected(RIGHT, None if victim is None else RIGHT, (None,))
    if case.moment is Moment.ANY:
        return Expected(RIGHT | WAITED | absent, None if victim is None else victim | RIGHT, (None, 0), waits_s)
    if case.moment in (Moment.BETWEEN, Moment.WITHIN):
        # Whoever waits for a survivor alone does so for as long as that one.
        waited = WAITED | {Saying.OTHER_LATE} if case.mode is Mode.PAIRS else WAITED
        return Expected(waited, victim, (None,), waits_s)
    return Expected(absent, victim, (None,), waits_s)


def stopped_for_long(case: Case) -> Expected:
    """Its peers have given up when it goes on."""
    lost = {Saying.STORE_LOST, Saying.STORE_SILENT} if case.store_on_rank else set()
    # Programs that caught a failed meeting before the first call went on, and are at another call now.
    elsewhere = {Saying.CALLS_DIFFER} if case.catches else set()
    return stopped(case, CAME_BACK | lost | elsewhere)


def all_say(*sayings: Saying) -> Callable[[Case], Expected]:
    return lambda case: Expected(frozenset(sayings), frozenset(sayings))


def calls_differ(case: Case) -> Expected:
    if case.mode in COMPILED:
        return one_graph_more(case)
    allowed = frozenset({Saying.CALLS_DIFFER, Saying.GAVE_UP, Saying.OTHER_EXITED})
    if case.mode is Mode.PAIRS and case.catches:
        allowed |= {Saying.OTHER_LATE}
    return Expected(allowed, allowed, (), case.timeout_s + SLACK_S if case.mode is Mode.PAIRS else 0.0)


def without_arena(saying: Saying) -> Callable[[Case], Expected]:
    """A program that reserves an arena itself gets an error; a compiled model runs without one."""
    return lambda case: Expected(*[frozenset({saying}) if case.mode is Mode.EAGER else RIGHT] * 2)


def one_graph_more(case: Case) -> Expected:
    """The rank compiles a graph that its peers, which are in a call of one that was compiled before, never compile."""
    others = frozenset({Saying.GAVE_UP, Saying.GAVE_UP_ALONE, Saying.OTHER_EXITED})
    return Expected(others, frozenset({Saying.ALONE}), compiles=True)


def other_residual(case: Case) -> Expected:
    """Each rank adds its own, where no rank reads only its rows of a sum that another one made."""
    if case.mode is Mode.GRAPH:
        return Expected(*[frozenset({Saying.RESIDUAL_DIFFERS})] * 2)
    return harmless(case)


def harmless(case: Case) -> Expected:
    return Expected(RIGHT, RIGHT)


_ALWAYS = (*STRUCK_AT, Moment.ANY)
_CALLS = (Moment.FIRST_CALL, Moment.BETWEEN, Moment.WITHIN)
_EVERY_MODE = (*MOST, Mode.PAIRS)

FAULTS: Mapping[str, Fault] = MappingProxyType({
    "killed": Fault("SIGKILL", gone(-signals.SIGKILL), _ALWAYS, _EVERY_MODE, signal=signals.SIGKILL),
    "terminated": Fault("SIGTERM", gone(-signals.SIGTERM), _ALWAYS, _EVERY_MODE, signal=signals.SIGTERM),
    "interrupted": Fault("SIGINT: KeyboardInterrupt", gone(-signals.SIGINT), (*_CALLS, Moment.EXIT)),
    "raises": Fault("an exception of the program, that is not caught", gone(1),
                    (Moment.START, *_CALLS[:2], Moment.EXIT), _EVERY_MODE),
    "leaves": Fault("`sys.exit(0)`", gone(0), (Moment.START, Moment.BETWEEN), _EVERY_MODE),
    "never comes": Fault("sleeps for longer than `compile_timeout_s`", gone(0)),
    "stopped": Fault("SIGSTOP, for good", stopped, _ALWAYS, _EVERY_MODE, signal=signals.SIGSTOP),
    "stopped for long": Fault("SIGSTOP; SIGCONT when the others have given up", stopped_for_long, _ALWAYS,
                              signal=signals.SIGSTOP, stops_until_told=True),
    "stopped for a moment": Fault(f"SIGSTOP; SIGCONT after {BRIEF_S:g} s", harmless, _ALWAYS, _EVERY_MODE,
                                  signal=signals.SIGSTOP, stop_s=BRIEF_S),
    "no descriptors": Fault("all descriptors that RLIMIT_NOFILE allows are open", harmless, (Moment.BETWEEN,)),
    "no descriptors to bind": Fault("the same while the arena is made", without_arena(Saying.NO_DESCRIPTORS),
                                    (Moment.AGREED,)),
    "no descriptors, a peer killed": Fault("the same on all survivors; SIGKILL to their peer", gone(-signals.SIGKILL),
                                           (Moment.BETWEEN,), strikes_all=True),
    "files limited": Fault("RLIMIT_FSIZE of one page while the arena is made", without_arena(Saying.TOO_LARGE),
                           (Moment.AGREED,)),
    "no shared memory": Fault("the system refuses `fallocate` with ENOSPC, as a full /dev/shm does",
                              without_arena(Saying.NO_SPACE), (Moment.AGREED,)),
    "no memfd": Fault("the system refuses `memfd_create`", harmless, (Moment.AGREED,)),
    "no shared memory, no memfd": Fault("both", without_arena(Saying.NO_SPACE), (Moment.AGREED,)),
    "memory limited": Fault("a control group (made-up files) that leaves less than the arena takes",
                            without_arena(Saying.NO_MEMORY), (Moment.AGREED,)),
    "memory hidden": Fault("PR_SET_DUMPABLE 0; peers without CAP_SYS_PTRACE: /proc/<pid>/fd cannot be opened",
                           without_arena(Saying.NOT_MAPPED), strikes_all=True),
    "no pidfd, a peer killed": Fault("the system refuses `pidfd_open` to all survivors; SIGKILL to their peer",
                                     lambda case: Expected(HEARD, None, (-signals.SIGKILL,)), strikes_all=True),
    "killed while making memory": Fault("SIGSYS at the `unlink` of a shared file, if there is one",
                                        harmless, (Moment.AGREED,), (Mode.EAGER,)),
    "forked child, _exit": Fault("`os.fork()`; the child calls `os._exit(0)`", harmless, (Moment.BETWEEN,),
                                 _EVERY_MODE),
    "forked child, sys.exit": Fault("`os.fork()`; the child calls `sys.exit(0)`: its `atexit` handlers run", harmless,
                                    (Moment.BETWEEN,), _EVERY_MODE),
    "other options": Fault("another `max_tokens`", all_say(Saying.OPTION_DIFFERS), modes=COMPILED),
    "other version": Fault("another `weaveopt.__version__`", all_say(Saying.VERSION_DIFFERS), modes=COMPILED),
    "other profile": Fault("a profile of the same name with another constant", all_say(Saying.PROFILE_DIFFERS),
                           modes=COMPILED),
    "other model": Fault("another norm: another plan", harmless, modes=COMPILED),
    "a step fails": Fault("the step `plan` raises", harmless, modes=COMPILED),
    "one graph more": Fault("one more layer, compiled separately", one_graph_more, modes=(Mode.REGIONS,)),
    "other token count": Fault("one more token than its peers", calls_differ, (Moment.BETWEEN,), _EVERY_MODE),
    "other rendezvous": Fault("reserves a larger arena, which its peers do not", all_say(Saying.MEETINGS_DIFFER),
                           (Moment.FIRST_CALL,), (Mode.EAGER,)),
    "other residual": Fault("another residual than its peers", other_residual),
    "group destroyed": Fault("`destroy_process_group()` on all ranks, then a call",
                             all_say(Saying.NO_ARENA, Saying.NO_GROUP), (Moment.BETWEEN,), strikes_all=True),
    "group made again": Fault("`destroy_process_group()`, then a group of the same name, and the program anew",
                              harmless, (Moment.BETWEEN,), strikes_all=True),
    "compiled code collected": Fault("the compiled functions are garbage; the program compiles anew", harmless,
                                     (Moment.BETWEEN,), strikes_all=True),
    "second thread": Fault("a second thread makes the call that the main thread waits in; it alone gets the error",
                           harmless, (Moment.WITHIN,), (Mode.EAGER, Mode.GRAPH)),
})  # fmt: skip


def timeouts(fault: str, moment: Moment, mode: Mode, catches: bool) -> tuple[float, float]:
    """`timeout_s` and `compile_timeout_s` of a case: short where somebody has to wait until one passes."""
    expect = FAULTS[fault].expect
    is_gone = fault in ("killed", "terminated", "interrupted", "raises", "leaves", "never comes")
    stays_behind = (is_gone or expect is calls_differ) and mode is Mode.PAIRS and catches
    if expect in (stopped, stopped_for_long) or is_gone:
        at_calls = moment in (Moment.BETWEEN, Moment.WITHIN)
        timeout_s = LONG_S if is_gone and at_calls and not stays_behind else SHORT_S
        return timeout_s, COMPILE_LONG_S if at_calls else COMPILE_SHORT_S
    return SHORT_S if stays_behind else LONG_S, COMPILE_LONG_S
