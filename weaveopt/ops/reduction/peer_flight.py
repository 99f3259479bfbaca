"""`all_reduce_norm_begin` on GPUs: the kernels run on the group's communication stream while others run on the current.

`csrc/fabric/side_stream.h` says what orders memory between the two streams, `csrc/fabric/call.cuh` between ranks: the
begun calls of a group are those of one stream, on a channel that has buffers of its own (`weaveopt.ops.reduction.
buffers`), so calls in line and calls in flight share no memory that peers write.

Kernels of two branches of a CUDA graph have neither a promised order nor promised concurrency, and kernels that wait
for peers need all of their CTAs resident at once. So whatever waits for a peer while other work runs is on the one
communication stream of its group, in one order on all ranks.

A call is begun by one event that is recorded on the current stream and one wait of the communication stream, and ended
by one wait of the current stream: no synchronization with the host, and no allocation but of results, and of operands
in another layout, on the current stream. So both can be captured in a CUDA graph, where they are a fork and a join. The
flight keeps what the kernels use until its end, as the allocator accounts for the current stream only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import ClassVar

import torch

from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.host import HostReduction
from weaveopt.ops.reduction.in_flight import no_scale
from weaveopt.ops.reduction.launches import Piece, Prepared
from weaveopt.ops.reduction.nvshmem import NvshmemSite
from weaveopt.ops.reduction.operands import EpilogueOperands, QuantResults
from weaveopt.ops.reduction.peer import PeerReduction

try:
    from weaveopt import _native
except ImportError:  # built without it: the site is not bound then
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor


@cache
def communication_stream(group: str, device: int) -> _native.SideStream:
    """The stream of `group` on a GPU on which its begun calls run; made before any capture, when its first call is
    bound."""
    return _native.SideStream(device)


class PeerFlight:
    """A call whose kernels were launched on the communication stream."""

    __slots__ = ("_crossing", "_prepared", "_site", "results")

    def __init__(self, site: PeerReduction, crossing: _native.StreamCrossing, prepared: Prepared) -> None:
        self._site, self._crossing, self._prepared = site, crossing, prepared
        normalized, total, row_scale = prepared.results
        self.results: QuantResults = (normalized, total, no_scale(total) if row_scale is None else row_scale)

    def end(self) -> None:
        with _current(self._site.device) as stream:
            self._site.check_launch(self._crossing.join(stream))


class PeerStarter:
    """One site, ready to be begun."""

    __slots__ = ("_crossing", "_site", "_stream")
    SITE: ClassVar[type[PeerReduction]] = PeerReduction

    def __init__(self, call: ReductionCall, site: PeerReduction) -> None:
        self._site = site
        self._stream = communication_stream(call.group, site.device)
        self._crossing = _native.StreamCrossing(self._stream)

    @classmethod
    def bind(cls, call: ReductionCall, text: str, op: str, forget: Callable[[], None]) -> PeerStarter:
        """`call`, encoded as `text`, in the arena that its group has now; `forget` runs when that one goes.

        Raises `ArenaError` as `PeerReduction.bind` does.
        """
        return cls(call, cls.SITE.bind(call, text, op, forget))

    def start(self, partial: Tensor, operands: EpilogueOperands) -> PeerFlight | None:
        """Launch the call's kernels on the communication stream. None: the library has to run, and runs after all calls
        in flight: its kernel and one of theirs could keep each other from starting."""
        site = self._site
        tokens = partial.numel() // site.hidden
        pieces = site.begin(tokens)
        prepared = None
        if pieces:
            prepared = site.prepare(site.activation(partial, tokens, "partial"), operands, pieces, tokens)
        with _current(site.device) as stream:
            site.check_launch(self._crossing.fork(stream))
            try:
                if prepared is not None and tokens:
                    self._launch(prepared, pieces)
            except BaseException:
                self._return_to(stream)  # a capture has to find every stream that it drew in
                raise
            if prepared is None:
                self._return_to(stream)
                return None
            site.check_launch(self._crossing.launched())
        return PeerFlight(site, self._crossing, prepared)

    def _launch(self, prepared: Prepared, pieces: Sequence[Piece]) -> None:
        if not any(piece.launch.in_place for piece in pieces):
            for piece in pieces:
                self._site.launch_piece(prepared, piece, self._stream.handle)
            return
        # The copy into the arena is torch's, and on the stream of the kernel that reads it.
        with torch.cuda.stream(torch.cuda.ExternalStream(self._stream.handle, self._stream.device)):
            for piece in pieces:
                self._site.launch_piece(prepared, piece, self._stream.handle)

    def _return_to(self, stream: int) -> None:
        """Have `stream` wait for all that the communication stream has."""
        self._crossing.launched()
        self._crossing.join(stream)


class HostStarter(PeerStarter):
    """The same through memory of the host."""

    __slots__ = ()
    SITE: ClassVar[type[PeerReduction]] = HostReduction


class NvshmemStarter(PeerStarter):
    """The same among GPUs of several hosts."""

    __slots__ = ()
    SITE: ClassVar[type[PeerReduction]] = NvshmemSite


@contextmanager
def _current(device: int) -> Iterator[int]:
    """The raw current stream of `device`, which is the current device inside."""
    before = torch.cuda._exchange_device(device)
    try:
        yield torch._C._cuda_getCurrentRawStream(device)
    finally:
        torch.cuda._maybe_exchange_device(before)
