"""Which layer's experts are in which slot, and what has to follow what.

A model keeps the experts that its first layer lacks, and has two slots for those of all other layers. A call of layer l
waits for the slot that holds l, computes, marks the slot as free and has the layer after next pulled into it, so that
the pull of layer l + 1 runs concurrently with the experts of layer l and all up to those of l + 1 (DWDP, section 2). A
slot knows what it holds: a call that finds its layer in none, whatever came before, pulls it and is right.

What follows what, of each slot:

    pull into it      after the calls that read what it held (marks by stream), and after the pull before, into any slot
    call that reads   after the pull (`ready`), on the stream of the call
    slot is free      once what that stream has by then is done; another stream's call adds a mark of its own

Calls that run and calls that are captured have slots apart, and every capture begins with slots that hold nothing: a
replay does not know what ran before it. The first capture takes the slots of the calls that ran, once these are done;
the next call that runs gets new ones. Captures that hold calls of one model share its slots, so their replays follow
one another, as those of graphs that share a memory pool do.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from weaveopt.ops.experts.prefetch.ring import Copy

M = TypeVar("M")
"""A point in the work of a GPU."""
B = TypeVar("B")
"""Memory of a slot."""
AHEAD = 2
"""Layers that are pulled ahead: one for each slot."""
MOST_CAPTURES = 64
"""Captures that go on at the same time; what is known of older ones is forgotten."""


class PullEngine(Protocol[M]):
    """Copies of a GPU, and how its streams and they follow one another. Streams are raw ones."""

    def capture_of(self, stream: int) -> int:
        """Identifies the capture that the stream is part of; 0: none."""
        ...

    def mark(self, stream: int) -> M:
        """All that the stream has."""
        ...

    def wait(self, stream: int, mark: M) -> None:
        """Have what the stream gets from here on follow the mark."""
        ...

    def pull(self, stream: int, copies: Sequence[Copy], after: Sequence[M]) -> M:
        """Copy, after these marks; in the capture of the stream, if it is part of one. Returns the end's mark."""
        ...

    def settle(self, marks: Sequence[M]) -> None:
        """Wait on the host until these marks, of no capture, are reached."""
        ...


class _LayerSlot(Generic[M, B]):
    def __init__(self, memory: B) -> None:
        self.memory = memory
        self.held: int | None = None
        self.ready: M | None = None
        self.readers: dict[int, M] = {}

    def marks(self) -> list[M]:
        return [*self.readers.values(), *(() if self.ready is None else (self.ready,))]


class SlotPair(Generic[M, B]):
    """Two slots of the calls that run, or of one capture."""

    def __init__(
        self, engine: PullEngine[M], memory: tuple[B, B], copies_of: Callable[[int, B], Sequence[Copy]]
    ) -> None:
        self.memory = memory
        self._engine, self._copies_of = engine, copies_of
        self._slots = [_LayerSlot[M, B](each) for each in memory]
        self._last: M | None = None
        self._used: list[int] = [0, 1]
        """Slots, the one that was read last at the end."""

    def hold(self, layer: int, stream: int) -> int:
        """The slot that has the layer once the stream's next work runs; pulled now if no slot holds it."""
        at = self._where(layer)
        if at is None:
            at = self._used[0]
            self._fill(at, layer, stream)
        ready = self._slots[at].ready
        assert ready is not None, f"slot {at} holds layer {layer} without a pull"
        self._engine.wait(stream, ready)
        self._used.sort(key=lambda each: each == at)
        return at

    def free(self, at: int, stream: int) -> None:
        """All that the stream has read of the slot so far."""
        self._slots[at].readers[stream] = self._engine.mark(stream)

    def fetch(self, layers: Sequence[int], keep: Sequence[int], stream: int) -> None:
        """Pull layers, in this order, that no slot holds, into slots that hold none of `layers` and `keep`."""
        kept = {*layers, *keep}
        for layer in layers:
            if self._where(layer) is None:
                at = next((each for each in self._used if self._slots[each].held not in kept), None)
                if at is None:
                    return
                self._fill(at, layer, stream)

    def marks(self) -> list[M]:
        """Marks that have to be reached before the memory may be used otherwise."""
        return [mark for slot in self._slots for mark in slot.marks()] + ([] if self._last is None else [self._last])

    def _where(self, layer: int) -> int | None:
        return next((at for at, slot in enumerate(self._slots) if slot.held == layer), None)

    def _fill(self, at: int, layer: int, stream: int) -> None:
        slot = self._slots[at]
        after = slot.marks() + ([] if self._last is None else [self._last])
        slot.held = None  # until the pull is enqueued as a whole
        slot.ready = self._last = self._engine.pull(stream, self._copies_of(layer, slot.memory), after)
        slot.held, slot.readers = layer, {}


class ModelSlots(Generic[M, B]):
    """Slots of the layers of one model on one GPU. Calls of several threads follow one another."""

    def __init__(
        self,
        engine: PullEngine[M],
        num_layers: int,
        first: B,
        allocate: Callable[[], tuple[B, B] | None],
        copies_of: Callable[[int, B], Sequence[Copy]],
    ) -> None:
        """`first` holds layer 0 for good. `allocate` returns memory of two slots; None: there is none left."""
        self._engine, self._num_layers, self._first = engine, num_layers, first
        self._allocate, self._copies_of = allocate, copies_of
        self._running: SlotPair[M, B] | None = None
        self._captured_memory: tuple[B, B] | None = None
        self._captures: OrderedDict[int, SlotPair[M, B]] = OrderedDict()
        self._lock = threading.RLock()

    @contextmanager
    def reading(self, layer: int, stream: int, last: bool = True) -> Iterator[B | None]:
        """Memory with the experts of `layer`, for what the stream gets inside; None: there is no slot, read in place.

        `last`: nobody reads the layer again before the next one, so its slot may be filled anew.
        """
        with self._lock:
            slots = self._slots_of(stream)
            following = [each for each in range(layer + 1, layer + 1 + AHEAD) if each < self._num_layers]
            if slots is None:
                yield self._first if layer == 0 else None
                return
            at = None if layer == 0 else slots.hold(layer, stream)
            slots.fetch(following, [layer], stream)
            try:
                yield self._first if at is None else slots.memory[at]
            finally:
                if at is not None:
                    slots.free(at, stream)
            if last:
                slots.fetch(following, (), stream)

    def close(self) -> None:
        """Wait until nothing uses the memory that was not captured."""
        with self._lock:
            if self._running is not None:
                self._engine.settle(self._running.marks())

    def _slots_of(self, stream: int) -> SlotPair[M, B] | None:
        capture = self._engine.capture_of(stream)
        if capture:
            return self._captured(capture)
        if self._running is None and (memory := self._allocate()) is not None:
            self._running = self._pair(memory)
        return self._running

    def _captured(self, capture: int) -> SlotPair[M, B] | None:
        found = self._captures.get(capture)
        if found is not None:
            return found
        if self._captured_memory is None:
            if self._running is None:
                return None
            self._engine.settle(self._running.marks())
            self._captured_memory, self._running = self._running.memory, None
        found = self._captures[capture] = self._pair(self._captured_memory)
        while len(self._captures) > MOST_CAPTURES:
            self._captures.popitem(last=False)
        return found

    def _pair(self, memory: tuple[B, B]) -> SlotPair[M, B]:
        return SlotPair(self._engine, memory, self._copies_of)
