"""Memory of form `ahead` on CPU ranks: what a made-up engine copies is where kernels look for it, layer by layer."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.graphs.nonempty import some
from tests.ranks import run_ranks
from weaveopt.fabrics import exported, symmetric
from weaveopt.fabrics.exported import SharedLayer
from weaveopt.ops.experts.expert_ranges import StackedWeight, whole
from weaveopt.ops.experts.prefetch import ahead
from weaveopt.ops.experts.prefetch.ahead import ModelAhead
from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall, PrefetchForm
from weaveopt.ops.experts.prefetch.ring import Copy, Ring
from weaveopt.records.candidate import Fabric

EXPERTS, HIDDEN, INNER, LAYERS = 2, 16, 8, 4
CALL = ExpertPrefetchCall(
    site="site", group="0", fabric=Fabric.PEER, world=2, hidden=HIDDEN, dtype="float32", max_tokens=0, timeout_s=0.0,
    num_experts=EXPERTS, form=PrefetchForm.AHEAD.value,
)  # fmt: skip


class Exporter:
    """One rank's experts of a layer."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def exported(self) -> tuple[Tensor, ...]:
        return self.tensors

    def moved(self) -> None:
        return None


class CopyingEngine:
    """Copies at once."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def capture_of(self, stream: int) -> int:
        return 0

    def mark(self, stream: int) -> int:
        return stream

    def wait(self, stream: int, mark: int) -> None:
        return None

    def pull(self, stream: int, copies: Sequence[Copy], after: Sequence[int]) -> int:
        for to, source, num_bytes in copies:
            ctypes.memmove(to, source, num_bytes)
            self.num_bytes += num_bytes
        return 0

    def settle(self, marks: Sequence[int]) -> None:
        return None


@contextmanager
def on_cpu(engine: CopyingEngine) -> Iterator[None]:
    """Pulls by the engine, into memory full of NaN."""

    def allocate(shape: tuple[int, ...], strides: object, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, 0xFF, dtype=dtype)

    with ExitStack() as patched:
        for where, name, stands_in in (
            (ahead, "pull_streams", lambda device, lanes: engine),
            (ahead, "_current_stream", lambda device: 1),
            (ahead, "_end_default_stream", lambda device: None),
            (symmetric, "allocate", allocate),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
        ):
            patched.enter_context(mock.patch.object(where, name, stands_in))
        yield


def layer_of(seed: int, world: int, transposed: bool = False) -> list[Tensor]:
    """Both weights of all experts, as the kernels take them."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    if transposed:
        return [torch.randn(world * EXPERTS, k, n, generator=random).transpose(1, 2) for n, k in shapes]
    return [torch.randn(world * EXPERTS, n, k, generator=random) for n, k in shapes]


def shared(weights: Sequence[Tensor], world: int, owner: Exporter, model: object) -> SharedLayer:
    parts = tuple(
        tuple(
            stored.clone() for stored in (each if each.is_contiguous() else each.transpose(1, 2)).chunk(world)
        )
        for each in weights
    )  # fmt: skip
    return SharedLayer(weakref.ref(owner), model, places=parts)


def expect(found: tuple[StackedWeight, StackedWeight] | None, wanted: Sequence[Tensor]) -> None:
    assert found is not None
    for each, want in zip(found, wanted, strict=True):
        assert torch.equal(whole(each), want)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_kernels_find_every_layers_experts(world: int, transposed: bool) -> None:
    """In order and in any other one, whatever is kept for good, and by each rank."""
    owner, model = Exporter(()), object()
    weights = [layer_of(seed, world, transposed) for seed in range(LAYERS)]
    layers = [shared(each, world, owner, model) for each in weights]
    missing = (world - 1) * EXPERTS
    for rank in some(range(world)):
        for cached in (0, 1, missing - 1, missing):
            engine = CopyingEngine()
            with on_cpu(engine):
                found = ModelAhead(layers, (0, 1), Ring(world, rank, EXPERTS, cached))
                for at in (0, 1, 2, 3, 0, 1, 3, 2, 3, 3, 1):
                    gate_up, down = (
                        each[rank] if not transposed else each[rank].transpose(1, 2) for each in layers[at].places
                    )
                    with found.reading(at, gate_up, down, last=True) as read:
                        expect(read, weights[at])
            assert engine.num_bytes >= sum(each[0].nbytes + each[1].nbytes for each in layers[0].places[:1]) // world


def test_what_is_given_back_goes_without_the_collector() -> None:
    """It may run while a CUDA graph is captured, where no memory of a GPU can be freed."""
    owner, weights = Exporter(()), layer_of(1, 2)
    layer = shared(weights, 2, owner, object())
    gc.disable()
    try:
        with on_cpu(CopyingEngine()):
            model = ModelAhead([layer, layer], (0, 1), Ring(2, 0, EXPERTS))
            with model.reading(1, *(each[0] for each in layer.places), last=True) as read:
                expect(read, weights)
            kept = weakref.ref(model), weakref.ref(model.resident), weakref.ref(model.slots)
            del model, read
        assert [each() for each in kept] == [None] * 3
    finally:
        gc.enable()


def run_models(rank: int, world: int) -> list[int]:
    """Two models of one group: each has its own layers, and both begin anew when they are shared again."""
    call, found = replace(CALL, world=world), []
    weights = {name: [layer_of(10 * name + at, world) for at in range(count)] for name, count in ((1, 3), (2, 2))}
    every = {}
    for name, layers in weights.items():
        model = object()
        every[name] = [Exporter(tuple(each.chunk(world)[rank].clone() for each in layer)) for layer in layers]
        for layer in every[name]:
            exported.register("0", layer, model)
    exported.share("0", 30.0)
    engine = CopyingEngine()

    def forward(name: int, cache_bytes: int = 0) -> None:
        for layer, wanted in zip(every[name], weights[name], strict=True):
            with ahead.reading(*layer.tensors, replace(call, cache_bytes=cache_bytes)) as read:
                expect(read, wanted)

    with on_cpu(engine):
        for turn in range(2):
            for name in (1, 2, 1):
                forward(name)
            forward(1, cache_bytes=1 << 30)
            attached = {}
            for name in (1, 2):
                layers = [exported.shared_layer("0", each.tensors[0])[0] for each in every[name]]
                attached[name] = {id(each.attached["ahead", 0].model) for each in layers}  # type: ignore[union-attr]
                assert len(attached[name]) == 1 and len(layers[0].attached) == 3 - name
            assert attached[1] != attached[2]
            found.append(engine.num_bytes)
            if turn == 0:
                moved = every[1][0]
                moved.tensors = tuple(each.clone() for each in moved.tensors)
                exported.share("0", 30.0)
                first, other = (exported.shared_layer("0", every[name][-1].tensors[0])[0] for name in (1, 2))
                assert not first.attached and other.attached, "copies of a model go with any of its layers"
    return found


def test_each_model_has_its_own_layers() -> None:
    first, second = run_ranks(run_models, 2, 2)
    assert first == second and first[1] > first[0] > 0
