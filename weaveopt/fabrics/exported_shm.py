"""Exported weights of CPU ranks: a segment of shared memory without a name for each layer."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weaveopt.errors import ExportError
from weaveopt.fabrics.exported_layer import OpenedLayer, expect_fabric, expect_no_gaps
from weaveopt.fabrics.topology import Payload, Topology
from weaveopt.records.candidate import Fabric
from weaveopt.solver.placement import aligned

try:
    from weaveopt import _native
except ImportError:  # built without it: move() says so
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor
_ALIGNMENT = 64
_FIRST_EPOCH = 0


@dataclass(frozen=True)
class _Moved:
    """A layer in this rank's own segment."""

    segment: _native.Segment
    cookie: int
    tensors: tuple[Tensor, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        return _offsets(self.tensors)

    @property
    def num_bytes(self) -> int:
        return max(self.offsets[-1], 1)

    def placed_in(self, segment: _native.Segment) -> tuple[Tensor, ...]:
        """Tensors of this layer's form in a segment of its layout."""
        # A storage each: tracers take tensors that share one for views of each other.
        return tuple(
            torch.frombuffer(segment, dtype=each.dtype, count=each.numel(), offset=offset).as_strided(
                each.shape, each.stride()
            )
            for offset, each in zip(self.offsets, self.tensors, strict=False)
        )


def _offsets(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Offset of each tensor, and the end of the last one."""
    found = [0]
    for each in tensors:
        found.append(found[-1] + aligned(each.nbytes, _ALIGNMENT))
    return tuple(found)


class ShmMemory:
    """The transport; see `ExportedMemory`. Descriptors stay open until all ranks have opened the segments."""

    def __init__(self, known: Topology) -> None:
        self._known = known
        self._layers: list[_Moved] = []

    def expect_support(self, tensors: Sequence[Tensor]) -> None:
        expect_fabric(self._known, Fabric.SHM, tensors)

    def announced(self) -> Payload:
        return {}

    def prepare(self, answers: Sequence[Payload]) -> None:
        if _native is None:
            raise ExportError("weaveopt was installed without its native part")

    def move(self, tensors: Sequence[Tensor]) -> None:
        for each in tensors:
            expect_no_gaps(each)
        cookie = secrets.randbits(63)
        segment = _native.Segment.create(max(_offsets(tensors)[-1], 1), cookie, _FIRST_EPOCH, self._known.world)
        made = _Moved(segment, cookie, tuple(tensors))
        self._layers.append(made)
        for each, place in zip(tensors, made.placed_in(segment), strict=True):
            place.copy_(each.detach())
            each.data = place

    def moved(self) -> Payload:
        return {"pid": os.getpid(), "segments": json.dumps([[each.segment.fd, each.cookie] for each in self._layers])}

    def opened(self, answers: Sequence[Payload], timeout_s: float) -> list[OpenedLayer]:
        found, segments = [], [json.loads(str(each["segments"])) for each in answers]
        for index, own in enumerate(self._layers):
            by_rank = []
            for peer, record in enumerate(answers):
                if peer == self._known.group.rank:
                    by_rank.append(tuple(each.detach() for each in own.tensors))
                    continue
                fd, cookie = segments[peer][index]
                segment = _native.Segment.open(int(record["pid"]), fd, cookie, own.num_bytes)
                by_rank.append(own.placed_in(segment))
            found.append(OpenedLayer(tuple(zip(*by_rank, strict=True))))
        return found

    def close(self) -> None:
        for each in self._layers:
            each.segment.close_fd()
