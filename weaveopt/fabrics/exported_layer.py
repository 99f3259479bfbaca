"""Transports of exported weights, one for each kind of device: `exported_shm.py`, `exported_peer.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weaveopt.errors import ExportError
from weaveopt.fabrics.topology import Payload, Topology
from weaveopt.records.candidate import Fabric

Tensor = torch.Tensor


@dataclass(frozen=True)
class OpenedLayer:
    """A layer that all ranks have moved, as this rank reads it."""

    places: tuple[tuple[Tensor, ...], ...]
    """For each tensor all ranks' parts, in group order."""
    kept: object = None
    """Owner of the mappings of the peers' parts."""


class ExportedMemory(Protocol):
    """Memory of one call of `share`, on this rank. The other ranks learn of whatever a method raises."""

    def expect_support(self, tensors: Sequence[Tensor]) -> None:
        """Raises `ExportError` if the ranks cannot read each other's memory, or the tensors are elsewhere."""
        ...

    def announced(self) -> Payload:
        """State of this rank that the others need before anything is moved. Never raises."""
        ...

    def prepare(self, answers: Sequence[Payload]) -> None:
        """Called with all ranks' states, before anything is moved."""
        ...

    def move(self, tensors: Sequence[Tensor]) -> None:
        """Give a layer's tensors storage that peers can map, each at its offset 0."""
        ...

    def moved(self) -> Payload:
        """Record of all layers that were moved, by which peers find them. Never raises."""
        ...

    def opened(self, answers: Sequence[Payload], timeout_s: float) -> list[OpenedLayer]:
        """Map the peers' layers; called when all ranks have moved theirs."""
        ...

    def close(self) -> None:
        """Called when all ranks have opened all, or one has failed."""
        ...


def expect_fabric(known: Topology, fabric: Fabric, tensors: Sequence[Tensor]) -> None:
    """Raises `ExportError` if the fabric does not join the group, or tensors are on another kind of device."""
    against = next(reason for each, reason in known.fabrics() if each is fabric)
    if against is not None:
        raise ExportError(against.message)
    devices = {each.device.type for each in tensors}
    if devices - {known.device}:
        raise ExportError(
            f"weights are on {', '.join(sorted(devices))}, expected {known.device}, which the group's ranks "
            "communicate on: move the model there first"
        )


def expect_no_gaps(tensor: Tensor) -> None:
    """Raises `ExportError` if the tensor's elements do not fill its span, in any order of its dimensions."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if span != tensor.numel():
        shape = ", ".join(map(str, tensor.shape))
        raise ExportError(f"a weight [{shape}] has gaps: strides {tensor.stride()}")
