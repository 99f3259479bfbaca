"""Prices of chunks: what the search leaves out is never the best."""

from __future__ import annotations

import pytest

from weaveopt import cost_model
from weaveopt.cost_model import Gemm
from weaveopt.ops.reduction.prices.kernels import kernel_variants
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm
from weaveopt.records.candidate import Fabric
from weaveopt.records.price import errors_of
from weaveopt.rewrites.gemm_all_reduce import estimate
from weaveopt.rewrites.gemm_all_reduce.estimate import (
    ChunkExchange,
    best_chunks,
    divisions,
    estimate_chunks,
    exchange_of,
)


@pytest.mark.parametrize("name", ["h200x4", "h100x2", "cpu"])
@pytest.mark.parametrize("hidden", [4096, 8192])
def test_the_best_of_all_divisions_is_found(name: str, hidden: int) -> None:
    machine, fabric = cost_model.load(name), Fabric.SHM if name == "cpu" else Fabric.PEER
    algorithms = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
    exchanges = [ChunkExchange(fabric, algorithm) for algorithm in algorithms]
    if fabric is Fabric.PEER:
        made = [exchange_of(kernel, fabric, machine) for kernel in kernel_variants(machine, fabric, hidden, 2, 1)]
        exchanges = [each for each in made if each.contention is not None]
    num_compared = 0
    for tokens in (64, 300, 1024, 2048, 5000, 16384):
        for depth in (1024, 7168):
            gemm = Gemm(tokens, hidden, depth)
            workload = Workload(tokens, tokens, hidden, "bfloat16", 2, gemm=gemm)
            sizes = estimate._Sizes(machine, workload)
            every = [
                estimate_chunks(machine, workload, exchange, rows)
                for rows in divisions(machine, workload)
                for exchange in estimate._fastest(sizes, exchanges, rows[0])
            ]
            num_compared += len(every)
            assert best_chunks(machine, workload, exchanges) == min(
                every, key=lambda each: each.estimate.us, default=None
            )
    assert num_compared > 50


def test_gemms_and_exchanges_of_chunks_are_off_by_themselves() -> None:
    """An exchange's error is its own: the GEMM's does not come in, with either sign."""
    machine = cost_model.load("h100x2")
    workload = Workload(1500, 1500, 8192, "bfloat16", 2, gemm=Gemm(1500, 14336, 8192))
    [exchange, *_] = (
        exchange_of(each, Fabric.PEER, machine) for each in kernel_variants(machine, Fabric.PEER, 8192, 2, 1)
    )
    found = estimate_chunks(machine, workload, exchange, (512, 512, 476)).estimate
    terms = {term.name: term for term in found.terms}
    gemm, last = (set(errors_of(terms[name].us)) for name in ("gemm", "last chunk"))
    assert gemm and last and not gemm & last
    assert found.error_us > max(terms["gemm"].error_us, terms["exchange"].error_us) > 0.0
