"""References of the ops in plain torch; they run on CPUs, and for dtypes that the kernel does not support."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weaveopt.ops.attention.shapes import RANGE_ROWS, AttentionOperands, Scores, checked_shape, empty_result

Tensor = torch.Tensor


def key_ranges(mask: Tensor, rows: int) -> Tensor:
    """Key ranges of each tile: begin and end of the keys that any query admits, then of the first run that all admit.

    int32 [Bm, Hm, ceil(Sm / rows), 4].
    """
    batch, heads, queries, keys = mask.shape
    tiles = -(-queries // rows)
    if mask.numel() == 0:
        return mask.new_zeros((batch, heads, tiles, 4), dtype=torch.int32)

    def of_tiles(beyond: bool) -> Tensor:
        padded = F.pad(mask, (0, 0, 0, tiles * rows - queries), value=beyond)
        return padded.reshape(batch, heads, tiles, rows, keys)

    admitted, every = of_tiles(False).any(3).to(torch.int32), of_tiles(True).all(3)
    some = admitted.amax(3)
    # argmax is the first of equals: from the left the first key, from the right the last.
    first = admitted.argmax(3) * some
    end = (keys - admitted.flip(3).argmax(3)) * some
    ids = torch.arange(keys, device=mask.device)
    inner_first = torch.where(every, ids, keys).amin(3)
    inner_end = torch.where(every | (ids < inner_first[..., None]), keys, ids).amin(3)
    found = inner_first < keys
    return torch.stack((first, end, inner_first * found, inner_end * found), 3).to(torch.int32)


def admitted_keys(operands: AttentionOperands, causal: bool) -> Tensor | None:
    """Keys that mask (without one: ranges) and causal order admit, broadcastable to [B, H, S, L]; None: all keys."""
    queries, keys = operands.query.shape[2], operands.key.shape[2]
    admitted = operands.mask
    if admitted is None and operands.ranges is not None:
        ranges = operands.ranges
        if ranges.shape[2] > 1:
            ranges = ranges.repeat_interleave(RANGE_ROWS, 2)[:, :, :queries]
        ids = torch.arange(keys, device=ranges.device)
        admitted = (ids >= ranges[..., :1]) & (ids < ranges[..., 1:2])
    if not causal:
        return admitted
    order = torch.ones((queries, keys), dtype=torch.bool, device=operands.query.device).tril(keys - queries)
    return order[None, None] if admitted is None else admitted & order


def reference(operands: AttentionOperands, scores: Scores) -> Tensor:
    """Every step in plain torch, in fp32 but for the probabilities, which are cast to the values' dtype."""
    shape = checked_shape(operands)
    key = operands.key.repeat_interleave(shape.group, 1).float()
    value = operands.value.repeat_interleave(shape.group, 1)
    weights = operands.query.float() @ key.transpose(2, 3) * scores.scale
    if scores.softcap:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    admitted = admitted_keys(operands, scores.causal)
    if admitted is not None:
        weights = weights.masked_fill(~admitted, -torch.inf)
    largest = weights.amax(3, keepdim=True) if shape.keys else weights.new_full((*weights.shape[:3], 1), -torch.inf)
    sinks = None
    if operands.sinks is not None:
        sinks = operands.sinks.float()[None, :, None, None]
        largest = torch.maximum(largest, sinks)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = torch.exp(weights - largest)
    total = weights.sum(3, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - largest)
    probabilities = (weights / total.masked_fill(total == 0, 1.0)).to(value.dtype)
    if admitted is not None:
        # Masked values do not matter, NaN included: a cache is not cleared beyond what is filled.
        unread = ~admitted.expand(*probabilities.shape).any(2)
        value = value.masked_fill(unread[..., None], 0.0)
    return as_result(probabilities.float() @ value.float(), operands)


def on_cpu(operands: AttentionOperands, scores: Scores) -> Tensor:
    """torch's own attention where it can say the same, else `reference`."""
    shape = checked_shape(operands)
    if operands.sinks is not None or scores.softcap or not shape.keys:
        return reference(operands, scores)
    attended = F.scaled_dot_product_attention(
        operands.query, operands.key, operands.value,
        attn_mask=admitted_keys(operands, scores.causal),
        scale=scores.scale, enable_gqa=shape.group > 1,
    )  # fmt: skip
    return as_result(attended, operands)


def as_result(attended: Tensor, operands: AttentionOperands) -> Tensor:
    """`attended` in the result's dtype and strides."""
    result = empty_result(operands.query, operands.value)
    if attended.stride() == result.stride() and attended.dtype is result.dtype:
        return attended
    return result.copy_(attended)
