"""Calls of `masked_attention`, random and hard, and an expression for them that is not the op's own."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from weaveopt.ops.attention.shapes import AttentionOperands, Scores

Tensor = torch.Tensor
LOOKS = ("none", "random", "filled", "window", "left_padding", "packed", "causal_filled", "some_rows_empty")


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call."""

    batch: int = 2
    key_heads: int = 2
    group: int = 4
    queries: int = 1
    keys: int = 100
    key_size: int = 64
    value_size: int = 64

    @property
    def heads(self) -> int:
        return self.key_heads * self.group


def make_mask(look: str, sizes: Sizes, generator: torch.Generator) -> Tensor | None:
    """A mask as models make them, on the CPU; `look` is one of `LOOKS`."""
    batch, queries, keys = sizes.batch, sizes.queries, sizes.keys
    ids = torch.arange(keys)
    fills = torch.randint(min(queries, keys), keys + 1, (batch, 1, 1, 1), generator=generator)
    positions = fills - queries + torch.arange(queries)[:, None]
    causal = ids <= positions
    if look == "none":
        return None
    if look == "random":
        return torch.rand((batch, 1, queries, keys), generator=generator) < 0.3
    if look == "filled":
        return (ids < fills).expand(batch, 1, 1, keys)
    if look == "window":
        return causal & (ids > positions - max(1, keys // 4))
    if look == "left_padding":
        return causal & (ids >= fills // 2)
    if look == "packed":
        document = torch.randint(0, 3, (batch, 1, 1, keys), generator=generator).sort(-1).values
        own = torch.gather(document.expand(batch, 1, queries, keys), 3, positions.clamp(0, keys - 1))
        return causal & (document == own[..., :1])
    if look == "causal_filled":
        return causal
    if look == "some_rows_empty":
        mask = causal.clone()
        mask[0] = False
        mask[:, :, queries // 2] = False
        return mask
    raise ValueError(look)


def make_operands(
    sizes: Sizes, look: str, dtype: torch.dtype, seed: int, with_sinks: bool = False, device: str = "cpu"
) -> AttentionOperands:
    """Random operands in the strides of models: queries from [B, S, H, D], keys from a cache [B, Hkv, L, D]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    query = normal(sizes.batch, sizes.queries, sizes.heads, sizes.key_size).transpose(1, 2)
    key = normal(sizes.batch, sizes.key_heads, sizes.keys, sizes.key_size)
    value = normal(sizes.batch, sizes.keys, sizes.key_heads, sizes.value_size).transpose(1, 2)
    mask = make_mask(look, sizes, generator)
    sinks = torch.randn(sizes.heads, generator=generator).to(device) if with_sinks else None
    return AttentionOperands(query, key, value, None if mask is None else mask.to(device), None, sinks)


def expected(operands: AttentionOperands, scores: Scores) -> Tensor:
    """Row by row in fp64, over the keys that the row may attend to and no others."""
    query, key, value = (t.double().cpu() for t in (operands.query, operands.key, operands.value))
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    group = heads // key.shape[1]
    whole = (batch, heads, queries, keys)
    mask = torch.ones(whole, dtype=torch.bool) if operands.mask is None else operands.mask.cpu().expand(whole)
    out = torch.zeros(batch, heads, queries, value.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                limit = max(0, i + keys - queries + 1) if scores.causal else keys
                seen = mask[b, h, i, :limit].nonzero()[:, 0]
                if not len(seen):
                    continue
                logits = key[b, h // group, seen] @ query[b, h, i] * scores.scale
                if scores.softcap:
                    logits = scores.softcap * torch.tanh(logits / scores.softcap)
                if operands.sinks is not None:
                    logits = torch.cat((logits, operands.sinks[h].double().cpu()[None]))
                weights = torch.softmax(logits, 0)[: len(seen)]
                out[b, h, i] = weights @ value[b, h // group, seen]
    return out


def poison(operands: AttentionOperands, first: int, end: int) -> None:
    """NaN in keys and values outside of [first, end)."""
    for tensor in (operands.key, operands.value):
        tensor[:, :, :first] = math.nan
        tensor[:, :, end:] = math.nan


def random_sizes(choice: random.Random) -> Sizes:
    key_size, value_size = choice.choice([(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
    queries = choice.choice([1, 1, 2, 5, 16, 17, 40])
    return Sizes(
        batch=choice.choice([1, 2]), key_heads=choice.choice([1, 2]), group=choice.choice([1, 2, 4, 7]),
        queries=queries, keys=queries + choice.choice([0, 1, 31, 70]), key_size=key_size, value_size=value_size,
    )  # fmt: skip
