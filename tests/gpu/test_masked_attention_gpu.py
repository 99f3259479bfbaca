"""The kernels of `masked_attention` against the plain expression, in CUDA graphs, and with NaN around their
operands."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

import weaveopt.ops  # noqa: F401
from tests.gpu.captured import captured
from tests.graphs.attention_cases import LOOKS, Sizes, make_mask, make_operands, poison
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.ops.attention import gpu
from weaveopt.ops.attention.plan import LEAST_ROWS, LONG, MIDDLE, SHORT, AttentionLaunch, plan
from weaveopt.ops.attention.reference import key_ranges, reference
from weaveopt.ops.attention.shapes import RANGE_ROWS, AttentionOperands, AttentionShape, Scores, checked_shape

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16)
HEADS = ((64, 64), (128, 128), (80, 80), (96, 96), (192, 128), (256, 256))


def check(operands: AttentionOperands, scores: Scores, what: str, how: AttentionLaunch | None = None) -> None:
    shape = checked_shape(operands)
    if how is None:
        how = plan(shape, gpu.num_sms(operands.query.device), masked=operands.mask is not None)
    if operands.mask is not None and operands.ranges is None:
        ranges = torch.ops.weave.key_ranges(operands.mask, RANGE_ROWS)
        assert torch.equal(ranges, key_ranges(operands.mask, RANGE_ROWS)), what
        operands = replace(operands, ranges=ranges)
    got = gpu.launch_attention(operands, scores, how)
    assert got.transpose(1, 2).is_contiguous()
    assert_close(got, reference(operands, scores), KERNEL, f"{what} {how}")


@pytest.mark.parametrize(("key_size", "value_size"), HEADS)
def test_decode_equals_the_reference(key_size: int, value_size: int) -> None:
    choice = random.Random(key_size + value_size)
    for index, look in enumerate(some(LOOKS)):
        for queries in (1, choice.choice([2, 4, 7]), 16):
            sizes = Sizes(
                batch=choice.choice([1, 3]), key_heads=choice.choice([1, 4]), group=choice.choice([1, 4, 7, 8]),
                queries=queries, keys=choice.choice([64, 200, 1000, 1024]),
                key_size=key_size, value_size=value_size,
            )  # fmt: skip
            dtype, with_sinks = choice.choice(DTYPES), choice.random() < 0.4
            scores = Scores(key_size**-0.5, choice.choice([0.0, 0.0, 20.0]), choice.random() < 0.3)
            operands = make_operands(sizes, look, dtype, index, with_sinks, "cuda")
            what = f"{look} {sizes} {dtype} {scores} sinks {with_sinks}"
            check(operands, scores, what)
            shape = checked_shape(operands)
            how = replace(
                plan(shape, 132),
                num_splits=choice.choice([1, 2, 5, 33]),
                early_combine=index % 2 == 1,
                inner=index % 3 == 0,
                combine_columns=(32, 128)[index % 2],
                combine_warps=(1, 4)[index % 2],
            )
            if how.block_m == LEAST_ROWS and max(key_size, value_size) <= 128:
                loop = choice.choice([SHORT, MIDDLE, LONG])
                how = replace(how, block_n=loop.block_n, num_warps=loop.num_warps, num_stages=loop.num_stages)
            check(operands, scores, what, how)


@pytest.mark.parametrize(("key_size", "value_size"), HEADS)
@pytest.mark.parametrize("look", ["none", "window", "left_padding", "packed", "some_rows_empty", "random"])
def test_prefill_equals_the_reference(look: str, key_size: int, value_size: int) -> None:
    choice = random.Random(key_size)
    for queries, more in ((300, 0), (257, 400), (128, 7)):
        sizes = Sizes(2, 4, choice.choice([1, 4, 7]), queries, queries + more, key_size, value_size)
        scores = Scores(key_size**-0.5, choice.choice([0.0, 30.0]), look == "none")
        dtype = choice.choice(DTYPES)
        operands = make_operands(sizes, look, dtype, queries, choice.random() < 0.5, "cuda")
        shape = checked_shape(operands)
        # As if there were few SMs: long tiles, halves of them without a mask; and as there are: split keys.
        for num_sms in (1, 20, 132):
            how = plan(shape, num_sms, masked=operands.mask is not None)
            check(operands, scores, f"{look} {sizes} {scores} {dtype}", how)


def test_nothing_leaks_from_beyond_what_is_filled() -> None:
    for queries, first, end in itertools.product((1, 5, 140), (0, 3, 64, 301), (302, 512, 640)):
        sizes = Sizes(batch=2, key_heads=2, group=4, queries=queries, keys=700, key_size=128, value_size=128)
        operands = make_operands(sizes, "none", torch.bfloat16, end, device="cuda")
        mask = torch.zeros(1, 1, queries, 700, dtype=torch.bool, device="cuda")
        mask[..., first:end] = True
        want = reference(replace(operands, mask=mask), Scores(0.1))
        poison(operands, first, end)
        got = torch.ops.weave.masked_attention(
            operands.query, operands.key, operands.value, mask, None, None, 0.1, 0.0, False
        )
        assert_close(got, want, KERNEL, f"{queries} queries, keys {first} to {end}")


def test_strides_and_masks_that_are_broadcast() -> None:
    sizes = Sizes(batch=3, key_heads=2, group=4, queries=4, keys=129, key_size=64)
    plain = make_operands(sizes, "none", torch.float16, 1, device="cuda")
    scores = Scores(0.2)
    by_batch = torch.rand(3, 1, 1, 129, device="cuda") < 0.5
    by_head = torch.rand(1, 8, 4, 129, device="cuda") < 0.5
    for mask in (by_batch, by_batch.expand(3, 8, 4, 129), by_head, by_head.expand(3, 8, 4, 129), by_head[:, :1]):
        got = torch.ops.weave.masked_attention(plain.query, plain.key, plain.value, mask, None, None, 0.2, 0.0, False)
        assert_close(got, reference(replace(plain, mask=mask), scores), KERNEL, str(mask.stride()))
    turned = replace(plain, key=plain.key.transpose(2, 3).contiguous().transpose(2, 3), mask=by_batch)
    got = torch.ops.weave.masked_attention(
        turned.query, turned.key, turned.value, by_batch, None, None, 0.2, 0.0, False
    )
    assert_close(got, reference(turned, scores), KERNEL, "keys whose elements are apart")


@pytest.mark.parametrize("early_combine", [False, True])
def test_a_graph_sees_what_is_filled_at_its_replay(early_combine: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for queries, batch in ((1, 1), (1, 8), (4, 3)):
        sizes = Sizes(batch=batch, key_heads=4, group=8, queries=queries, keys=4096, key_size=128, value_size=128)
        operands = make_operands(sizes, "causal_filled", torch.bfloat16, 0, device="cuda")
        assert operands.mask is not None
        mask = operands.mask
        how = replace(plan(checked_shape(operands), 132), early_combine=early_combine)
        assert how.num_splits > 1

        def step(
            operands: AttentionOperands = operands, mask: torch.Tensor = mask, how: AttentionLaunch = how
        ) -> torch.Tensor:
            ranges = torch.ops.weave.key_ranges(mask, RANGE_ROWS)
            return gpu.launch_attention(replace(operands, ranges=ranges), Scores(0.09), how)

        graph, got = captured(step)
        for look in ("causal_filled", "window", "left_padding", "some_rows_empty", "causal_filled"):
            changed = make_mask(look, sizes, generator)
            assert changed is not None
            mask.copy_(changed)
            graph.replay()
            assert_close(got, reference(operands, Scores(0.09)), KERNEL, f"{sizes} {look}")


def test_long_caches_of_many_sequences() -> None:
    """More than 2^31 elements: offsets are of 64 bits."""
    shape = AttentionShape(batch=40, heads=8, key_heads=8, queries=1, keys=65536, key_size=128, value_size=128)
    query = torch.randn(40, 1, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    cache = torch.zeros(40, 8, 65536, 128, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(40, 1, 1, 65536, dtype=torch.bool, device="cuda")
    mask[..., -100:] = True
    cache[:, :, -100:].normal_()
    got = torch.ops.weave.masked_attention(query, cache, cache, mask, None, None, 0.1, 0.0, False)
    near = cache[:, :, -100:]
    want = reference(AttentionOperands(query, near, near), Scores(0.1))
    assert_close(got, want, KERNEL, str(shape))


def test_fp32_runs_as_the_plain_expression() -> None:
    operands = make_operands(Sizes(queries=3), "window", torch.float32, 1, True, "cuda")
    got = torch.ops.weave.masked_attention(
        operands.query, operands.key, operands.value, operands.mask, None, operands.sinks, 0.125, 0.0, False
    )
    assert_close(got, reference(operands, Scores(0.125)), KERNEL)
