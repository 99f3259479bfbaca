"""Weights of several linear layers, moved so that they are adjacent in memory and one GEMM multiplies by all.

Parameters keep their identity, shape and values, and what they occupied before is free again. Each has a storage of its
own, which covers its part of the common memory and nothing else: code that saves checkpoints takes tensors of one
storage for one tensor, and drops all but the first. So optimizers, `state_dict`, files and updates in place go on as
they did. Weights whose memory anything else refers to (a `state_dict` that is kept, flat buffers of FSDP, weights that
are adjacent to others already) stay where they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack

Tensor = torch.Tensor
_memories: dict[int, StorageWeakRef] = {}
"""Common memory that each moved weight is in, by the weight's address. It is free once none of them lives."""
_kept: dict[int, StorageWeakRef] = {}
"""Memory of the first of weights that could not be moved, by its address."""
_num_apart = 0
_moving = threading.Lock()


def num_apart() -> int:
    """Calls in this process that found weights apart which may yet be moved."""
    return _num_apart


def note_apart(weights: Sequence[Tensor]) -> None:
    """Takes the weights of a call that were not adjacent."""
    global _num_apart
    kept = _kept.get(weights[0].data_ptr())
    _num_apart += kept is None or kept.expired()


def joined(weights: Sequence[Tensor]) -> Tensor | None:
    """`torch.cat(weights)` without a copy; None if `adjoin` did not make them adjacent in this order."""
    first = weights[0]
    if len(weights) == 1:
        return first
    memory = _memories.get(first.data_ptr())
    if memory is None or not all(each.is_contiguous() for each in weights):
        return None
    for before, after in pairwise(weights):
        other = _memories.get(after.data_ptr())
        follows = after.data_ptr() == before.data_ptr() + before.nbytes
        if other is None or other.cdata != memory.cdata or not follows:
            return None
    storage = cast("torch.UntypedStorage | None", torch.UntypedStorage._new_with_weak_ptr(memory.cdata))
    if storage is None:
        return None
    begin = (first.data_ptr() - storage.data_ptr()) // first.itemsize
    sizes = (sum(each.shape[0] for each in weights), *first.shape[1:])
    return torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, begin, sizes, first.stride())


def adjoin(weights: Sequence[Tensor], are_read: Callable[[], bool] = lambda: False) -> str:
    """Makes weights of equal rows adjacent; returns why they stay where they are, empty if they are adjacent now.

    While they are moved they take their memory twice. `are_read`: true if a CUDA graph of others may read them.
    """
    with _moving:
        if joined(weights) is not None:
            return ""
        why = next((why for each in weights if (why := _kept_by(each))), "")
        if not why and are_read():
            why = "a CUDA graph that was captured before may read the weights where they are: compile first"
        why = why or _moved(weights)
        if why:
            _forget_expired(_kept)
            _kept[weights[0].data_ptr()] = StorageWeakRef(weights[0].untyped_storage())
        return why


def _forget_expired(known: dict[int, StorageWeakRef]) -> None:
    for address in [address for address, storage in known.items() if storage.expired()]:
        del known[address]


def _moved(weights: Sequence[Tensor]) -> str:
    """Move weights; returns why not, if there is no memory for it."""
    with torch.inference_mode(False), torch.no_grad():
        first = weights[0]
        try:
            memory = torch.empty(
                (sum(each.shape[0] for each in weights), *first.shape[1:]), dtype=first.dtype, device=first.device
            )
        except torch.OutOfMemoryError:
            return "there is no memory to move the weights in"
        # Of a capsule each gets a storage that begins and ends with it, and keeps the memory.
        parts = [from_dlpack(to_dlpack(each)) for each in memory.split([each.shape[0] for each in weights])]
        before = [each.untyped_storage() for each in weights]
        for weight, part in zip(weights, parts, strict=True):
            part.copy_(weight)
        _forget_expired(_memories)
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part
            _memories[part.data_ptr()] = StorageWeakRef(memory.untyped_storage())
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)  # other streams may still read the weights where they were
        del before
    return ""


def _kept_by(weight: Tensor) -> str:
    """Why a weight cannot be moved; empty if nothing but itself refers to its memory."""
    if weight.is_inference():
        return "the weights were made in inference mode"
    storage = weight.untyped_storage()
    memory = _memories.get(weight.data_ptr())
    if memory is not None and not memory.expired():
        return "the weights are adjacent to others already"
    if weight.storage_offset() or storage.nbytes() != weight.nbytes or not weight.is_contiguous():
        return "the weights are parts of other tensors"
    if _references(weight) > _references(torch.empty(1)):
        return "other tensors share the weights' memory"
    return ""


def _references(tensor: Tensor) -> int:
    """How many tensors and Python objects refer to a tensor's memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
