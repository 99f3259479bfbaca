"""The kernel of `weave::paged_attention` against the dense expression, and in CUDA graphs whose lengths change."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import weaveopt.ops  # noqa: F401
from tests.gpu.captured import captured
from tests.graphs.nonempty import some
from tests.graphs.paged_cases import SPANS, PagedCase, expected, make
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.ops.attention import gpu
from weaveopt.ops.attention.paged_gpu import launch_paged, plan_paged
from weaveopt.ops.attention.paged_reference import dense
from weaveopt.ops.attention.paged_shapes import PagedOperands
from weaveopt.ops.attention.shapes import Scores

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16)
LONG = {
    "decode": tuple((1, length) for length in (512, 4096, 1, 77, 2000, 640)),
    "mixed": ((1, 900), (130, 130), (5, 1030), (1, 17), (64, 600)),
    "prompts": ((257, 257), (1, 1), (640, 640)),
}


def on_gpu(operands: PagedOperands) -> PagedOperands:
    rows = operands.rows
    moved = {name: getattr(rows, name).cuda() for name in ("cache", "keys", "values", "read_index", "write_index")}
    return replace(
        operands, query=operands.query.cuda(), rows=replace(rows, **moved), cu_seq_lens_q=operands.cu_seq_lens_q.cuda(),
        cu_seq_lens_k=operands.cu_seq_lens_k.cuda(), sinks=None if operands.sinks is None else operands.sinks.cuda(),
    )  # fmt: skip


def call(operands: PagedOperands, scores: Scores) -> torch.Tensor:
    rows = operands.rows
    return torch.ops.weave.paged_attention(
        rows.cache, operands.query, rows.keys, rows.values, rows.read_index, rows.write_index, operands.cu_seq_lens_q,
        operands.cu_seq_lens_k, operands.sinks, rows.first_key, rows.first_value, rows.sentinel, operands.max_keys,
        operands.window, scores.scale, scores.softcap,
    )  # fmt: skip


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_steps_equal_each_query_by_itself(dtype: torch.dtype, window: int) -> None:
    for seed, (look, spans) in enumerate(some(tuple(SPANS.items()))):
        for sinks in (False, True):
            case = PagedCase(spans, window=window, sinks=sinks, reads=look != "prompts" or sinks)
            operands, scores = make(case, dtype, seed), Scores(0.25, 3.0 * sinks)
            want = expected(case, operands, scores).to(dtype).cuda()
            assert_close(call(on_gpu(operands), scores), want, KERNEL, f"{case} {scores} {dtype}")


@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("look", LONG)
def test_long_steps_equal_the_dense_expression(look: str, size: int) -> None:
    choice = random.Random(size)
    for seed in range(6):
        group, key_heads = choice.choice([1, 4, 5, 8]), choice.choice([1, 4])
        case = PagedCase(LONG[look], group * key_heads, key_heads, size, choice.choice([0, 128]), sinks=seed % 2 == 1)
        operands = on_gpu(make(case, DTYPES[seed % 2], seed))
        scores = Scores(size**-0.5, choice.choice([0.0, 20.0]))
        if not operands.rows.reads_first:
            operands.rows.write()
        planned = plan_paged(operands, gpu.num_sms(operands.query.device))
        for splits in (planned.num_splits, choice.choice([1, 2, 7])):
            for inner in (False, True):
                got = launch_paged(operands, scores, replace(planned, num_splits=splits, inner=inner))
                assert_close(got, dense(operands, scores), KERNEL, f"{case} {scores} {splits} splits {inner=}")


@pytest.mark.parametrize("window", [0, 64])
def test_a_graph_serves_other_lengths(window: int) -> None:
    """Lengths, rows and their order change between replays; sizes of the tensors do not."""
    lengths = [(300, 20, 700, 4), (1, 512, 40, 471), (256, 256, 256, 256)]
    cases = [PagedCase(tuple((1, each) for each in row), 8, 2, 64, window, padding=4) for row in lengths]
    made = [on_gpu(make(case, torch.bfloat16, seed)) for seed, case in enumerate(cases)]
    most = max(each.rows.read_index.shape[0] for each in made)
    pages = max(each.rows.cache.shape[0] for each in made)
    static = made[0]
    rows = static.rows
    static = replace(
        static,
        max_keys=1024,
        rows=replace(
            rows,
            cache=rows.cache.new_zeros((pages, *rows.cache.shape[1:])),
            read_index=rows.read_index.new_zeros(most),
        ),
    )  # fmt: skip

    def fill(source: PagedOperands) -> None:
        pairs = [
            (static.query, source.query), (static.rows.keys, source.rows.keys),
            (static.rows.values, source.rows.values),
            (static.rows.write_index, source.rows.write_index), (static.cu_seq_lens_q, source.cu_seq_lens_q),
            (static.cu_seq_lens_k, source.cu_seq_lens_k),
        ]  # fmt: skip
        for kept, new in pairs:
            kept.copy_(new)
        index = source.rows.read_index
        if source.rows.reads_first:
            index = torch.where(index == source.rows.sentinel, static.rows.sentinel, index)
        static.rows.read_index[: index.shape[0]].copy_(index)
        static.rows.cache[: source.rows.cache.shape[0]].copy_(source.rows.cache)

    scores = Scores(0.125)
    fill(made[0])
    graph, result = captured(lambda: call(static, scores))
    for case, source in zip(some(cases), made, strict=True):
        want = expected(case, source, scores).to(torch.bfloat16)
        fill(source)
        graph.replay()
        assert_close(result, want, KERNEL, f"replay with {case}")
