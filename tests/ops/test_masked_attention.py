"""`weave::masked_attention` and `weave::key_ranges` on the CPU, and what is planned for GPUs."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys

import pytest
import torch

import weaveopt.ops  # noqa: F401
from tests.graphs.attention_cases import LOOKS, Sizes, expected, make_mask, make_operands, poison, random_sizes
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.errors import WeaveError
from weaveopt.ops.attention.plan import LONG, MAX_SPLITS, MIDDLE, SHORT, AttentionLaunch, plan
from weaveopt.ops.attention.reference import reference
from weaveopt.ops.attention.shapes import RANGE_ROWS, AttentionOperands, AttentionShape, Scores

SCORES = (
    Scores(0.125),
    Scores(0.3, causal=True),
    Scores(0.125, softcap=5.0),
    Scores(0.125, softcap=3.0, causal=True),
)


def run(operands: AttentionOperands, scores: Scores) -> torch.Tensor:
    return torch.ops.weave.masked_attention(
        operands.query, operands.key, operands.value, operands.mask, operands.ranges, operands.sinks,
        scores.scale, scores.softcap, scores.causal,
    )  # fmt: skip


@pytest.mark.parametrize("look", LOOKS)
def test_equals_the_sum_row_by_row(look: str) -> None:
    for seed, (scores, with_sinks) in enumerate(itertools.product(SCORES, (False, True))):
        sizes = random_sizes(random.Random(seed * 31 + LOOKS.index(look)))
        operands = make_operands(sizes, look, torch.float32, seed, with_sinks)
        got, want = run(operands, scores), expected(operands, scores).float()
        assert_close(got, want, KERNEL, f"{sizes} {scores} sinks {with_sinks}")
        assert_close(reference(operands, scores), want, KERNEL, f"reference of {sizes} {scores} sinks {with_sinks}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_the_result_of_a_row_without_keys(dtype: torch.dtype) -> None:
    operands = make_operands(Sizes(queries=5), "some_rows_empty", dtype, 3)
    got = run(operands, Scores(0.125))
    assert_close(got, expected(operands, Scores(0.125)).to(dtype), KERNEL)
    assert not got[0].any() and not got[:, :, 2].any() and got[1, :, 1].any()


def test_what_nobody_may_read_may_be_anything() -> None:
    """With a sink: torch's own attention, which runs without one, multiplies NaN by zero."""
    sizes = Sizes(queries=3, keys=90)
    operands = make_operands(sizes, "none", torch.float32, 5, with_sinks=True)
    mask = torch.zeros(1, 1, 1, 90, dtype=torch.bool)
    mask[..., 20:61] = True
    operands = AttentionOperands(operands.query, operands.key, operands.value, mask, None, operands.sinks)
    want = expected(operands, Scores(0.125)).float()
    poison(operands, 20, 61)
    assert_close(run(operands, Scores(0.125)), want, KERNEL)


@pytest.mark.parametrize("look", ["none", "filled", "window", "some_rows_empty"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_traced_results_are_the_real_ones(look: str, with_sinks: bool) -> None:
    for queries, keys in ((1, 40), (4, 40), (1, 1)):
        operands = make_operands(Sizes(queries=queries, keys=keys, value_size=32), look, torch.float32, 1, with_sinks)
        arguments = (operands.query, operands.key, operands.value, operands.mask, None, operands.sinks, 0.125, 0.0)
        torch.library.opcheck(torch.ops.weave.masked_attention.default, (*arguments, False))
        result = torch.ops.weave.masked_attention(*arguments, True)
        assert result.transpose(1, 2).is_contiguous()
        if operands.mask is not None:
            torch.library.opcheck(torch.ops.weave.key_ranges.default, (operands.mask, 2))


def test_ranges_hold_every_admitted_key_and_no_more() -> None:
    generator = torch.Generator().manual_seed(0)
    choice = random.Random(0)
    for case in range(120):
        look = choice.choice(LOOKS[1:])
        sizes = Sizes(batch=choice.choice([1, 3]), queries=choice.choice([1, 2, 7, 40]), keys=choice.choice([40, 77]))
        mask = make_mask(look, sizes, generator)
        assert mask is not None
        rows = choice.choice([1, 2, 5, 16, 128])
        ranges = torch.ops.weave.key_ranges(mask, rows)
        queries = mask.shape[2]
        assert ranges.shape == (*mask.shape[:2], -(-queries // rows), 4) and ranges.dtype is torch.int32
        for b, tile in itertools.product(range(mask.shape[0]), range(ranges.shape[2])):
            seen = mask[b, 0, tile * rows : (tile + 1) * rows].any(0).nonzero()[:, 0].tolist()
            want = [seen[0], seen[-1] + 1] if seen else [0, 0]
            by_all = [*mask[b, 0, tile * rows : (tile + 1) * rows].all(0).tolist(), False]
            inner = by_all.index(True) if True in by_all else 0
            want += [inner, by_all.index(False, inner)] if True in by_all else [0, 0]
            assert ranges[b, 0, tile].tolist() == want, f"case {case}: {look} {sizes} rows {rows} tile {tile}"


def test_the_kernels_make_the_reference_s_ranges() -> None:
    """One block of keys, and several, whose join cuts or keeps the runs that all queries admit."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.emulation.attention_interpreted"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4 and all(line["compared"] > 10 for line in found)
    assert [line["wrong"] for line in found] == [None] * 4


def test_ranges_alone_admit_what_is_in_them() -> None:
    operands = make_operands(Sizes(queries=3, keys=50), "filled", torch.float32, 2)
    assert operands.mask is not None
    ranges = torch.ops.weave.key_ranges(operands.mask, RANGE_ROWS)
    alone = AttentionOperands(operands.query, operands.key, operands.value, None, ranges)
    assert_close(run(alone, Scores(0.1)), run(operands, Scores(0.1)), KERNEL)


def test_says_what_does_not_belong_together() -> None:
    operands = make_operands(Sizes(), "filled", torch.float32, 2)
    q, k, v, mask = operands.query, operands.key, operands.value, operands.mask
    assert mask is not None
    wrong = {
        "do not belong together": AttentionOperands(q[:, :3], k, v),
        "4 dimensions": AttentionOperands(q[0], k, v),
        "are torch.float32, torch.float32 and torch.bfloat16": AttentionOperands(q, k, v.bfloat16()),
        "not a torch.bool": AttentionOperands(q, k, v, mask.float()),
        "broadcasts to": AttentionOperands(q, k, v, mask[..., :7]),
        "key_ranges": AttentionOperands(q, k, v, mask, torch.zeros(2, 1, 1, 2, dtype=torch.int32)),
        "one for each of 8 heads": AttentionOperands(q, k, v, mask, None, torch.zeros(3)),
    }
    for words, operands in wrong.items():
        with pytest.raises(WeaveError, match=words):
            run(operands, Scores(1.0))
    with pytest.raises(WeaveError, match="at least one row"):
        torch.ops.weave.key_ranges(mask, 0)


def test_the_op_runs_compiled() -> None:
    operands = make_operands(Sizes(queries=2), "window", torch.float32, 4)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def compiled(query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ranges = torch.ops.weave.key_ranges(mask, RANGE_ROWS)
        attended = torch.ops.weave.masked_attention(
            query, operands.key, operands.value, mask, ranges, None, 0.125, 0.0, False
        )
        return attended.transpose(1, 2).reshape(query.shape[0], query.shape[2], -1)

    assert operands.mask is not None
    got = compiled(operands.query, operands.mask)
    assert_close(got, run(operands, Scores(0.125)).transpose(1, 2).flatten(2), KERNEL)


def decode_plan(batch: int, keys: int, key_heads: int, num_sms: int = 132, size: int = 128) -> AttentionLaunch:
    return plan(AttentionShape(batch, key_heads * 8, key_heads, 1, keys, size, size), num_sms)


def test_programs_of_decode_are_one_wave_where_they_can_be() -> None:
    resident = {(loop.block_n, loop.num_warps): loop.resident for loop in (SHORT, MIDDLE, LONG)}
    for tiles, keys, num_sms in itertools.product(
        (0, 1, 3, 8, 64, 150, 200, 256, 396), (0, 1, 40, 512, 8192), (78, 132)
    ):
        how = decode_plan(tiles, keys, 1, num_sms)
        slots = resident[how.block_n, how.num_warps] * num_sms
        assert 1 <= how.num_splits <= max(1, min(MAX_SPLITS, keys // 64))
        assert tiles * how.num_splits <= slots or tiles > 3 * num_sms


def test_few_keys_are_split_among_all_sms() -> None:
    assert decode_plan(1, 512, 1).num_splits == 8
    assert decode_plan(1, 4096, 1).num_splits == 64
    assert decode_plan(1, 32768, 1).num_splits == MAX_SPLITS
    # Far more bytes than that: two programs an SM that ask for 64 KiB at a time.
    assert 1.9 <= 64 * decode_plan(8, 4096, 8).num_splits / 132 <= 2


def test_tiles_that_fill_the_machine_are_not_split() -> None:
    for keys in (128, 512, 4096):
        assert decode_plan(512, keys, 1).num_splits == 1
    # A second wave that is nearly empty is worth a split only of long keys.
    assert decode_plan(600, 512, 1).num_splits == 1
    assert decode_plan(600, 8192, 1).num_splits > 1


def test_loops_with_more_programs_an_sm_are_for_decode_of_usual_heads() -> None:
    short, middle, long = ((loop.block_n, loop.num_warps) for loop in (SHORT, MIDDLE, LONG))
    found = [decode_plan(8, keys, 8) for keys in (512, 4096, 32768)]
    assert [(how.block_n, how.num_warps) for how in found] == [short, middle, long]
    wide = [decode_plan(8, keys, 8, size=256) for keys in (512, 4096, 32768)]
    assert {(how.block_n, how.num_warps) for how in wide} == {(MIDDLE.block_n // 2, MIDDLE.num_warps)}
    rows = [plan(AttentionShape(8, 64, 8, 3, keys, 128, 128), 132) for keys in (512, 4096, 32768)]
    assert {(how.block_m, how.block_n, how.num_warps) for how in rows} == {(32, *middle)}


def test_short_triangles_are_cut_finer_than_masks() -> None:
    def rows(queries: int, masked: bool) -> int:
        return plan(AttentionShape(1, 32, 4, queries, queries, 128, 128), 132, masked=masked).block_m

    assert [rows(2048, True), rows(8192, True), rows(2048, False), rows(8192, False)] == [128, 128, 64, 128]


def test_tiles_take_grouped_heads_where_queries_are_few() -> None:
    decode = plan(AttentionShape(8, 64, 8, 1, 4096, 128, 128), 132)
    assert decode.packed == 8 and decode.block_m == 16 and decode.num_splits > 1
    assert plan(AttentionShape(8, 64, 8, 1, 4096, 128, 128), 132, may_pack=False).packed == 1
    prefill = plan(AttentionShape(1, 32, 4, 8192, 8192, 128, 128), 132)
    assert prefill.packed == 1 and prefill.block_m == 128 and prefill.num_splits == 1
    few = plan(AttentionShape(1, 32, 4, 40, 8192, 128, 128), 132)
    assert few.num_tiles(AttentionShape(1, 32, 4, 40, 8192, 128, 128)) * few.block_m >= 40 * 8
