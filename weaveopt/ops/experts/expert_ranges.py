"""Weights of experts that are stored in several tensors, each of consecutive experts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import overload

import torch

from weaveopt.errors import WeaveError

Tensor = torch.Tensor
MAX_RANGES = 8
"""Maximum number of tensors with experts: kernels take an address of each."""


class RangedWeight:
    """[E, N, K], a weight of each of E experts, stored as ranges of consecutive experts: `torch.cat(tensors)`.

    There are at least two ranges, none is empty, and all have the same strides. It has as much of a tensor's interface
    as the experts' kernels use.
    """

    __slots__ = ("_strides", "starts", "tensors")

    def __init__(self, tensors: tuple[Tensor, ...], strides: tuple[int, ...]) -> None:
        """`strides`: those of each tensor, in elements."""
        self.tensors, self._strides = tensors, strides
        self.starts = tuple(accumulate((len(each) for each in tensors[:-1]), initial=0))
        """First expert of each range."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), *self.tensors[0].shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def dim(self) -> int:
        return self.tensors[0].dim()

    @overload
    def stride(self) -> tuple[int, ...]: ...
    @overload
    def stride(self, dim: int) -> int: ...
    def stride(self, dim: int | None = None) -> tuple[int, ...] | int:
        return self._strides if dim is None else self._strides[dim]

    def __len__(self) -> int:
        return self.starts[-1] + len(self.tensors[-1])

    def __getitem__(self, expert: int) -> Tensor:
        """[N, K] of one expert."""
        index = bisect_right(self.starts, expert) - 1
        return self.tensors[index][expert - self.starts[index]]


StackedWeight = Tensor | RangedWeight
"""[E, N, K], in one tensor or in ranges."""


def joined(tensors: Sequence[Tensor]) -> StackedWeight:
    """The weight with `tensors` [any, N, K] as its ranges, a tensor if only one of them has experts.

    Raises `WeaveError` if they differ in anything but their number of experts, or are too many.
    """
    if not tensors:
        raise WeaveError("a weight of experts has at least one range, found none")
    first = tensors[0]
    for each in tensors:
        alike = each.dim() == 3 and each.shape[1:] == first.shape[1:]
        if not alike or (each.dtype, each.device) != (first.dtype, first.device):
            raise WeaveError(
                f"ranges of one weight are [experts, N, K] of the same N, K, dtype and device, found {_text(first)} "
                f"and {_text(each)}"
            )
    filled = [each for each in tensors if len(each)]
    if len(filled) < 2:
        return filled[0] if filled else first
    if len(filled) > MAX_RANGES:
        raise WeaveError(f"a weight has at most {MAX_RANGES} ranges of experts, found {len(filled)}")
    # A single expert's stride to the next one means nothing.
    strides = max(filled, key=len).stride()
    for each in filled:
        if each.stride()[1:] != strides[1:] or (len(each) > 1 and each.stride(0) != strides[0]):
            raise WeaveError(
                f"ranges of one weight have the same strides, found {list(strides)} and {list(each.stride())}"
            )
    return RangedWeight(tuple(filled), strides)


def tensors_of(weight: StackedWeight) -> tuple[Tensor, ...]:
    """The weight's ranges."""
    return weight.tensors if isinstance(weight, RangedWeight) else (weight,)


def whole(weight: StackedWeight) -> Tensor:
    """The weight as one tensor, copied if it is stored in ranges."""
    return torch.cat(weight.tensors) if isinstance(weight, RangedWeight) else weight


def _text(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
