"""Form `ahead` of `weave::expert_prefetch`: copy engines pull the experts that a rank lacks, a layer ahead.

    gate_up = [own | kept for good | fetched]      # ranges in the order of the experts' ids, nothing is merged

What is kept for good is, of the first layer, all that the rank lacks, and of every layer as much as the option
`expert_cache_bytes` says. It is pulled in the model's first call, which waits for it. The rest of a layer is in one of
two slots (`slots.py` says which, and what follows what); pulls are memcpy nodes or copies on a stream of their own
(`csrc/experts/pulls.h`). Memory is allocated as peers' memory is, apart from torch's allocator: a first call may run
with the memory pool of a CUDA graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from weaveopt.fabrics import exported, symmetric
from weaveopt.fabrics.exported import SharedLayer
from weaveopt.ops.experts.expert_ranges import StackedWeight, joined
from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall
from weaveopt.ops.experts.prefetch.ring import ALIGNMENT, Copy, ExpertSource, Ring, pulled
from weaveopt.ops.experts.prefetch.slots import ModelSlots

try:
    from weaveopt import _native
except ImportError:  # built without it: no candidate of this form is proposed then
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor
Weights = tuple[StackedWeight, StackedWeight]
"""First and second weight of all experts."""


@dataclass(frozen=True, eq=False)
class ExpertMemory:
    """Some experts of a layer in this GPU's memory: their first weights, then their second ones."""

    buffer: Tensor
    """Bytes."""
    second: int
    """Offset of the second weights."""

    def weight(self, which: int, like: Tensor, first: int, count: int) -> Tensor:
        """`count` experts from the `first` on, as `like` [any, N, K] is stored."""
        size = like.shape[1] * like.shape[2]
        begin = self.second * which // like.element_size() + first * size
        return self.buffer.view(like.dtype).as_strided((count, *like.shape[1:]), (size, *like.stride()[1:]), begin)

    def address(self, which: int) -> int:
        return self.buffer.data_ptr() + self.second * which


class LayerCopies:
    """Copies of a model's missing experts into memory of this GPU, layer by layer.

    Nothing here refers to the model's slots, which refer to this: without a cycle, memory is freed with its last user,
    and not by Python's collector, which may run while a CUDA graph is captured.
    """

    def __init__(self, layers: Sequence[SharedLayer], positions: tuple[int, int], ring: Ring) -> None:
        """`positions`: which tensors of a layer are the weights."""
        first = [layers[0].places[at][ring.rank] for at in positions]
        self.ring, self.device = ring, first[0].device
        self._places = [[tuple(part.data_ptr() for part in layer.places[at]) for at in positions] for layer in layers]
        self._expert_bytes = tuple(bytes_of_expert(each) for each in first)
        self.streams = pull_streams(self.device.index, 1 if ring.world == 2 else 2)
        self._is_full = False

    def memory(self, experts: int) -> ExpertMemory:
        """Room for so many experts, which nothing stores to any more. Raises `RuntimeError` if there is none."""
        first, second = (-(-experts * size // ALIGNMENT) * ALIGNMENT for size in self._expert_bytes)
        num_bytes = max(first + second, ALIGNMENT)
        found = ExpertMemory(symmetric.allocate((num_bytes,), (1,), torch.uint8, self.device), first)
        # Torch fills it with zeros on the default stream, which the streams of pulls do not wait for.
        _end_default_stream(self.device)
        return found

    def slots(self) -> tuple[ExpertMemory, ExpertMemory] | None:
        """Memory of two slots; None, and a warning, if there is none."""
        if self._is_full:
            return None
        torch.cuda.empty_cache()  # the memory comes from the driver
        try:
            return self.memory(self.ring.fetched), self.memory(self.ring.fetched)
        except RuntimeError as error:
            warn_of_memory(error)
            self._is_full = True
            return None

    def fetches(self, layer: int, memory: ExpertMemory) -> list[Copy]:
        """All experts of a layer that are not kept."""
        return self._between(layer, memory, self.ring.cached, self.ring.missing)

    def fill(self, resident: ExpertMemory, cached: Sequence[ExpertMemory]) -> None:
        """Pull what is kept for good, of the first layer and of all, and wait for it."""
        copies = self.fetches(0, resident)
        for layer, memory in enumerate(cached):
            copies += self._between(layer, memory, 0, self.ring.cached)
        stream = _current_stream(self.device)
        self.streams.settle([self.streams.pull(stream, copies, [self.streams.mark(stream)])])

    def _between(self, layer: int, memory: ExpertMemory, first: int, end: int) -> list[Copy]:
        return [
            copy
            for which, (places, size) in enumerate(zip(self._places[layer], self._expert_bytes, strict=True))
            for copy in pulled(self.ring, first, end, places, size, memory.address(which))
        ]


class ModelAhead:
    """Layers of one model on this GPU, with what is kept of the experts that it lacks. The model's attachment."""

    def __init__(self, layers: Sequence[SharedLayer], positions: tuple[int, int], ring: Ring) -> None:
        """As `LayerCopies`. Raises `RuntimeError` if memory runs out."""
        copies = LayerCopies(layers, positions, ring)
        torch.cuda.empty_cache()
        self._ring, self._device = ring, copies.device
        self._cached = [copies.memory(ring.cached) for _ in layers] if ring.cached else []
        self.resident = copies.memory(ring.fetched)
        copies.fill(self.resident, self._cached)
        self.slots = ModelSlots(copies.streams, len(layers), self.resident, copies.slots, copies.fetches)
        self._joined: dict[tuple[object, ...], Weights] = {}

    @contextmanager
    def reading(self, layer: int, gate_up: Tensor, down: Tensor, last: bool) -> Iterator[Weights | None]:
        """All experts of the layer, for kernels that the current stream gets inside; None: read peers in place.

        `gate_up` and `down` are the own ones, as the kernels take them.
        """
        if not self._ring.fetched:
            yield self._weights(layer, gate_up, down, self.resident)
            return
        stream = _current_stream(self._device)
        with self.slots.reading(layer, stream, last) as memory:
            yield None if memory is None else self._weights(layer, gate_up, down, memory)

    def close(self) -> None:
        """Called before the peers' mappings go. While a CUDA graph is captured no memory can be given back: it is kept
        until a model is next called for the first time."""
        if torch.cuda.is_current_stream_capturing():
            _closed.append(self)
        self.slots.close()

    def _weights(self, layer: int, gate_up: Tensor, down: Tensor, memory: ExpertMemory) -> Weights:
        key = layer, id(memory), gate_up.data_ptr(), gate_up.stride(), down.stride()
        found = self._joined.get(key)
        if found is None:
            first, second = (self._whole(layer, which, own, memory) for which, own in enumerate((gate_up, down)))
            found = self._joined[key] = (first, second)
        return found

    def _whole(self, layer: int, which: int, own: Tensor, memory: ExpertMemory) -> StackedWeight:
        parts = []
        for each in self._ring.ranges():
            if each.source is ExpertSource.OWN:
                parts.append(own)
            else:
                found = self._cached[layer] if each.source is ExpertSource.CACHED else memory
                parts.append(found.weight(which, own, each.first, each.count))
        return joined(parts)


_closed: list[ModelAhead] = []
"""Models that went while a CUDA graph was captured."""


def _current_stream(device: torch.device) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def _end_default_stream(device: torch.device) -> None:
    torch.cuda.default_stream(device).synchronize()


@cache
def pull_streams(device: int, lanes: int) -> _native.PullStreams:
    """The streams on which a GPU pulls, for all models; made before any capture, in a model's first call."""
    return _native.PullStreams(device, lanes)


@contextmanager
def reading(gate_up: Tensor, down: Tensor, call: ExpertPrefetchCall) -> Iterator[Weights | None]:
    """All experts of a call's layer, a layer ahead where they are not there; None: read peers in place.

    Raises `ExportError` as `exported.places`.
    """
    layer, position = exported.shared_layer(call.group, gate_up)
    key = "ahead", call.cache_bytes
    if key not in layer.attached:
        _attach(layer, position, gate_up, down, call)
    model = layer.attached.get(key)
    if model is None:
        yield None
        return
    assert isinstance(model, _Layer), f"{layer}: {model}"
    with model.model.reading(model.index, gate_up, down, call.last) as weights:
        yield weights


@dataclass(frozen=True)
class _Layer:
    """A layer's place in its model."""

    model: ModelAhead
    index: int

    def close(self) -> None:
        self.model.close()


def _attach(layer: SharedLayer, position: int, gate_up: Tensor, down: Tensor, call: ExpertPrefetchCall) -> None:
    """Attach the model to all of its layers that are like this one, unless a CUDA graph is captured: then it is read in
    place, as it is where its memory cannot be had."""
    if torch.cuda.is_current_stream_capturing():
        return
    _closed.clear()
    key, positions = ("ahead", call.cache_bytes), (position, exported.shared_layer(call.group, down)[1])
    layers = [each for each in exported.model_layers(call.group, layer) if _is_like(each, layer, positions)]
    for each in layers:
        each.attached[key] = None
    own = [each.data_ptr() for each in layer.places[position]].index(gate_up.data_ptr())
    parts = [layer.places[at][own] for at in positions]
    if any(not _is_by_expert(part) for part in parts):
        return
    cached = call.cache_bytes // sum(bytes_of_expert(each) for each in parts)
    missing = Ring(call.world, own, call.num_experts).missing
    try:
        model = ModelAhead(layers, positions, Ring(call.world, own, call.num_experts, min(cached, missing)))
    except RuntimeError as error:
        warn_of_memory(error)
        return
    for index, each in enumerate(layers):
        each.attached[key] = _Layer(model, index)


def _is_like(layer: SharedLayer, other: SharedLayer, positions: tuple[int, int]) -> bool:
    def form(each: SharedLayer) -> list[object]:
        tensors = [each.places[at][0] for at in positions if at < len(each.places)]
        return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]

    return form(layer) == form(other)


def _is_by_expert(weight: Tensor) -> bool:
    """True if each expert's weight is one piece of memory."""
    return weight.dim() == 3 and (len(weight) == 1 or weight.stride(0) == weight.shape[1] * weight.shape[2])


def bytes_of_expert(weight: Tensor) -> int:
    return weight.shape[1] * weight.shape[2] * weight.element_size()


def warn_of_memory(error: RuntimeError) -> None:
    warnings.warn(
        "weaveopt: experts of other ranks are read in place and not fetched ahead, as their memory could not be "
        f"allocated: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        stacklevel=2,
    )
