"""Calls of single kernels at their exact shapes, on operands of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weaveopt.autotune.kernel_calls import Operands, launch_of
from weaveopt.cost_model import Attention
from weaveopt.cost_model.attention import attention_of, shape_of
from weaveopt.cost_model.timed import KernelShape

CPU = torch.device("cpu")


def gemm(rows: int, layout: str) -> KernelShape:
    return KernelShape("gemm", "float32", rows, (64, 32), layout)


ATTENTION = Attention(1, 4, 2, 24, 24, 16, "float32")
SHAPES = {
    "rows": (gemm(5, "rr"), (5, 32)),
    "columns": (gemm(5, "rc"), (5, 32)),
    "transposed": (gemm(5, "cr"), (5, 32)),
    "bias": (gemm(5, "rc addmm"), (5, 32)),
    "batched": (KernelShape("bmm", "float32", 5, (3, 64, 32), "rr"), (3, 5, 32)),
    "causal": (shape_of(replace(ATTENTION, causal=True)), (1, 4, 24, 16)),
    "masked": (shape_of(replace(ATTENTION, mask_bytes=4 * 24 * 24)), (1, 4, 24, 16)),
    "flags": (shape_of(replace(ATTENTION, mask_bytes=24 * 24)), (1, 4, 24, 16)),
    "decode": (shape_of(replace(ATTENTION, batch=3, q_len=1)), (3, 4, 1, 16)),
    "smaller values": (shape_of(replace(ATTENTION, kv_heads=4, value_dim=8)), (1, 4, 24, 8)),
    "decode of smaller values": (shape_of(replace(ATTENTION, batch=3, q_len=1, value_dim=8)), (3, 4, 1, 8)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_kernel_is_called_at_its_shape(name: str) -> None:
    shape, result = SHAPES[name]
    launch = launch_of(shape, Operands(CPU, 1 << 16))
    assert launch is not None
    made = launch(0)
    assert isinstance(made, torch.Tensor) and tuple(made.shape) == result and bool(made.isfinite().all())
    again = launch(1)
    assert isinstance(again, torch.Tensor)


def test_the_shape_of_attention_says_all_of_it() -> None:
    """This package's kernels are called from their shape alone, and on GPUs alone."""
    paged = replace(ATTENTION, causal=True, kernel="paged", value_dim=16)
    cases = (
        paged, replace(paged, window=5), replace(paged, kv_len=40, kernel="masked", mask_bytes=24 * 40),
        replace(paged, batch=7, q_len=1, causal=False), replace(ATTENTION, value_dim=8, mask_bytes=2 * 24 * 24),
    )  # fmt: skip
    for case in cases:
        assert attention_of(shape_of(case)) == case
        if case.kernel != "sdpa":
            assert launch_of(shape_of(case), Operands(CPU, 1 << 16)) is None


def test_weights_take_turns_in_cold_memory() -> None:
    operands = Operands(CPU, 64 << 10)
    weights = operands.matrices(torch.float32, "c", 64, 32)
    assert len(weights) == 8 and weights[0].stride() == (1, 64) and len({each.data_ptr() for each in weights}) == 8
    assert len(Operands(CPU, 1).matrices(torch.float32, "c", 64, 32)) == 1
