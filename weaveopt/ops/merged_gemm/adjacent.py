"""Weights of several linear layers, moved so that they are adjacent in memory and one GEMM multiplies by all.

Parameters keep their identity, shape and values: each becomes a view of its part, and what it occupied before is free
again. So optimizers, `state_dict` and updates in place go on as they did. Weights whose memory anything else refers to
(a `state_dict` that is kept, flat buffers of FSDP, another merge) stay where they are.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Tensor = torch.Tensor
_kept: dict[int, StorageWeakRef] = {}
"""Memory of the first of weights that could not be moved, by its address."""
_captured: dict[int, StorageWeakRef] = {}
"""Memory that CUDA graphs read, by its address."""
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


def keep_in_place(tensors: Sequence[object]) -> None:
    """Takes what a CUDA graph reads: it replays with these addresses, so weights among them are not moved any more."""
    _forget_expired(_captured)
    for each in tensors:
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            _captured[storage.data_ptr()] = StorageWeakRef(storage)


def joined(weights: Sequence[Tensor]) -> Tensor | None:
    """`torch.cat(weights)` without a copy; None if they are not adjacent, in this order, in one storage."""
    first = weights[0]
    storage = first.untyped_storage().data_ptr()
    for before, after in pairwise(weights):
        follows = after.data_ptr() == before.data_ptr() + before.nbytes
        if not follows or after.untyped_storage().data_ptr() != storage or not before.is_contiguous():
            return None
    if not weights[-1].is_contiguous():
        return None
    return first.as_strided((sum(each.shape[0] for each in weights), *first.shape[1:]), first.stride())


def adjoin(weights: Sequence[Tensor]) -> str:
    """Makes weights of equal rows adjacent; returns why they stay where they are, empty if they are adjacent now.

    While they are moved they take their memory twice.
    """
    with _moving:
        if joined(weights) is not None:
            return ""
        why = next((why for each in weights if (why := _kept_by(each))), "") or _moved(weights)
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
        parts = memory.split([each.shape[0] for each in weights])
        before = [each.untyped_storage() for each in weights]
        for weight, part in zip(weights, parts, strict=True):
            part.copy_(weight)
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)  # other streams may still read the weights where they were
        del before
    return ""


def _kept_by(weight: Tensor) -> str:
    """Why a weight cannot be moved; empty if nothing but itself refers to its memory."""
    if weight.is_inference():
        return "the weights were made in inference mode"
    storage = weight.untyped_storage()
    captured = _captured.get(storage.data_ptr())
    if captured is not None and not captured.expired():
        return "a CUDA graph reads the weights where they are"
    if weight.storage_offset() or storage.nbytes() != weight.nbytes or not weight.is_contiguous():
        return "the weights are parts of other tensors"
    if _references(weight) > _references(torch.empty(1)):
        return "other tensors share the weights' memory"
    return ""


def _references(tensor: Tensor) -> int:
    """How many tensors and Python objects refer to a tensor's memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
