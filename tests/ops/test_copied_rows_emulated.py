"""Rows that a kernel copies from the output buffer into tensors of the caller, compiled for the CPU."""

from __future__ import annotations

import itertools
from ctypes import c_void_p

import pytest
import torch

from tests.emulation.posted_emulated import library
from tests.graphs.nonempty import some

Tensor = torch.Tensor
SAME, FLOAT32, FP8 = range(3)
BYTES = {SAME: 2, FLOAT32: 4, FP8: 1}
BEFORE = 0xA5
"""In results before a call."""


def copied(tokens: int, hidden: int, kind: int, *, scales: bool, whole: bool, threads: int, shift: int) -> None:
    """Asserts that all rows arrive, and nothing else is written. `shift`: bytes by which results are off 16."""
    out_bytes, row_bytes = hidden * BYTES[kind], hidden * 2
    out_row_bytes = (out_bytes + 15) // 16 * 16 + 16 * scales
    sum_offset = (tokens * out_row_bytes + 255) // 256 * 256
    random = torch.Generator().manual_seed(hidden + threads)
    buffer = torch.randint(0, 256, (sum_offset + tokens * row_bytes,), generator=random, dtype=torch.uint8)
    rows = buffer[: tokens * out_row_bytes].view(tokens, out_row_bytes)

    def result(num_bytes: int) -> Tensor:
        return torch.full((num_bytes + 64,), BEFORE, dtype=torch.uint8)

    results = normalized, total, scale = result(tokens * out_bytes), result(tokens * row_bytes), result(tokens * 4)
    assert all(each.data_ptr() % 16 == 0 for each in some(results))
    starts = (16 + shift, 16, 16)
    places = [each.data_ptr() + start for each, start in zip(results, starts, strict=True)]
    library().copy_rows(
        tokens, hidden, kind, scales, whole, threads, c_void_p(buffer.data_ptr()), *map(c_void_p, places)
    )
    wanted = [
        (normalized, starts[0], rows[:, :out_bytes]),
        (total, starts[1], buffer[sum_offset:].view(tokens, row_bytes)[: tokens if whole else 0]),
        (scale, starts[2], rows[: tokens if scales else 0, out_row_bytes - 16 : out_row_bytes - 12]),
    ]
    for got, start, want in some(wanted):
        expected = torch.full_like(got, BEFORE)
        expected[start : start + want.numel()] = want.reshape(-1)
        assert torch.equal(got, expected), (tokens, hidden, kind, scales, whole, threads, shift)


@pytest.mark.parametrize("kind", [SAME, FLOAT32, FP8], ids=["same", "float32", "fp8"])
def test_rows_arrive_and_nothing_else_is_written(kind: int) -> None:
    hiddens, threads, booleans = (8, 24, 72, 1032, 4096, 4352, 8192), (32, 128, 512), (False, True)
    for hidden, num_threads, scales, whole in some(itertools.product(hiddens, threads, booleans, booleans)):
        copied(3, hidden, kind, scales=scales and kind == FP8, whole=whole, threads=num_threads, shift=0)


@pytest.mark.parametrize("shift", [4, 8])
def test_results_that_begin_between_multiples_of_16_bytes(shift: int) -> None:
    for hidden in some((8, 40, 4096)):
        copied(2, hidden, SAME, scales=False, whole=False, threads=128, shift=shift)
