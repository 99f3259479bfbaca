"""Errors on every rank when one of them fails in the middle of an exchange, does not come, or runs another one."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.ops.test_expert_exchange import Form, Inputs, make_call, make_inputs, reserve_for
from tests.ranks import run_ranks
from weaveopt.errors import AgreementError, PeerTimeoutError, WeaveError
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.sharded import shm as fabric

TIMEOUT_S = 30.0


def prepared(world: int) -> tuple[ExpertExchangeCall, list[Inputs]]:
    reserve_for(world)
    call = replace(make_call(Form(), "float32", world), timeout_s=TIMEOUT_S)
    return call, make_inputs(Form(), call, "even", "uniform", seed=1)


def raises_poisoned(call: ExpertExchangeCall, mine: Inputs) -> None:
    with pytest.raises(WeaveError, match="the arena is unusable since an earlier call failed"):
        mine.run(call)


def run_failing_experts(rank: int) -> float:
    """Rank 1 fails in its experts: its own error there; the others need not wait for the timeout."""
    call, inputs = prepared(3)
    inputs[rank].run(call)
    start = time.monotonic()
    if rank == 1:

        def failing(*_: object) -> Tensor:
            raise MemoryError("no room for the rows")

        fabric.expert_rows = failing  # type: ignore[assignment]
        with pytest.raises(MemoryError, match="no room"):
            inputs[rank].run(call)
    else:
        with pytest.raises(PeerTimeoutError, match=r"peer rank [0-2] gave up waiting itself"):
            inputs[rank].run(call)
    raises_poisoned(call, inputs[rank])
    took = time.monotonic() - start
    dist.barrier()
    return took


def test_a_rank_whose_experts_fail() -> None:
    assert max(run_ranks(run_failing_experts, 3)) < TIMEOUT_S / 2


def run_absent(rank: int) -> None:
    call, inputs = prepared(2)
    late = replace(call, timeout_s=1.0)
    if rank == 0:
        with pytest.raises(PeerTimeoutError, match=r"peer rank 1 did not signal within 1 s \(slot ready"):
            inputs[rank].run(late)
        raises_poisoned(late, inputs[rank])
    dist.barrier()


def test_a_rank_that_does_not_come() -> None:
    run_ranks(run_absent, 2)


def run_other_site(rank: int) -> None:
    call, inputs = prepared(2)
    own = replace(call, site=f"site of rank {rank}")
    with pytest.raises(AgreementError, match=f"runs site site of rank {rank} with 0 tokens, but rank {1 - rank} runs"):
        inputs[rank].run(own)
    dist.barrier()


def test_ranks_at_different_sites() -> None:
    run_ranks(run_other_site, 2)
