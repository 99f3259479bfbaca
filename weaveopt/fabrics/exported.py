"""Weights that peers may read: every rank moves tensors of its own into memory that the others map.

`share` moves the registered tensors of a group, a layer at a time (the peak is one layer more), into memory that peers
map; addresses are exchanged through the group's store, once. Tensors keep their identity: only their storage is another
one. The memory is no part of an arena, which is replaced when it grows, and lives until the last process that maps it
has ended, so a rank that is gone is still read. CPU ranks have segments without a name (`exported_shm.py`), GPUs have
torch's symmetric memory (`exported_peer.py`). Ranks of one host only: see `unsupported`.

The owner stores its weights plainly, in `share`, and its device has completed that before it puts its record into the
store; peers read after they have the record. Nobody stores to them again: who changes them in place fences it.

Nobody waits for anybody after `share`.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from weaveopt.errors import ExportError, WeaveError
from weaveopt.fabrics import topology as topologies
from weaveopt.fabrics.exported_layer import ExportedMemory, OpenedLayer
from weaveopt.fabrics.exported_peer import PeerMemory
from weaveopt.fabrics.exported_shm import ShmMemory
from weaveopt.fabrics.lasting import lasting_tensors
from weaveopt.fabrics.topology import Payload, Topology, process_group
from weaveopt.records.candidate import Fabric, Rejection

Tensor = torch.Tensor
WHAT = "weights that peers read"
AGAIN = "call weaveopt.share_experts(model) again on all ranks"
_TRANSPORTS: dict[Fabric, Callable[[Topology], ExportedMemory]] = {Fabric.SHM: ShmMemory, Fabric.PEER: PeerMemory}
_SMALL_DIMS = 2
"""Dimensions of a tensor of which every rank keeps all parts in one, as of biases [experts, N]."""


class Exporter(Protocol):
    """A layer whose tensors peers may read."""

    def exported(self) -> tuple[Tensor, ...]:
        """Tensors of this rank, in the same order on every rank. They are plain and own their storage."""
        ...

    def moved(self) -> None:
        """Called when these tensors have another storage, in which each begins at offset 0."""
        ...


def unsupported(fabric: Fabric) -> Rejection | None:
    """Reason why no weights can be exported on `fabric`; None if they can."""
    if fabric in _TRANSPORTS:
        return None
    message = "weights are exported between ranks of one host: in shared memory, or between GPUs with peer access"
    return Rejection("not_supported", message, (("fabric", fabric.value),))


class Attachment(Protocol):
    """Copies of peers' weights that a reader keeps of a model."""

    def close(self) -> None:
        """Called before the mappings that they were copied from go, and their own memory with them."""
        ...


@dataclass(eq=False)
class SharedLayer:
    """One registered layer."""

    exporter: weakref.ReferenceType[Exporter]
    model: object
    """Object that the layers of one model have in common."""
    addresses: tuple[int, ...] = ()
    """Addresses of this rank's tensors when they were shared; none before."""
    places: tuple[tuple[Tensor, ...], ...] = ()
    """For each tensor all ranks' parts, in group order."""
    copies: dict[int, Tensor] = field(default_factory=dict)
    """All ranks' parts in one tensor, by position of the tensor, where they were asked for so."""
    kept: object = None
    """Owner of the mappings of the peers' parts."""
    attached: dict[object, Attachment | None] = field(default_factory=dict)
    """Copies that readers keep of the layer's model, by a key of theirs; None: they tried."""

    def tensors(self) -> tuple[Tensor, ...]:
        exporter = self.exporter()
        return () if exporter is None else exporter.exported()

    def record(self) -> list[object]:
        """State for the comparison between ranks: none if the layer is gone, else whether it is in place, and form."""
        found = self.tensors()
        if not found:
            return []
        in_place = self.addresses == tuple(each.data_ptr() for each in found)
        return [in_place, *([list(each.shape), list(each.stride()), str(each.dtype)] for each in found)]


@dataclass
class _Exports:
    """Registered layers of one process group."""

    process_group: weakref.ReferenceType[dist.ProcessGroup]
    layers: list[SharedLayer] = field(default_factory=list)
    by_address: dict[int, tuple[SharedLayer, int]] = field(default_factory=dict)
    refused: str = ""
    """Why the weights could not be shared, the same on all ranks."""

    def layers_with(self, layer: SharedLayer) -> list[SharedLayer]:
        """Layers of its model, in order."""
        return [each for each in self.layers if each.model is layer.model]

    def forget(self, layer: SharedLayer) -> None:
        """Drop the mappings of a layer, before its addresses can be those of other tensors, and copies of its model."""
        for each in self.layers_with(layer):
            for attachment in each.attached.values():
                if attachment is not None:
                    attachment.close()
        for each in self.layers_with(layer):
            each.attached.clear()
        for address in layer.addresses:
            self.by_address.pop(address, None)
        layer.addresses, layer.places, layer.kept = (), (), None
        layer.copies.clear()


_exports: dict[str, _Exports] = {}


def _of(group_name: str) -> _Exports:
    pg, found = process_group(group_name), _exports.get(group_name)
    if found is None or found.process_group() is not pg:
        found = _exports[group_name] = _Exports(weakref.ref(pg))
        weakref.finalize(pg, _close, found).atexit = False
    return found


def _close(exports: _Exports) -> None:
    for layer in exports.layers:
        exports.forget(layer)


def register(group_name: str, exporter: Exporter, model: object = None) -> None:
    """Add a layer of the group, in the same order on all ranks. Nothing is moved before `share`.

    `model` is one object for all layers of a model, which are called in this order; None: the layer is called alone.
    """
    exports = _of(group_name)
    layer = SharedLayer(weakref.ref(exporter), object() if model is None else model)
    exports.layers.append(layer)
    weakref.finalize(exporter, exports.forget, layer).atexit = False


def is_shared(group_name: str) -> bool:
    """True if every registered layer that still exists was shared."""
    return all(layer.addresses for layer in _of(group_name).layers if layer.exporter() is not None)


def refusal(group_name: str) -> str:
    """Why the group's weights could not be shared, the same on all ranks; empty if nothing failed."""
    try:
        return _of(group_name).refused
    except WeaveError:  # a group of a preview
        return ""


def share(group_name: str, timeout_s: float) -> None:
    """Share the registered layers of the group that are not in place on every rank. All its ranks call it.

    A layer that some rank has not registered yet is left for the next call. Raises `ExportError` on all ranks if one of
    them cannot share its memory or has another layer in its place, and `AgreementError` if a rank does not come within
    `timeout_s`.
    """
    known = topologies.discover(group_name, timeout_s)
    if known.fake or known.world == 1:
        return
    exports = _of(group_name)
    try:
        with lasting_tensors():
            _share(exports, known, timeout_s)
    except ExportError as error:
        exports.refused = str(error)
        raise
    exports.refused = ""


def refuse(group_name: str, why: str) -> None:
    """Have every later call raise `why`, until the weights are shared after all."""
    _of(group_name).refused = why


def places(group_name: str, tensor: Tensor) -> tuple[Tensor, ...]:
    """All ranks' parts, in group order, of what is `tensor` on this rank; a view of a whole tensor, of any strides.

    Raises `ExportError` if the tensor was not shared, or its storage is another one since.
    """
    layer, position = _found(group_name, tensor)
    shape, strides = tensor.shape, tensor.stride()
    return tuple(
        each if each.shape == shape and each.stride() == strides else each.as_strided(shape, strides)
        for each in layer.places[position]
    )


def shared_layer(group_name: str, tensor: Tensor) -> tuple[SharedLayer, int]:
    """The layer of what is `tensor` on this rank, and which of the layer's tensors it is. Raises as `places`."""
    return _found(group_name, tensor)


def model_layers(group_name: str, layer: SharedLayer) -> list[SharedLayer]:
    """Layers of the same model that were shared, in the order in which they are called."""
    return [each for each in _of(group_name).layers_with(layer) if each.addresses]


def whole(group_name: str, tensor: Tensor) -> Tensor:
    """All ranks' parts in one tensor, copied once: for small ones. Raises as `places`."""
    return _whole(*_found(group_name, tensor))


def _whole(layer: SharedLayer, position: int) -> Tensor:
    if position not in layer.copies:
        with lasting_tensors():
            layer.copies[position] = torch.cat(layer.places[position])
    return layer.copies[position]


def _found(group_name: str, tensor: Tensor) -> tuple[SharedLayer, int]:
    exports = _of(group_name)
    found = exports.by_address.get(tensor.data_ptr())
    if found is not None:
        return found
    if exports.refused:
        raise ExportError(exports.refused)
    asked = f"group {group_name!r}: asked for the peers' part of a weight [{', '.join(map(str, tensor.shape))}]"
    if not any(layer.addresses for layer in exports.layers):
        raise ExportError(f"{asked}, found that none was shared: call weaveopt.share_experts(model) on all ranks")
    raise ExportError(
        f"{asked}, found another storage than the one that was shared, as after a conversion or an assignment: {AGAIN}"
    )


def _share(exports: _Exports, known: Topology, timeout_s: float) -> None:
    group = known.group
    channel = topologies.exchange(group.name, timeout_s)

    def gather(payload: Payload) -> Sequence[Payload]:
        answers = channel.gather(payload, WHAT, timeout_s)
        failed = [f"rank {rank}: {r['error']}" for rank, r in zip(group.ranks, answers, strict=True) if r["error"]]
        if failed:
            channel.settle()
            raise ExportError(f"group {group.name!r}: weights of experts cannot be shared: {'; '.join(failed)}")
        return answers

    memory = _TRANSPORTS[Fabric.PEER if known.device == "cuda" else Fabric.SHM](known)
    records: list[list[object]] = []

    def plan() -> None:
        records.extend(layer.record() for layer in exports.layers)
        memory.expect_support(tuple(each for layer in exports.layers for each in layer.tensors()))

    failure = _failure_of(plan)
    answers = gather({**memory.announced(), "layers": json.dumps(records), "error": failure})
    chosen = _chosen(known, [json.loads(str(each["layers"])) for each in answers])

    def move() -> None:
        memory.prepare(answers)
        for index in chosen:
            exports.forget(exports.layers[index])
            memory.move(exports.layers[index].tensors())
            if (exporter := exports.layers[index].exporter()) is not None:
                exporter.moved()

    try:
        failure = _failure_of(move)
        announced = gather({**memory.moved(), "error": failure})
        parts: list[OpenedLayer] = []
        failure = _failure_of(lambda: parts.extend(memory.opened(announced, timeout_s)))
        # Peers open our memory through what we announced, which stays until all have.
        gather({"error": failure})
    finally:
        memory.close()
    for index, opened in zip(chosen, parts, strict=True):
        layer = exports.layers[index]
        layer.places, layer.kept = opened.places, opened.kept
        layer.addresses = tuple(each[group.rank].data_ptr() for each in opened.places)
        exports.by_address.update((address, (layer, at)) for at, address in enumerate(layer.addresses))
        for position, places_of in enumerate(opened.places):
            if places_of[0].dim() <= _SMALL_DIMS:  # now, as no CUDA graph may be the first to ask
                _whole(layer, position)


def _failure_of(work: Callable[[], None]) -> str:
    """Reason why `work` failed, which the other ranks must hear; empty if it did not."""
    try:
        work()
    except Exception as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return ""


def _chosen(known: Topology, records: Sequence[Sequence[Sequence[object]]]) -> list[int]:
    """Layers that all ranks have and some rank has not in place. Raises `ExportError` where ranks have others."""
    chosen = []
    for index, states in enumerate(zip(*records, strict=False)):
        if not all(states):
            continue  # gone on some rank
        first, *others = states
        for rank, other in zip(known.group.ranks[1:], others, strict=True):
            if other[1:] != first[1:]:
                raise ExportError(
                    f"group {known.group.name!r}: layer {index} is {first[1:]} on rank "
                    f"{known.group.ranks[0]} and {other[1:]} on rank {rank}: load the same model with the same dtype"
                )
        if not all(each[0] for each in states):
            chosen.append(index)
    return chosen
