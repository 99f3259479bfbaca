"""Decode loop that launches steps without waiting for their results, and reads stop flags as they arrive.

    step -> copy of (tokens, any unfinished) to pinned memory -> event -> the host looks, some steps late -> the sink

The sink gets tokens in order and none beyond the stop; steps that were launched beyond it have changed nothing that
anybody sees. On the host's own processor nothing is late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from weaveopt.errors import WeaveError
from weaveopt.fabrics import watchdog

MAX_AHEAD = 8
"""Steps in flight at most. A ring of keys has room for more (`layers.SPARE_SLOTS`)."""
FIRST_AHEAD = 2
AHEAD_TOGETHER = 3
"""Steps in flight where ranks wait for one another inside of steps: a number that no rank changes by itself."""
SPINS = 400
"""Looks at an event, about a microsecond each, before the host sleeps between looks."""
SLEEP_S = 2e-5


class Event(Protocol):
    """Methods of `torch.cuda.Event` that the loop uses."""

    def record(self) -> object: ...
    def query(self) -> bool: ...


Sink = Callable[[Tensor], None]
"""Takes `[batch]` tokens, in host memory; they change after the call."""


@dataclass
class HostOutputs:
    """Pinned buffers for the results of steps, each with the event after its copy; no events if nothing is late."""

    places: list[Tensor]
    events: Sequence[Event]

    @staticmethod
    def make(step_output: Tensor) -> HostOutputs:
        on_gpu = step_output.is_cuda
        places = [
            torch.zeros(step_output.shape, dtype=step_output.dtype, device="cpu", pin_memory=on_gpu)
            for _ in range(MAX_AHEAD + 1)
        ]
        return HostOutputs(places, [torch.cuda.Event() for _ in places] if on_gpu else [])


@dataclass
class Ahead:
    """Number of steps that the host runs ahead: as few as keep the GPU busy, since steps beyond the stop are wasted."""

    limit: int = FIRST_AHEAD

    def starved(self) -> None:
        """Run further ahead, as everything launched had ended before the host came back."""
        self.limit = min(self.limit + 1, MAX_AHEAD)


@dataclass
class Outcome:
    """Result of a loop: how many tokens and steps it ran, and its times."""

    num_tokens: int = 0
    """Tokens of each sequence that count, the prefill's first one included."""
    num_steps: int = 0
    num_replays: int = 0
    loop_us: float = 0.0
    step_us: float = 0.0


@dataclass
class DecodeLoop:
    """Steps of one call. `step_output` holds the results of each of them: `[batch + 1]` int64."""

    step_output: Tensor
    places: HostOutputs
    sink: Sink
    max_tokens: int
    together: bool = False
    """True if other ranks take the same steps: all then launch equally many, whenever each of them sees the stop."""
    outcome: Outcome = field(default_factory=Outcome)

    def run(self, step: Callable[[], bool], after_launch: Callable[[], None]) -> Outcome:
        """Run the loop; `step_output` holds the prefill's token already. `step` launches one more step and returns true
        if it was a replay.

        Raises `PeerTimeoutError` where a step waited for a peer in vain.
        """
        ahead, pending = Ahead(AHEAD_TOGETHER if self.together else FIRST_AHEAD), deque[int]()
        begin = time.perf_counter()
        launched, stopped = 1, False
        self._send(0, pending)
        after_launch()
        while not stopped:
            while pending and not stopped and self._is_ready(pending, ahead, more=launched < self.max_tokens):
                stopped = self._look(pending)
            if stopped or launched == self.max_tokens:
                break
            if not pending and self.places.events and not self.together:
                ahead.starved()
            self._launch(step)
            self._send(launched % len(self.places.places), pending)
            after_launch()
            launched += 1
        # The slowest rank to look may have launched so many: its steps wait for those of the others.
        last = self.outcome.num_tokens + ahead.limit - 1 if self.together and self.places.events else launched
        while launched < min(last, self.max_tokens):
            self._launch(step)
            launched += 1
        self.outcome.num_steps = launched - 1
        self.outcome.loop_us = (time.perf_counter() - begin) * 1e6
        return self.outcome

    def _launch(self, step: Callable[[], bool]) -> None:
        begin = time.perf_counter()
        try:
            self.outcome.num_replays += step()
        except RuntimeError as error:
            _raise(error)
        if not self.step_output.is_cuda:
            self.outcome.step_us += (time.perf_counter() - begin) * 1e6

    def _send(self, place: int, pending: deque[int]) -> None:
        self.places.places[place].copy_(self.step_output, non_blocking=True)
        if self.places.events:
            self.places.events[place].record()
        pending.append(place)

    def _is_ready(self, pending: deque[int], ahead: Ahead, more: bool) -> bool:
        """True if the oldest step's tokens have arrived; waits for them if there is nothing else to launch."""
        if not self.places.events:
            return True
        event = self.places.events[pending[0]]
        if more and len(pending) < ahead.limit:
            return _query(event)
        _wait(event)
        return True

    def _look(self, pending: deque[int]) -> bool:
        """Pass the oldest step's tokens to the sink; true if they are the last ones."""
        step_output = self.places.places[pending.popleft()]
        self.outcome.num_tokens += 1
        self.sink(step_output[:-1])
        return not int(step_output[-1]) or self.outcome.num_tokens == self.max_tokens


def _wait(event: Event) -> None:
    """Polls: between two looks an error that the watchdog raises in this thread gets through."""
    spins = 0
    while not _query(event):
        spins += 1
        if spins > SPINS:
            time.sleep(SLEEP_S)


def _query(event: Event) -> bool:
    try:
        return event.query()
    except RuntimeError as error:
        _raise(error)


def _raise(error: RuntimeError) -> NoReturn:
    """Raise the error that a kernel reported before it gave up, in place of the CUDA error that follows from it."""
    if not isinstance(error, WeaveError):
        watchdog.raise_said(error)
    raise error
