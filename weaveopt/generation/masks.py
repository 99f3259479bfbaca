"""The attention mask of one decode step, in the form that models take from transformers' own loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weaveopt.generation.layers import FullLayer, RingLayer

Masks = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class MaskForm:
    """Form of the attention masks that a model takes."""

    layer_types: tuple[str, ...]
    """Names under which it takes one mask each; empty where it takes a single mask for all layers."""
    additive: bool
    """Zeros and the dtype's lowest number, as attention in plain torch takes them, instead of booleans."""
    dtype: torch.dtype


def masks(form: MaskForm, layers: list[FullLayer], length: Tensor, padding: Tensor) -> Masks:
    """Masks of a query at position `length`: `(position <= length) & (position > length - window) & padding[:,
    position]`.

    `length` is an int64 scalar on the device, `padding` `[batch, cache length]` and bool: false at left padding.
    Each mask is `[batch, 1, 1, slots]`.
    """
    found: dict[bool, Tensor] = {}
    for layer in layers:
        if layer.is_sliding not in found:
            found[layer.is_sliding] = _finished(form, _mask(layer, length, padding))
    if not form.layer_types:
        return next(iter(found.values()))
    return {name: found[name == "sliding_attention"] for name in form.layer_types}


def _mask(layer: FullLayer, length: Tensor, padding: Tensor) -> Tensor:
    seen: Tensor
    slots = torch.arange(layer.max_cache_len, device=length.device)
    if isinstance(layer, RingLayer):
        # The newest position that a slot can hold when `length` is the newest of all; below 0: it holds none yet.
        positions = length - (length - slots) % layer.max_cache_len
        seen = (positions >= 0) & (positions > length - layer.window)
        seen = seen & padding[:, positions.clamp(min=0)]
    else:
        seen = (slots <= length) & padding
    return seen[:, None, None, :]


def _finished(form: MaskForm, seen: Tensor) -> Tensor:
    if not form.additive:
        return seen
    lowest = torch.finfo(form.dtype).min
    added: Tensor = torch.where(seen, 0.0, lowest).to(form.dtype)
    return added
