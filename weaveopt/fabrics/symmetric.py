"""Torch's rendezvous of symmetric memory, for groups of any shape.

Torch counts the rendezvous of a process, whatever their group, and names what it exchanges by that count. Ranks of a
group with different counts then wait for each other's keys without end (pytorch/pytorch#196082): a group of ranks 0 and
1 followed by one of all ranks is enough. So ranks exchange their counts before a rendezvous, and ranks with a smaller
count catch up by rendezvous of their own.

Torch waits in two places during a rendezvous, and holds Python's lock all the time, so no thread could watch it:

- for keys of the group's store, as long as that store waits: the store's timeout is ours around the call;
- for file descriptors on a socket, without end: a timer's signal interrupts it. Only the main thread may ask for
  signals; on another one a rank that dies between two steps of torch's own exchange is waited for without end.

Torch decides by itself whether a rendezvous makes an NVLink multicast mapping too: where all GPUs can, unless
`TORCH_SYMM_MEM_DISABLE_MULTICAST` is set. Here only a rendezvous that asks for one makes it, and none where the
variable is set: on some hosts a multicast object puts the GPUs out of service.

A rendezvous that failed on a rank leaves that rank's count unknown, so it never takes part in one again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from weaveopt.errors import ArenaError
from weaveopt.fabrics.lasting import lasting_tensors

_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Handle(Protocol):
    """Interface of torch's rendezvous handle; peers' memory is mapped as long as it exists."""

    @property
    def rank(self) -> int: ...
    @property
    def buffer_ptrs(self) -> list[int]: ...
    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


def why_no_multicast(index: int) -> str:
    """Reason why torch makes no multicast mapping of the memory of GPU `index`; empty if it does.

    Nothing is made to find out: torch asks the driver.
    """
    if _multicast_is_off():
        return f"{_MULTICAST_OFF}={os.environ[_MULTICAST_OFF]} is set"
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    asked = getattr(_SymmetricMemory, "has_multicast_support", None)
    if asked is None:
        return f"the symmetric memory of torch {torch.__version__} has no multicast"
    try:
        return (
            "" if asked(DeviceType.CUDA, index) else f"torch finds no multicast support of cuda:{index} and its driver"
        )
    except RuntimeError as error:
        return str(error).splitlines()[0]


def multicast_pointer(handle: Handle) -> int:
    """Address of the multicast mapping of all ranks' memory; 0 if torch made none."""
    return int(getattr(handle, "multicast_ptr", 0) or 0)


def _multicast_is_off() -> bool:
    return os.environ.get(_MULTICAST_OFF, "0") != "0"


def allocate(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor in memory of its own that a rendezvous maps on peers. Raises `ArenaError` for another backend."""
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import get_backend

    backend = get_backend(device)
    if backend not in (None, "CUDA"):
        raise ArenaError(
            f"torch's symmetric memory uses the backend {backend}, expected CUDA: leave symm_mem.set_backend() and "
            "TORCH_SYMMMEM alone, or disable the rules that need a GPU fabric"
        )
    # Not symm_mem.empty(): that takes a piece of a pool, and all ranks' arenas must begin at the same place of theirs.
    with lasting_tensors():
        return _SymmetricMemory.empty_strided_p2p(shape, strides, dtype, device)


RENDEZVOUS_S = 60.0
"""Longest rendezvous. The ranks have just exchanged their counts, so it takes well under a second."""

_num_rendezvous = 0
_failed = ""
_kept: list[object] = []
"""Memory and handles of the rendezvous performed alone: torch forgets a rendezvous with its memory, but not its
count."""


def num_rendezvous() -> int:
    """Number of rendezvous for symmetric memory that this process completed through this module."""
    return _num_rendezvous


def failed() -> str:
    """Reason why this process cannot take part in a rendezvous any more; empty if it can."""
    return _failed


def catch_up(to: int, timeout_s: float = RENDEZVOUS_S) -> None:
    """Perform rendezvous alone until `num_rendezvous()` is `to`; no other rank takes part."""
    if _num_rendezvous >= to:
        return
    alone = dist.new_group([dist.get_rank()], timedelta(seconds=timeout_s), use_local_synchronization=True)
    while _num_rendezvous < to:
        memory = _little_memory()
        _kept.append((memory, rendezvous(memory, alone, timeout_s)))


def _little_memory() -> torch.Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    device = torch.device("cuda", torch.cuda.current_device())
    return _SymmetricMemory.empty_strided_p2p((16,), (1,), torch.uint8, device)


def rendezvous(
    memory: torch.Tensor, process_group: dist.ProcessGroup, timeout_s: float = RENDEZVOUS_S, multicast: bool = False
) -> Handle:
    """Torch's handle of `memory`, which keeps the peers' parts mapped. All of the group call it, after catching up.

    With `multicast` it may have a `multicast_pointer`, never where `TORCH_SYMM_MEM_DISABLE_MULTICAST` is set. Raises
    what torch raises, and `ArenaError` where a rank does not come within `timeout_s`.
    """
    global _num_rendezvous, _failed
    _num_rendezvous += 1
    begin = time.monotonic()
    try:
        with (
            nullcontext() if multicast and not _multicast_is_off() else _without_multicast(),
            _bounded(process_group, timeout_s),
        ):
            return _join(memory, process_group)
    except Exception as error:
        _failed = f"an earlier rendezvous of torch's symmetric memory failed: {error}".splitlines()[0]
        if multicast and not _multicast_is_off():
            _failed += f" (it asked for an NVLink multicast mapping: start with {_MULTICAST_OFF}=1 to do without)"
        if time.monotonic() - begin < timeout_s:
            raise
        raise ArenaError(
            f"the rendezvous for torch's symmetric memory did not complete within {timeout_s:g} s"
        ) from error


def _join(memory: torch.Tensor, process_group: dist.ProcessGroup) -> Handle:
    import torch.distributed._symmetric_memory as symmetric

    return cast(Handle, symmetric.rendezvous(memory, process_group))


@contextmanager
def _bounded(process_group: dist.ProcessGroup, timeout_s: float) -> Iterator[None]:
    """Limit the waits of torch's rendezvous to `timeout_s`."""
    store = c10d._get_process_group_store(process_group)
    before = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    try:
        with _interrupted_after(timeout_s):
            yield
    finally:
        store.set_timeout(before)


@contextmanager
def _interrupted_after(timeout_s: float) -> Iterator[None]:
    """Interrupt a system call that still waits, with EINTR. A timer of the caller is restored afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    begin = time.monotonic()
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, timeout_s, 1.0)  # again, should it come too early
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - begin), 1e-3), interval_s)


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Torch makes no multicast object, which it does for every other rendezvous where the GPUs can."""
    before = os.environ.get(_MULTICAST_OFF)
    os.environ[_MULTICAST_OFF] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST_OFF]
        else:
            os.environ[_MULTICAST_OFF] = before
