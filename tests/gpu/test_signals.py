"""Primitives of csrc/fabric for kernels to come: words that several CTAs add to, and copies that signal at their end.

The reader waits on one GPU while the writers run on another, or on the same where there is only one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.native_kernel import Module, compiled, nvrtc
from weaveopt import _native

pytestmark = pytest.mark.gpu
SOURCE = Path(__file__).with_name("signals.cu")
THREADS = 128
MOST_CTAS = 24
TIMEOUT_S = 20.0


class Meeting(ctypes.Structure):
    """The struct of that name in signals.cu."""

    _fields_ = (
        ("arena", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
        ("timeout_ns", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("num_signals", ctypes.c_uint32),
    )


class Sides:
    """A reader with its arena, and writers."""

    def __init__(self) -> None:
        library = nvrtc()
        if library is None:
            pytest.skip("torch's NVRTC was not found")
        self.reader = 0
        self.writer = 1 if torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(1, 0) else 0
        major, minor = torch.cuda.get_device_capability(self.reader)
        binary = compiled(library, SOURCE.read_text(), f"sm_{major}{minor}")
        self.modules = {device: Module(binary, device) for device in {self.reader, self.writer}}
        if self.writer != self.reader:
            _enable_peer_access(self.writer, self.reader)
        self.has_bulk_copies = major >= 9
        data_bytes = 4 * THREADS * MOST_CTAS
        self.arena = _memory(_native.HEADER_BYTES + data_bytes, self.reader)
        self.record = torch.zeros(256, dtype=torch.uint8, pin_memory=True)
        self.num_wrong = torch.zeros(1, dtype=torch.int32, device=f"cuda:{self.reader}")
        self.streams = [torch.cuda.Stream(self.reader), torch.cuda.Stream(self.writer)]
        self.warm_up()

    def warm_up(self) -> None:
        """Loads every kernel where it will run: loading may wait for the device, and a reader that waits never ends."""
        meeting = self.meeting(epoch=0, num_signals=0)
        self.check(meeting, 0)
        self.write("add", 1, meeting, ctypes.c_void_p(self.data))
        self.write("put", 1, meeting, ctypes.c_int64(_native.HEADER_BYTES))
        assert self.finish() == 0

    def meeting(self, epoch: int, num_signals: int) -> Meeting:
        return Meeting(self.arena, self.record.data_ptr(), int(TIMEOUT_S * 1e9), epoch, num_signals)

    def check(self, meeting: Meeting, count: int) -> None:
        self.modules[self.reader].launch(
            "check", 1, THREADS, self.streams[0], meeting, ctypes.c_void_p(self.data), ctypes.c_uint32(count),
            ctypes.c_void_p(self.num_wrong.data_ptr()),
        )  # fmt: skip

    def write(self, kernel: str, num_ctas: int, meeting: Meeting, argument: ctypes.c_void_p | ctypes.c_int64) -> None:
        self.modules[self.writer].launch(kernel, num_ctas, THREADS, self.streams[1], meeting, argument)

    def finish(self) -> int:
        """How many words were wrong. Fails if a wait gave up."""
        for stream in self.streams:
            stream.synchronize()
        code = int(self.record[:4].view(torch.int32).item())
        assert code == 0, f"a wait gave up with code {code}"
        return int(self.num_wrong.item())

    @property
    def data(self) -> int:
        return self.arena + _native.HEADER_BYTES


_owned: list[tuple[int, int]] = []


def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")  # torch's own


def _memory(num_bytes: int, device: int) -> int:
    """Memory of zeros. Not from torch: its allocator's memory may not be mapped for peers."""
    pointer = ctypes.c_void_p()
    with torch.cuda.device(device):
        assert _runtime().cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(num_bytes)) == 0
        assert _runtime().cudaMemset(pointer, 0, ctypes.c_size_t(num_bytes)) == 0
    assert pointer.value is not None
    _owned.append((pointer.value, device))
    return pointer.value


def _enable_peer_access(device: int, peer: int) -> None:
    already_enabled = 704
    with torch.cuda.device(device):
        runtime = _runtime()
        assert runtime.cudaDeviceEnablePeerAccess(peer, 0) in (0, already_enabled)
        runtime.cudaGetLastError()


@pytest.fixture
def sides() -> Iterator[Sides]:
    yield Sides()
    while _owned:
        pointer, device = _owned.pop()
        with torch.cuda.device(device):
            _runtime().cudaFree(ctypes.c_void_p(pointer))


def test_a_reader_of_a_sum_of_signals_sees_what_was_before_each(sides: Sides) -> None:
    """No word is ever reset, and the number of CTAs differs from epoch to epoch."""
    for epoch in range(1, 201):
        num_ctas = 1 + epoch * 7 % MOST_CTAS
        meeting = sides.meeting(epoch, num_ctas)
        sides.check(meeting, THREADS * num_ctas)
        sides.write("add", num_ctas, meeting, ctypes.c_void_p(sides.data))
        assert sides.finish() == 0, f"epoch {epoch}, {num_ctas} CTAs"


def test_a_signal_comes_behind_the_copy_that_it_is_for(sides: Sides) -> None:
    if not sides.has_bulk_copies:
        pytest.skip("bulk copies need compute capability 9.0")
    for epoch in range(1, 201):
        meeting = sides.meeting(epoch, 1)
        sides.check(meeting, THREADS)
        sides.write("put", 1, meeting, ctypes.c_int64(_native.HEADER_BYTES))
        assert sides.finish() == 0, f"epoch {epoch}"
