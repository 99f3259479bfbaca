"""`weave::paged_attention` on the CPU, the dense expression of other devices, and the Triton kernel interpreted."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import weaveopt.ops  # noqa: F401
from tests.graphs.paged_cases import SPANS, PagedCase, expected, make
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.errors import WeaveError
from weaveopt.ops.attention.paged_gpu import plan_paged
from weaveopt.ops.attention.paged_reference import PagedRequest, batches, dense
from weaveopt.ops.attention.paged_shapes import PagedOperands
from weaveopt.ops.attention.shapes import Scores

SCORES = (Scores(0.25), Scores(0.125, softcap=3.0))


def arguments(operands: PagedOperands, scores: Scores) -> tuple[object, ...]:
    rows = operands.rows
    return (
        rows.cache, operands.query, rows.keys, rows.values, rows.read_index, rows.write_index, operands.cu_seq_lens_q,
        operands.cu_seq_lens_k, operands.sinks, rows.first_key, rows.first_value, rows.sentinel, operands.max_keys,
        operands.window, scores.scale, scores.softcap,
    )  # fmt: skip


@pytest.mark.parametrize("look", SPANS)
@pytest.mark.parametrize("window", [0, 6])
def test_equals_each_query_by_itself(look: str, window: int) -> None:
    options = itertools.product(SCORES, (False, True), (0, 3), (2, 4), (True, False) if look == "prompts" else (True,))
    for seed, (scores, sinks, padding, key_heads, reads) in enumerate(options):
        case = PagedCase(SPANS[look], 4, key_heads, 16, window, reads, sinks, padding)
        operands = make(case, torch.float32, seed)
        want = expected(case, operands, scores).float()
        stored = replace(operands.rows, cache=operands.rows.cache.clone())
        stored.write()
        with_dense = replace(operands, rows=replace(operands.rows, cache=operands.rows.cache.clone()))
        if not with_dense.rows.reads_first:
            with_dense.rows.write()
        assert_close(dense(with_dense, scores), want, KERNEL, f"dense expression of {case} {scores}")
        got = torch.ops.weave.paged_attention(*arguments(operands, scores))
        assert_close(got, want, KERNEL, f"{case} {scores}")
        assert torch.equal(operands.rows.cache.nan_to_num(7.0), stored.cache.nan_to_num(7.0))
        assert got.transpose(1, 2).is_contiguous() and not got[:, :, got.shape[2] - padding :].any()


def test_requests_of_all_sizes_are_few_batches() -> None:
    spans = [PagedRequest(at, 1, 0, 100 + at % 5) for at in range(32)]
    assert [len(each) for each in batches(spans, 8)] == [32]
    mixed = [*spans, PagedRequest(32, 600, 0, 600), PagedRequest(632, 40, 0, 700)]
    assert sorted(len(each) for each in batches(mixed, 8)) == [1, 1, 32]
    uneven = [PagedRequest(at, 1, 0, length) for at, length in enumerate((10, 8000, 12, 7900))]
    found = [sorted(each.keys for each in batch) for batch in batches(uneven, 8)]
    assert found == [[7900, 8000], [10, 12]]


@pytest.mark.parametrize("window", [0, 6])
def test_traced_results_are_the_real_ones(window: int) -> None:
    for look, sinks in (("decode", False), ("mixed", True)):
        operands = make(PagedCase(SPANS[look], window=window, sinks=sinks), torch.float32, 0)
        operands.rows.cache.nan_to_num_(1.0)
        torch.library.opcheck(torch.ops.weave.paged_attention.default, arguments(operands, SCORES[0]))


def test_the_kernel_computes_the_same() -> None:
    """One split and several, tiles that end in a request, requests without queries, a cache with NaN elsewhere."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.emulation.paged_interpreted"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["wrong"] for line in found] == [None] * len(SPANS)
    assert all(line["compared"] >= 4 for line in found)


def test_launches_depend_on_sizes_alone() -> None:
    decode = make(PagedCase(((1, 4096),) * 8, heads=32, key_heads=8, size=128, padding=0), torch.bfloat16, 0)
    how = plan_paged(decode, 132)
    assert (how.block_m, how.block_q) == (16, 4) and 1 < how.num_splits <= 4
    # The bound on keys divides work; lengths on the device do not.
    assert plan_paged(replace(decode, cu_seq_lens_k=decode.cu_seq_lens_k * 0), 132) == how
    assert plan_paged(replace(decode, max_keys=100), 132).num_splits == 1
    # As many requests as the step was padded to are not there: long ones are split all the same.
    padded = make(PagedCase(((1, 4096),) * 8, heads=32, key_heads=8, size=16, padding=56), torch.bfloat16, 0)
    assert plan_paged(padded, 132).num_splits == 4
    short = make(PagedCase(((1, 200),) * 32, heads=32, key_heads=8, size=16, padding=0), torch.bfloat16, 0)
    assert (plan_paged(short, 64).num_splits, plan_paged(short, 64).block_n) == (1, 32)
    whole = make(PagedCase(((1, 512),) * 32, heads=16, key_heads=4, size=16, padding=0), torch.bfloat16, 0)
    assert (plan_paged(whole, 132).num_splits, plan_paged(whole, 132).block_n) == (1, 128)
    prompts = make(PagedCase(((600, 600),) * 2, heads=32, key_heads=8, size=16, padding=0), torch.bfloat16, 0)
    how = plan_paged(prompts, 132)
    assert (how.block_m, how.num_warps, how.inner, how.num_splits) == (128, 8, True, 1)
    # Wide heads, and few queries of many requests, stay in tiles of half as many rows.
    wide = make(PagedCase(((600, 600),) * 2, heads=2, key_heads=1, size=256, padding=0), torch.bfloat16, 0)
    mixed = make(PagedCase((*((1, 200),) * 40, (300, 300)), heads=8, key_heads=2, padding=0), torch.bfloat16, 0)
    for each in (wide, mixed):
        assert (plan_paged(each, 132).block_m, plan_paged(each, 132).num_warps) == (64, 4)
        assert not plan_paged(each, 132).inner


def test_says_what_does_not_belong_together() -> None:
    operands = make(PagedCase(SPANS["decode"]), torch.float32, 0)
    rows = operands.rows
    wrong = {
        "do not belong together": replace(operands, rows=replace(rows, keys=rows.keys[:, :1])),
        "of one dtype": replace(operands, query=operands.query.half()),
        "int32 .requests . 1.": replace(operands, cu_seq_lens_q=operands.cu_seq_lens_q.long()),
        "found torch.int32 .8. and torch.int32 .7.": replace(operands, cu_seq_lens_k=operands.cu_seq_lens_k[1:]),
        "not one for each of 4 heads": replace(operands, sinks=torch.zeros(3)),
        "a window is a number": replace(operands, window=-1),
    }
    for message, each in wrong.items():
        with pytest.raises(WeaveError, match=message):
            torch.ops.weave.paged_attention(*arguments(each, SCORES[0]))
