"""Exported weights of GPUs of one host: an allocation of torch's symmetric memory for each tensor.

Such memory (cuMemCreate) lives until the last process that maps it has unmapped it, so a peer that has ended is still
read; legacy CUDA IPC would leave that undefined. Each tensor is an allocation and a rendezvous by itself, because its
storage has to be its own. What torch's allocator keeps for later cannot serve here, so it is freed before each layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weaveopt.errors import ExportError
from weaveopt.fabrics import symmetric
from weaveopt.fabrics.exported_layer import OpenedLayer, expect_fabric, expect_no_gaps
from weaveopt.fabrics.topology import Payload, Topology, process_group
from weaveopt.records.candidate import Fabric

Tensor = torch.Tensor


class PeerMemory:
    """The transport; see `ExportedMemory`."""

    def __init__(self, known: Topology) -> None:
        self._known = known
        self._layers: list[tuple[Tensor, ...]] = []

    def expect_support(self, tensors: Sequence[Tensor]) -> None:
        expect_fabric(self._known, Fabric.PEER, tensors)
        if torch.cuda.is_current_stream_capturing():
            raise ExportError(
                "weights cannot be moved while a CUDA graph is captured: call weaveopt.share_experts(model), or the "
                "model, before the capture"
            )
        if why := symmetric.failed():
            raise ExportError(why)

    def announced(self) -> Payload:
        return {"rendezvous": symmetric.num_rendezvous()}

    def prepare(self, answers: Sequence[Payload]) -> None:
        symmetric.catch_up(max(int(each["rendezvous"]) for each in answers))

    def move(self, tensors: Sequence[Tensor]) -> None:
        for each in tensors:
            expect_no_gaps(each)
        torch.cuda.empty_cache()
        for each in tensors:
            place = symmetric.allocate(tuple(each.shape), each.stride(), each.dtype, each.device)
            place.copy_(each.detach())
            each.data = place
        self._layers.append(tuple(tensors))

    def moved(self) -> Payload:
        if self._layers:
            torch.cuda.synchronize(self._layers[0][0].device)
        return {}

    def opened(self, answers: Sequence[Payload], timeout_s: float) -> list[OpenedLayer]:
        group = process_group(self._known.group.name)
        # The others wait `timeout_s` for what came of it, so it has to end before.
        limit_s = min(symmetric.RENDEZVOUS_S, timeout_s / 2)
        found = []
        for tensors in self._layers:
            handles = [symmetric.rendezvous(each.detach(), group, limit_s) for each in tensors]
            places = (self._parts(each, handle) for each, handle in zip(tensors, handles, strict=True))
            found.append(OpenedLayer(tuple(places), tuple(handles)))
        return found

    def close(self) -> None:
        return None

    def _parts(self, own: Tensor, handle: symmetric.Handle) -> tuple[Tensor, ...]:
        """All ranks' parts of one tensor."""
        if handle.rank != self._known.group.rank:
            raise ExportError(
                f"torch's symmetric memory says rank {handle.rank} of the group, found {self._known.group.rank}"
            )
        return tuple(
            own.detach()
            if rank == handle.rank
            else handle.get_buffer(rank, (own.numel(),), own.dtype).as_strided(own.shape, own.stride())
            for rank in range(self._known.world)
        )
