"""Rounds in which the ranks of a group compare the graphs that they compile, through the group's store.

A rank publishes one document for every graph that communicates in the group, and continues; only a rank that needs the
others' documents waits for them. A wait ends when all documents are there, or when a peer turns out to be past this
point: it has begun a rewritten call, or issued a collective, that the waiting rank has not. Such a peer never comes,
and neither does one whose process has ended. Then the round is closed, with the same result for all ranks: whichever of
"complete" and "closed" is stored first counts.

Rounds of different subjects are numbered apart: a rank that skips one subject does not answer for another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import torch.distributed as dist

from weaveopt.errors import AgreementError
from weaveopt.fabrics import positions
from weaveopt.fabrics.positions import Address, Position
from weaveopt.fabrics.stores import bounded

WHAT = "agreement on the plan"
KERNELS = "times of local kernels (option tune_budget_s)"
_COMPLETE = "complete"
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05
_ASK_AFTER_S, _ASK_EVERY_S = 1.0, 2.0
_WORDS_S = 2.0
"""How long an error waits for the last words of the rank that it is about."""


class Why(StrEnum):
    """Reason why a round was closed."""

    PAST = "past"
    """A peer issued collectives beyond this point, none of them in a rewritten graph: the graph is left."""
    RUNS = "runs"
    """A peer is inside a call of a rewritten graph that the closing rank has not made: nothing right can follow."""
    ENDED = "ended"
    """A peer that took part in an earlier round has ended."""
    LATE = "late"
    """A peer did not come in time."""
    DECLINED = "declined"
    """The closing rank has nothing to say about this graph."""


@dataclass(frozen=True)
class Closed:
    """A round that ended before all ranks came."""

    why: Why
    rank: int
    """Global rank that closed it."""
    peers: tuple[int, ...]
    """Global ranks that did not come."""
    skeleton: str
    """Digest of the collectives in the graph of the rank that closed it."""
    reason: str
    """Why that rank compiled its graph, where Dynamo says so."""


class Rounds:
    """The rounds of one process group. `calls` is increased by every call of a graph with rewritten sites of it."""

    def __init__(
        self, name: str, ranks: Sequence[int], index: int, pg: dist.ProcessGroup, store: dist.Store, host: str
    ) -> None:
        """`host`: the address at which the other ranks reach this one."""
        self.calls = 0
        self._name, self._ranks, self._index = name, tuple(ranks), index
        self._pg = weakref.ref(pg)
        self._store, self._host = store, host
        self._next: dict[str, int] = {}
        """Subject -> number of this rank's next round."""
        self._address: Address | None = None
        self._peers: dict[int, Address] = {}
        """Addresses of the other ranks that were read, by index: the store may be gone with a rank."""
        self._reached: set[int] = set()
        """Ranks that answered, by index: at their addresses nothing but their end refuses a connection."""

    @property
    def where(self) -> str:
        return f"group {self._name!r}"

    @property
    def rank(self) -> int:
        """This rank's global number."""
        return self._ranks[self._index]

    def position(self) -> Position:
        pg = self._pg()
        collectives = -1
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            collectives = -1 if pg is None else int(pg._get_sequence_number_for_group())  # type: ignore[attr-defined]
        return Position(self.calls, collectives)

    def publish(self, document: str, skeleton: str, timeout_s: float, what: str = WHAT) -> int | Closed:
        """Stores this rank's document for its next round about `what`, and returns the number of that round.

        A round that another rank closed while it compiled a graph of the same collectives is this graph's: it is
        returned. One that was closed for another graph is passed over. Raises `AgreementError` where the store fails.
        """

        def work() -> int | Closed:
            self._serve()
            while True:
                number = self._next.get(what, 0)
                self._next[what] = number + 1
                closed = self._closed(_place(what, number))
                if closed is None:
                    self._store.set(f"{_place(what, number)}/{self._index}", document)
                    return number
                if closed.skeleton == skeleton:
                    return closed

        return bounded(work, self.where, what, timeout_s)

    def collect(
        self, number: int, skeleton: str, reason: str, timeout_s: float, what: str = WHAT
    ) -> tuple[str, ...] | Closed:
        """Collect all ranks' documents of a round, in group order, or how it was closed. Raises as `publish`."""
        place = _place(what, number)

        def work() -> tuple[str, ...] | Closed:
            found = self._collect(place, skeleton, reason, timeout_s)
            with contextlib.suppress(RuntimeError):  # where the store is gone by now, no rank waits for this one
                self._store.set(f"{place}/{self._index}/read", "")
            return found

        return bounded(work, self.where, what, timeout_s)

    def decline(self, skeleton: str, reason: str, timeout_s: float, what: str = WHAT) -> None:
        """Closes this rank's next round: ranks that compile a graph of the same collectives hear of it, others pass it
        over, so the ranks' numbers stay alike whoever expected the round. Raises as `publish`."""
        word = json.dumps(asdict(Closed(Why.DECLINED, self.rank, (), skeleton, reason)))

        def work() -> None:
            closed = None
            while closed is None or closed.skeleton != skeleton:
                number = self._next.get(what, 0)
                self._next[what] = number + 1
                closed = self._close(_place(what, number), word)

        bounded(work, self.where, what, timeout_s)

    def settle(self, number: int, wait_s: float = 5.0) -> None:
        """Make rank 0, which may host the store, wait until all ranks with a document in a round have read how it
        ended, for ranks that are about to raise because of it."""
        if self.rank != 0:
            return
        documents = [f"{_place(WHAT, number)}/{index}" for index in range(len(self._ranks))]

        def work() -> None:
            deadline = time.monotonic() + wait_s
            keys = [f"{document}/read" for document in documents if self._store.check([document])]
            while time.monotonic() < deadline and not self._store.check(keys):
                time.sleep(_LAST_PAUSE_S)

        with contextlib.suppress(AgreementError):
            bounded(work, self.where, WHAT, wait_s)

    def leave_words(self, text: str) -> None:
        """Stores why this rank ends, for errors of ranks that wait for it."""
        with contextlib.suppress(AgreementError):
            bounded(lambda: self._store.set(f"words/{self._index}", text), self.where, WHAT, _WORDS_S)

    def words_of(self, rank: int) -> str:
        """The last words of the global rank `rank`; empty if it stored none before it ended."""
        if rank not in self._ranks:
            return ""
        key = f"words/{self._ranks.index(rank)}"
        try:
            return bounded(
                lambda: self._store.get(key).decode() if self._store.check([key]) else "", self.where, WHAT, _WORDS_S
            )
        except AgreementError:
            return ""

    def silent(self) -> tuple[int, ...]:
        """Global ranks that have an address and do not answer there: their processes ended, or are stopped."""
        with contextlib.suppress(AgreementError):
            bounded(self._read_peers, self.where, "the addresses of ranks", _WORDS_S)
        return tuple(self._ranks[at] for at, address in self._peers.items() if positions.ask(address) is None)

    def begin_compiling(self) -> None:
        """Counts this rank as one that compiles a graph whose plan was agreed before; `end_compiling` ends it."""
        self._add(1)

    def end_compiling(self) -> None:
        self._add(-1)

    def await_compiling(self, timeout_s: float) -> None:
        """Waits while any rank of the group compiles such a graph, so that its compiler is no timeout of a call."""
        keys = [f"compiling/{index}" for index in range(len(self._ranks))]

        def work() -> None:
            deadline, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
            while time.monotonic() < deadline and any(self._store.add(key, 0) > 0 for key in keys):
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)

        with contextlib.suppress(AgreementError):  # calls have timeouts of their own
            bounded(work, self.where, WHAT, timeout_s)

    def _serve(self) -> None:
        """Serve this process's progress in the group, as long as these rounds live."""
        if self._address is None:
            own = weakref.ref(self)
            self._address = positions.serve(
                self._host, lambda: Position(0, -1) if (rounds := own()) is None else rounds.position()
            )
            weakref.finalize(self, positions.stop, self._address).atexit = False
            if self._address is not None:
                self._store.set(f"address/{self._index}", json.dumps(asdict(self._address)))

    def _read_peers(self) -> None:
        for index in range(len(self._ranks)):
            key = f"address/{index}"
            if index != self._index and index not in self._peers and self._store.check([key]):
                self._peers[index] = Address(**json.loads(self._store.get(key)))

    def _add(self, amount: int) -> None:
        with contextlib.suppress(AgreementError):
            bounded(lambda: self._store.add(f"compiling/{self._index}", amount), self.where, WHAT, _WORDS_S)

    def _closed(self, place: str) -> Closed | None:
        key = f"{place}/settled"
        if not self._store.check([key]):
            return None
        return _parsed(self._store.get(key).decode())

    def _collect(self, place: str, skeleton: str, reason: str, timeout_s: float) -> tuple[str, ...] | Closed:
        keys = [f"{place}/{index}" for index in range(len(self._ranks))]
        began = time.monotonic()
        ask_at, pause = began + _ASK_AFTER_S, _FIRST_PAUSE_S
        while True:
            if self._store.check(keys):
                return self._close(place, _COMPLETE) or self._read(place, keys)
            closed = self._closed(place)
            if closed is not None:
                return closed
            now = time.monotonic()
            missing = [index for index, key in enumerate(keys) if not self._store.check([key])]
            why = None
            if now >= began + timeout_s:
                why = Why.LATE
            elif now >= ask_at and missing:
                why, missing = self._ask(missing)
                ask_at = time.monotonic() + _ASK_EVERY_S
            if why is not None and missing:
                peers = tuple(self._ranks[index] for index in missing)
                record = Closed(why, self.rank, peers, skeleton, reason)
                return self._close(place, json.dumps(asdict(record))) or self._read(place, keys)
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)

    def _close(self, place: str, word: str) -> Closed | None:
        """Settles the round, unless it is settled already; None where it is complete."""
        return _parsed(self._store.compare_set(f"{place}/settled", "", word).decode())

    def _read(self, place: str, keys: Sequence[str]) -> tuple[str, ...]:
        found = tuple(self._store.get(key).decode() for key in keys)
        self._read_peers()
        return found

    def _ask(self, missing: Sequence[int]) -> tuple[Why | None, list[int]]:
        """Ask the missing ranks how far they are: why none of them will come, and which ones; None if they may."""
        own = self.position()
        answers: dict[int, Position] = {}
        self._read_peers()
        for index in missing:
            if index in self._peers and (found := positions.ask(self._peers[index])) is not None:
                answers[index] = found
                self._reached.add(index)
        ended = [index for index in missing if index in self._peers and index not in answers and self._has_ended(index)]
        if ended:
            return Why.ENDED, ended
        running = [index for index, theirs in answers.items() if theirs.calls > own.calls]
        if running:
            return Why.RUNS, running
        past = [index for index, theirs in answers.items() if theirs.collectives > own.collectives >= 0]
        return (Why.PAST if past else None), past

    def _has_ended(self, index: int) -> bool:
        """True if the rank's process has ended, as far as is known: between hosts a firewall may refuse
        connections, so only where the rank was reached before."""
        address = self._peers[index]
        return (index in self._reached or address.host == self._host) and positions.has_ended(address)


def digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _place(what: str, number: int) -> str:
    """The prefix of a round's records in the store."""
    return f"round/{what}/{number}"


def _parsed(word: str) -> Closed | None:
    if word == _COMPLETE:
        return None
    record = json.loads(word)
    return Closed(Why(record.pop("why")), peers=tuple(record.pop("peers")), **record)
