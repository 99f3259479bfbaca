"""Weights that peers read: what is moved, what is kept, and who hears of a failure."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from weaveopt.errors import AgreementError, ExportError
from weaveopt.fabrics import exported, exported_peer, exported_shm
from weaveopt.records.candidate import Fabric

TIMEOUT_S = 30.0


class Layer:
    """Tensors of one rank."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.times_moved = tensors, 0

    def exported(self) -> tuple[Tensor, ...]:
        return self.tensors

    def moved(self) -> None:
        self.times_moved += 1


def layers_of(rank: int, count: int) -> list[Layer]:
    found = [
        Layer(torch.full((2, 3, 4), 10.0 * rank + each), torch.full((5, 6), rank + each, dtype=torch.bfloat16).T)
        for each in range(count)
    ]
    for layer in found:
        exported.register("0", layer)
    return found


def segment_names() -> set[str]:
    """Names in /dev/shm, without the semaphores of other programs' processes."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def run_share(rank: int, world: int) -> list[int]:
    layers = layers_of(rank, 3)
    before = [each.data_ptr() for each in layers[0].tensors]
    exported.share("0", TIMEOUT_S)
    for index, layer in enumerate(layers):
        first, second = (exported.places("0", each) for each in layer.tensors)
        assert [each.unique().tolist() for each in first] == [[10.0 * peer + index] for peer in range(world)]
        assert {each.stride() for each in second} == {layer.tensors[1].stride()} and not second[0].is_contiguous()
        assert first[rank].data_ptr() == layer.tensors[0].data_ptr()
        transposed = exported.places("0", layer.tensors[0].transpose(1, 2))
        assert torch.equal(transposed[-1], first[-1].transpose(1, 2)), "a view finds views"
        assert torch.equal(exported.whole("0", layer.tensors[0]), torch.cat(first))
        assert exported.whole("0", layer.tensors[0]) is exported.whole("0", layer.tensors[0])
    assert [each.data_ptr() for each in layers[0].tensors] != before
    again = [each.data_ptr() for each in layers[0].tensors]
    exported.share("0", TIMEOUT_S)
    assert [each.data_ptr() for each in layers[0].tensors] == again, "what is in place stays there"
    return [layer.times_moved for layer in layers]


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_reads_all(world: int) -> None:
    before = segment_names()
    assert run_ranks(run_share, world, world) == [[1, 1, 1]] * world
    assert not segment_names() - before, "no segment has a name"


def run_later(rank: int) -> tuple[bool, bool]:
    """A layer that one rank has not registered yet waits for the next call; a deleted one is forgotten."""
    layers = layers_of(rank, 2 if rank else 1)
    exported.share("0", TIMEOUT_S)
    early = exported.is_shared("0")
    if rank == 0:
        layers += layers_of_second(rank)
    exported.share("0", TIMEOUT_S)
    own = layers[1].tensors[0]
    assert len(exported.places("0", own)) == 2
    address = own.data_ptr()
    layers.pop()
    gc.collect()
    assert address not in exported._of("0").by_address
    return early, exported.is_shared("0")


def layers_of_second(rank: int) -> list[Layer]:
    second = Layer(torch.full((2, 3, 4), 10.0 * rank + 1), torch.full((5, 6), rank + 1, dtype=torch.bfloat16).T)
    exported.register("0", second)
    return [second]


def test_layers_that_come_later_are_shared_later() -> None:
    assert run_ranks(run_later, 2) == [(True, True), (False, True)]


def run_failing(rank: int, what: str) -> str:
    layers = layers_of(rank, 2)
    if what == "memory" and rank == 1:

        def no_memory(*_: object) -> None:
            raise RuntimeError("cannot reserve 1 bytes of shared memory")

        exported_shm._native = type("Native", (), {"Segment": type("Segment", (), {"create": no_memory})})  # type: ignore[assignment]
    if what == "shape" and rank == 1:
        layers[1].tensors = (torch.zeros(2, 3, 5), layers[1].tensors[1])
    if what == "gaps":
        layers[1].tensors = (torch.zeros(2, 6, 4)[:, ::2], layers[1].tensors[1])
    values = layers[0].tensors[0].clone()
    with pytest.raises(ExportError) as caught:
        exported.share("0", TIMEOUT_S)
    assert torch.equal(layers[0].tensors[0], values), "values are what they were, moved or not"
    assert exported.refusal("0") == str(caught.value)
    with pytest.raises(ExportError, match=r"cannot be shared|load the same model"):
        exported.places("0", layers[1].tensors[0])
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("memory", "rank 1: cannot reserve 1 bytes of shared memory"),
        ("shape", "layer 1 is .* on rank 0 and .* on rank 1: load the same model"),
        ("gaps", "rank 0: a weight .2, 3, 4. has gaps"),
    ],
)
def test_all_ranks_hear_of_a_failure(what: str, words: str) -> None:
    found = run_ranks(run_failing, 2, what, own=True)
    assert found[0] == found[1]
    assert re.search(words, found[0]), found[0]


def run_absent(rank: int) -> str:
    layers_of(rank, 1)
    if rank == 1:
        return ""
    with pytest.raises(AgreementError) as caught:
        exported.share("0", 1.0)
    return str(caught.value)


def test_a_rank_that_never_comes_is_named() -> None:
    assert "did not come within 1 s for" in run_ranks(run_absent, 2, own=True)[0]


def test_transports() -> None:
    assert exported.unsupported(Fabric.SHM) is None and exported.unsupported(Fabric.PEER) is None
    found = exported.unsupported(Fabric.TCP)
    assert found is not None and found.code == "not_supported"


def run_files(rank: int) -> int:
    layers = layers_of(rank, 20)
    exported.share("0", TIMEOUT_S)
    names = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert layers
    return sum("memfd" in name or "/dev/shm" in name for name in names)


def test_no_descriptor_stays_open() -> None:
    before, after = run_ranks(run_files, 2, own=True)
    assert before == after == 0


class MadeUpHandle:
    """A rendezvous of memory that is a segment of CPU ranks."""

    def __init__(self, rank: int, parts: list[Tensor]) -> None:
        self.rank, self.parts = rank, parts

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.parts[rank].view(dtype)[: sizes[0]]


def make_up_symmetric_memory(counts: list[int]) -> None:
    """Stand-ins for torch's symmetric memory and for the device: what `PeerMemory` calls, in the order in which it
    does. `counts` gets the number of rendezvous that this rank caught up to."""
    segments: dict[int, tuple[object, int, int]] = {}
    native = exported_shm._native

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: object) -> Tensor:
        num_bytes, cookie = torch.Size(shape).numel() * dtype.itemsize, len(segments) + 1
        segment = native.Segment.create(num_bytes, cookie, 0, dist.get_world_size())
        made = torch.frombuffer(segment, dtype=dtype, count=torch.Size(shape).numel()).as_strided(shape, strides)
        segments[made.data_ptr()] = segment, cookie, num_bytes
        return made

    def rendezvous(memory: Tensor, group: object, limit_s: float) -> MadeUpHandle:
        segment, cookie, num_bytes = segments[memory.data_ptr()]
        own = (os.getpid(), segment.fd, cookie, num_bytes)  # type: ignore[attr-defined]
        every: list[tuple[int, int, int, int]] = [own] * dist.get_world_size()
        dist.all_gather_object(every, own)
        opened = [native.Segment.open(*each) for each in every]
        dist.barrier()
        parts = [torch.frombuffer(each, dtype=torch.uint8, count=num_bytes) for each in opened]
        return MadeUpHandle(dist.get_rank(), parts)

    made_up = {
        "allocate": allocate, "rendezvous": rendezvous, "catch_up": counts.append, "failed": lambda: "",
        "num_rendezvous": lambda: 5 + dist.get_rank(),
    }  # fmt: skip
    for name, function in made_up.items():
        setattr(exported_peer.symmetric, name, function)
    exported_peer.expect_fabric = lambda *_: None
    for name in ("synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_: None)
    torch.cuda.is_current_stream_capturing = lambda: False
    exported._TRANSPORTS[Fabric.SHM] = exported_peer.PeerMemory


def run_on_symmetric_memory(rank: int, world: int) -> list[int]:
    counts: list[int] = []
    make_up_symmetric_memory(counts)
    times = run_share(rank, world)
    assert counts == [5 + world - 1] * 2, "all catch up to the rank with most rendezvous"
    return times


@pytest.mark.parametrize("world", [2, 3])
def test_symmetric_memory_is_a_transport(world: int) -> None:
    assert run_ranks(run_on_symmetric_memory, world, world, own=True) == [[1, 1, 1]] * world


def run_failing_rendezvous(rank: int) -> str:
    make_up_symmetric_memory([])
    layers = layers_of(rank, 1)
    if rank == 1:

        def no_memory(*_: object) -> Tensor:
            raise RuntimeError("CUDA driver error: out of memory\nand how it came")

        exported_peer.symmetric.allocate = no_memory  # type: ignore[assignment]
    with pytest.raises(ExportError) as caught:
        exported.share("0", TIMEOUT_S)
    assert layers[0].times_moved == (rank == 0)
    return str(caught.value)


def test_no_rank_begins_a_rendezvous_that_another_cannot_join() -> None:
    first, second = run_ranks(run_failing_rendezvous, 2, own=True)
    assert first == second and first.endswith("rank 1: CUDA driver error: out of memory")
