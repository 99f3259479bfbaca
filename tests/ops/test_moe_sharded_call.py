"""`weave::expert_exchange` as an operator: what it refuses, its fake and its schema, its call and its buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from tests.ops.test_expert_exchange import FORMS, Form, make_call, make_inputs, reserve_for, wanted
from tests.ranks import run_ranks
from weaveopt.errors import WeaveError
from weaveopt.fabrics.rows_call import decode
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.sharded.op import SITES
from weaveopt.records.candidate import Fabric


def run_wrong_calls(rank: int) -> None:
    reserve_for(2)
    form = Form()
    call = make_call(form, "bfloat16", 2)
    inputs = make_inputs(form, call, "even", "uniform", seed=1)
    mine = inputs[rank]
    for wrong, found in (
        (replace(mine, x=mine.x.float()), "x is torch.float32"),
        (replace(mine, x=mine.x[:, :16]), r"x is \(7, 16\)"),
        (replace(mine, experts=mine.experts.int()), "experts are torch.int32"),
        (replace(mine, weights=mine.weights[:3]), r"weights is \(3, 2\)"),
        (replace(mine, operands=mine.operands._replace(down=mine.operands.gate_up)), "down is"),
    ):
        for fabric in (Fabric.SHM, Fabric.LIBRARY):
            with pytest.raises(WeaveError, match=found):
                wrong.run(replace(call, fabric=fabric))
    # The group was not taken: a right call runs.
    assert_close(mine.run(call), wanted(inputs, call)[rank], KERNEL, "", torch.bfloat16)


def test_wrong_calls_are_refused_and_harm_nothing() -> None:
    run_ranks(run_wrong_calls, 2)


def run_opcheck(rank: int) -> None:
    reserve_for(1)
    for form in FORMS:
        call = make_call(form, "float32", 1)
        [mine] = make_inputs(form, call, "even", "uniform", seed=1)
        args = (mine.x, mine.experts, mine.weights, *mine.operands, call.encode())
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
        for overload in (torch.ops.weave.expert_exchange.default, torch.ops.weave.expert_exchange.capturable):
            torch.library.opcheck(overload, args, test_utils=checks)


def test_opcheck() -> None:
    run_ranks(run_opcheck, 1)


def test_fake_results_have_the_shape_of_the_reference() -> None:
    for form in some(FORMS):
        call = make_call(form, "bfloat16", 2)
        inputs = make_inputs(form, call, "uneven", "uniform", seed=1)
        for at, want in enumerate(some(wanted(inputs, call))):
            with FakeTensorMode(allow_non_fake_inputs=True):
                got = inputs[at].run(call)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)


def test_buffers_come_from_the_layout() -> None:
    call = replace(make_call(Form(choices=3), "bfloat16", 4, hidden=100), max_tokens=50)
    dispatch, combine = SITES[Fabric.SHM].buffers(call)

    def aligned(num_bytes: int) -> int:
        return -(-num_bytes // 64) * 64

    assert dispatch.num_bytes == 3 * (64 + aligned(50 * 3 * 16) + aligned(50 * 200))
    assert combine.num_bytes == aligned(50 * 3 * 200)


def test_sources_are_split_into_batches() -> None:
    call = make_call(Form(), "bfloat16", 5)
    parts = {batches: list(replace(call, batches=batches).sources()) for batches in (1, 2, 3, 5, 9)}
    assert parts[1] == [(0, 5)]
    assert parts[2] == [(0, 1), (1, 5)]
    assert parts[3] == [(0, 1), (1, 3), (3, 5)]
    assert parts[5] == parts[9] == [(at, at + 1) for at in range(5)]
    assert list(replace(call, world=1).sources()) == [(0, 1)]


def test_call_survives_its_encoding() -> None:
    call = make_call(FORMS[2], "bfloat16", 3)
    assert decode(ExpertExchangeCall, call.encode()) == call
    with pytest.raises(WeaveError, match="not an encoded"):
        decode(ExpertExchangeCall, "{}")
