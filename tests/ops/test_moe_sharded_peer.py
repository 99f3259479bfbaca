"""`expert_exchange` on the fabric `peer` where there is no GPU: its Triton part interpreted, and its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.emulation.sharded_interpreted import CHECKS
from tests.ops.test_expert_exchange import Form, make_call
from tests.ops.test_moe_experts_kernels import lines_of
from weaveopt.ops.experts.sharded.op import SITES
from weaveopt.ops.experts.sharded.peer import refusal
from weaveopt.records.candidate import Fabric


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str) -> None:
    (wrong,) = [line["wrong"] for line in lines_of("tests.emulation.sharded_interpreted", True) if line["name"] == name]
    assert wrong is None, wrong


def test_buffers_come_from_the_layout() -> None:
    """Rows that are no whole vectors have no layout: the rule refuses them."""
    call = replace(make_call(Form(choices=3), "bfloat16", 4, hidden=104), max_tokens=50)
    dispatch, combine = SITES[Fabric.PEER].buffers(call)

    def aligned(num_bytes: int) -> int:
        return -(-num_bytes // 256) * 256

    assert dispatch.num_bytes == aligned(4 * 50 * 3 * 8) + aligned(4 * 50 * 208)
    assert combine.num_bytes == aligned(50 * 3 * 208)
    with pytest.raises(ValueError, match="no layout for 50 tokens"):
        SITES[Fabric.PEER].buffers(replace(call, hidden=100))


def test_limits() -> None:
    assert not refusal(8, 8192, 8, 128, 7168)
    assert "experts" in refusal(8, 64, 8, 1024, 4096)
    assert "choices" in refusal(8, 64, 65, 128, 4096)
    assert "32 bits" in refusal(8, 1 << 25, 8, 16, 64) and "32 bits" in refusal(8, 1 << 20, 1, 16, 1 << 11)


def test_a_call_says_whose_kernels_run() -> None:
    call = replace(make_call(Form(), "bfloat16", 2), kernels="hopper", few_tokens=9)
    assert [call.kernels_at(tokens) for tokens in (1, 9, 10)] == ["triton", "triton", "hopper"]
