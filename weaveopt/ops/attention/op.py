"""`weave::key_ranges` and `weave::masked_attention`.

    def key_ranges(mask, rows):           # bool [Bm, Hm, Sm, L] -> int32 [Bm, Hm, ceil(Sm / rows), 4]
        tiles = pad(mask).reshape(Bm, Hm, -1, rows, L)
        return first and last + 1 of what is set in tiles.any(3), first and end of the first run in tiles.all(3) (of
            queries that exist); 0 and 0 where none is set

    def masked_attention(query, key, value, mask, ranges, sinks, scale, softcap, causal):
        key = key.repeat_interleave(H // Hkv, 1)
        value = value.repeat_interleave(H // Hkv, 1)
        scores = query @ key.transpose(2, 3) * scale
        if softcap:
            scores = softcap * tanh(scores / softcap)
        scores = where(mask & (j <= i + L - S if causal), scores, -inf)
        scores = cat((scores, sinks), 3)                  # sinks [H]: one more logit a head
        return softmax(scores)[..., :L].to(value.dtype) @ value     # 0 where a query may attend to nothing

Shapes: `query` [B, H, S, D], `key` [B, Hkv, L, D], `value` [B, Hkv, L, Dv] with H % Hkv == 0, of one dtype; `mask` bool
[B or 1, H or 1, S or 1, L], True where a query may attend; the result [B, H, S, Dv] in the query's dtype, in memory
[B, S, H, Dv]. Any strides. Sums are in fp32.

`ranges` is `key_ranges(mask, RANGE_ROWS)`, made once for all layers that share a mask: keys outside of a tile's range
are not read, and of keys within its inner range the mask need not be. Without `ranges`, and with a mask, the op makes
them on its own. Ranges without a mask admit every key from first to end. A key within its range that the mask hides
from all still has to be finite, as in torch; keys outside need not be.

On GPUs a Triton kernel runs for bf16 and fp16; fp32, head sizes above 256, and GPUs without Triton get the plain
expression. Nothing waits for the device: calls can be captured in CUDA graphs, and what is filled may change between
replays. On CPUs torch's own attention runs where there is neither sink nor soft cap.

Raises `WeaveError` where shapes or dtypes contradict one another.
"""

from __future__ import annotations

import torch

from weaveopt.errors import WeaveError
from weaveopt.ops.attention import gpu, reference
from weaveopt.ops.attention.shapes import AttentionOperands, Scores, checked_shape, empty_result

Tensor = torch.Tensor


def _key_ranges(mask: Tensor, rows: int) -> Tensor:
    _fake_key_ranges(mask, rows)
    return gpu.key_ranges(mask, rows) if mask.is_cuda else reference.key_ranges(mask, rows)


def _masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    ranges: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
) -> Tensor:
    operands, scores = AttentionOperands(query, key, value, mask, ranges, sinks), Scores(scale, softcap, causal)
    return gpu.masked_attention(operands, scores) if query.is_cuda else reference.on_cpu(operands, scores)


def _fake_key_ranges(mask: Tensor, rows: int) -> Tensor:
    if mask.dim() != 4 or mask.dtype is not torch.bool or rows < 1:
        raise WeaveError(
            f"key_ranges takes a torch.bool of 4 dimensions and at least one row a tile, found {list(mask.shape)} "
            f"{mask.dtype} and {rows}"
        )
    batch, heads, queries, _ = mask.shape
    return mask.new_empty((batch, heads, -(-queries // rows), 4), dtype=torch.int32)


def _fake_masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    ranges: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
) -> Tensor:
    checked_shape(AttentionOperands(query, key, value, mask, ranges, sinks))
    return empty_result(query, value)


_library = torch.library.Library("weave", "FRAGMENT")
# Any strides are taken, so Inductor need not copy inputs into the ones that were traced.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_library.define("key_ranges(Tensor mask, int rows) -> Tensor", tags=_TAGS)
_library.define(
    "masked_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? ranges, Tensor? sinks, "
    "float scale, float softcap, bool causal) -> Tensor",
    tags=_TAGS,
)
for _device in ("CPU", "CUDA"):
    _library.impl("key_ranges", _key_ranges, _device)
    _library.impl("masked_attention", _masked_attention, _device)
torch.library.register_fake("weave::key_ranges", _fake_key_ranges, lib=_library)
torch.library.register_fake("weave::masked_attention", _fake_masked_attention, lib=_library)
