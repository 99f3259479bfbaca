"""Attention of decode and of prefill on one GPU: cases, their data, and every implementation of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import weaveopt.ops  # noqa: F401
from benchmarks.ranks import Place
from benchmarks.timing import Effort, Step, replayed_us
from weaveopt.ops.attention import gpu
from weaveopt.ops.attention.plan import AttentionLaunch, plan
from weaveopt.ops.attention.reference import reference
from weaveopt.ops.attention.shapes import RANGE_ROWS, AttentionOperands, AttentionShape, Scores

Tensor = torch.Tensor
Call = Callable[[int], Tensor]
"""Computes the case over the copy of this number."""

HEAD_SIZE = 128
GROUP = 8
PREFILL_HEADS, PREFILL_KEY_HEADS = 32, 4
SCALE = HEAD_SIZE**-0.5
BEYOND_L2_BYTES = 160e6
MOST_COPIES = 192
MOST_REPEATED_BYTES = 24e9
"""Larger caches are not repeated for every query head: the copy would not fit beside them."""


@dataclass(frozen=True)
class DecodeCase:
    """One new token for each of `batch` sequences."""

    batch: int
    filled: int
    key_heads: int
    """Each read by `GROUP` query heads."""
    capacity: int
    """Positions of the cache."""

    @property
    def filled_bytes(self) -> int:
        return self.batch * self.filled * self.key_heads * HEAD_SIZE * 2 * 2

    @property
    def cache_bytes(self) -> int:
        return self.batch * self.capacity * self.key_heads * HEAD_SIZE * 2 * 2


class DecodeData:
    """Tensors of one case, and the ways to compute it."""

    def __init__(self, case: DecodeCase) -> None:
        self.case, self.device = case, torch.device("cuda")
        heads = case.key_heads * GROUP
        self.shape = AttentionShape(case.batch, heads, case.key_heads, 1, case.capacity, HEAD_SIZE, HEAD_SIZE)
        self.num_copies = min(MOST_COPIES, max(1, -(-int(BEYOND_L2_BYTES) // case.cache_bytes)))
        size = (self.num_copies, case.batch, case.key_heads, case.capacity, HEAD_SIZE)
        self.keys = torch.empty(size, dtype=torch.bfloat16, device=self.device).normal_()
        self.values = torch.empty(size, dtype=torch.bfloat16, device=self.device).normal_()
        self.query = torch.randn(case.batch, 1, heads, HEAD_SIZE, device=self.device).bfloat16().transpose(1, 2)
        row = torch.arange(case.capacity, device=self.device) < case.filled
        self.mask = row.expand(case.batch, 1, 1, case.capacity).contiguous()
        self.ranges = gpu.key_ranges(self.mask, RANGE_ROWS)

    def fits(self, name: str) -> bool:
        repeats = name in ("repeat_mask", "sdpa_gqa_mask")
        return not repeats or self.case.cache_bytes * GROUP <= MOST_REPEATED_BYTES

    def expected(self) -> Tensor:
        """In fp32, sequence by sequence: the whole would not fit."""
        sequences = []
        for b in range(self.case.batch):
            one = slice(b, b + 1)
            key, value = (t[0, one, :, : self.case.filled] for t in (self.keys, self.values))
            sequences.append(reference(AttentionOperands(self.query[one], key, value), Scores(SCALE)).float())
        return torch.cat(sequences)

    def weave(self, how: AttentionLaunch) -> Call:
        def call(at: int) -> Tensor:
            operands = AttentionOperands(self.query, self.keys[at], self.values[at], self.mask, self.ranges)
            return gpu.launch_attention(operands, Scores(SCALE), how)

        return call

    def planned(self) -> Call:
        def call(at: int) -> Tensor:
            attended: Tensor = torch.ops.weave.masked_attention(
                self.query, self.keys[at], self.values[at], self.mask, self.ranges, None, SCALE, 0.0, False
            )
            return attended

        return call

    def flex(self) -> Call:
        """FlexAttention's decode kernel, with a block mask made beforehand from the filled length on the device."""
        filled = torch.full((self.case.batch,), self.case.filled, device=self.device)

        def admitted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv < filled[b]

        blocks = create_block_mask(admitted, self.case.batch, None, 1, self.case.capacity, device="cuda")
        run = compiled_flex()
        return lambda at: run(
            self.query, self.keys[at], self.values[at], block_mask=blocks, scale=SCALE, enable_gqa=True
        )

    def sdpa(self, masked: bool) -> Call:
        """Without a mask it reads the whole cache, and is right only where that is filled: the filled part then."""
        mask = self.mask if masked else None
        until = self.case.capacity if masked else self.case.filled

        def call(at: int) -> Tensor:
            key, value = self.keys[at, :, :, :until], self.values[at, :, :, :until]
            return F.scaled_dot_product_attention(self.query, key, value, mask, scale=SCALE, enable_gqa=True)

        return call

    def repeated(self) -> Call:
        """Attention of compiled HF graphs: keys and values repeated for every query head, and a mask."""
        whole = (self.case.batch, self.case.key_heads * GROUP, self.case.capacity, HEAD_SIZE)

        def call(at: int) -> Tensor:
            key, value = (
                t[:, :, None].expand(-1, -1, GROUP, -1, -1).reshape(whole) for t in (self.keys[at], self.values[at])
            )
            return F.scaled_dot_product_attention(self.query, key, value, self.mask, scale=SCALE)

        return call


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    return torch.compile(flex_attention, dynamic=False)


DECODE_VARIANTS: Mapping[str, Callable[[DecodeData], Call]] = MappingProxyType({
    "weave": DecodeData.planned,
    "flex": DecodeData.flex,
    "sdpa_gqa": lambda data: data.sdpa(masked=False),
    "sdpa_gqa_mask": lambda data: data.sdpa(masked=True),
    "repeat_mask": DecodeData.repeated,
})  # fmt: skip


class PrefillData:
    """One sequence of `tokens`, causal, without anything cached."""

    def __init__(self, tokens: int) -> None:
        def normal(heads: int) -> Tensor:
            return torch.randn(1, tokens, heads, HEAD_SIZE, device="cuda").bfloat16().transpose(1, 2)

        self.tokens = tokens
        self.query, self.key, self.value = normal(PREFILL_HEADS), normal(PREFILL_KEY_HEADS), normal(PREFILL_KEY_HEADS)
        self.mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="cuda").tril()
        self.ranges = gpu.key_ranges(self.mask, RANGE_ROWS)

    @property
    def flops(self) -> float:
        """Operations of both products, over the admitted half."""
        return 2.0 * self.tokens * self.tokens * PREFILL_HEADS * HEAD_SIZE

    def weave(self, masked: bool, how: AttentionLaunch | None = None) -> Call:
        mask, ranges = (self.mask, self.ranges) if masked else (None, None)
        operands, scores = (
            AttentionOperands(self.query, self.key, self.value, mask, ranges),
            Scores(SCALE, causal=not masked),
        )
        if how is None:
            shape = AttentionShape(1, PREFILL_HEADS, PREFILL_KEY_HEADS, self.tokens, self.tokens, HEAD_SIZE, HEAD_SIZE)
            how = plan(shape, gpu.num_sms(self.query.device), masked=masked)
        return lambda _: gpu.launch_attention(operands, scores, how)

    def sdpa(self, backend: SDPBackend, masked: bool) -> Call:
        def call(_: int) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    self.query, self.key, self.value, self.mask if masked else None,
                    is_causal=not masked, scale=SCALE, enable_gqa=True,
                )  # fmt: skip

        return call

    def repeated(self) -> Call:
        """Attention of compiled HF graphs."""
        count = PREFILL_HEADS // PREFILL_KEY_HEADS

        def call(_: int) -> Tensor:
            key, value = (t.repeat_interleave(count, 1) for t in (self.key, self.value))
            return F.scaled_dot_product_attention(self.query, key, value, self.mask, scale=SCALE)

        return call


PREFILL_VARIANTS: Mapping[str, Callable[[PrefillData], Call]] = MappingProxyType({
    "flash": lambda data: data.sdpa(SDPBackend.FLASH_ATTENTION, masked=False),
    "cudnn": lambda data: data.sdpa(SDPBackend.CUDNN_ATTENTION, masked=False),
    "cudnn_mask": lambda data: data.sdpa(SDPBackend.CUDNN_ATTENTION, masked=True),
    "repeat_mask": PrefillData.repeated,
    "weave_causal": lambda data: data.weave(masked=False),
    "weave_mask": lambda data: data.weave(masked=True),
})  # fmt: skip


def times_us(
    place: Place, calls: Mapping[str, Call], num_copies: int, least_calls: int = 3, rounds: int = 9
) -> dict[str, float]:
    """Microseconds a call by name, of graphs that go through all copies; without those whose capture raises."""
    order = [at % num_copies for at in range(max(num_copies, least_calls))]

    def over_all(call: Call) -> Step:
        def step() -> None:
            for at in order:
                call(at)

        return step

    steps = {name: over_all(call) for name, call in calls.items()}
    return replayed_us(place, steps, Effort(rounds, 1), len(order), may_fail=tuple(calls))


def usable(calls: Mapping[str, Callable[[], Call]], want: Tensor | None, atol: float) -> dict[str, Call]:
    """Those that run and agree with `want`, or with the first of them; others are said and left out."""
    found: dict[str, Call] = {}
    for name, make in calls.items():
        try:
            call = make()
            got = call(0).float()
        except Exception as refused:  # Triton has no common base: out of shared memory, of registers
            print(f"  {name}: {str(refused).splitlines()[0][:140]}", flush=True)
            continue
        want = got if want is None else want
        error = (got - want).abs().max().item()
        if error < atol:
            found[name] = call
        else:
            print(f"  {name}: off by {error}, left out", flush=True)
    return found
