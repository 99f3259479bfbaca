"""Weights that are read next, loaded into L2 while the exchange waits: which, how much of them, what that saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.fx as fx

from weaveopt.cost_model.l2_prefetch import is_measured, prefetched
from weaveopt.cost_model.machine import Machine
from weaveopt.graph.pattern import tensor_of
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Term
from weaveopt.reductions.call import Prefetch
from weaveopt.reductions.candidates import Found, Lowered
from weaveopt.reductions.prefetch_ranges import MOST_WEIGHTS
from weaveopt.reductions.variant import Transfer
from weaveopt.sites.next_weights import next_weights
from weaveopt.sites.reduction import Reduction

TERM = "prefetched"
"""What the GEMM behind the site takes less."""
EXCHANGE_TERMS = frozenset({"synchronize", "reduce", "norm", "distribute", "gather"})
"""Of an estimate: the kernel beside which weights are loaded."""


def weights_behind(structure: Reduction) -> tuple[fx.Node, ...]:
    """Those that GEMMs read with the normalized rows; none where the site ends without a norm."""
    norm = structure.reduced.norm
    return () if norm is None else next_weights(norm.output)[:MOST_WEIGHTS]


def with_prefetch(found: Sequence[Found], structure: Reduction, machine: Machine) -> Sequence[Found]:
    """`found`, with a prefetch where the profile says that it pays; as it is where the profile has none measured."""
    if not is_measured(machine):
        return found
    values = [value for node in weights_behind(structure) if (value := tensor_of(node)) is not None]
    if not values:
        return found
    num_bytes, num_rows = sum(value.nbytes for value in values), sum(value.shape[0] for value in values)
    return [_with_prefetch(*each, num_bytes, num_rows, machine) for each in found]


def _with_prefetch(candidate: Candidate, lowered: Lowered, num_bytes: int, num_rows: int, machine: Machine) -> Found:
    workload, estimate = lowered.workload, candidate.estimate
    row = next((row for row in lowered.rows if workload.tokens <= row.max_tokens), None)
    # The operation that quantizes hands its rows to GEMMs of FP8, of whose weights nothing was measured.
    if lowered.fabric is not Fabric.PEER or lowered.quantizes or estimate is None or row is None:
        return candidate, lowered
    if row.transfer is not Transfer.LL_PACKET or row.algorithm is not lowered.algorithm:
        return candidate, lowered
    exchange_us = sum(term.us for term in estimate.terms if term.name in EXCHANGE_TERMS)
    worth = prefetched(machine, workload.world, workload.tokens, exchange_us, num_bytes, num_rows)
    if worth is None:
        return candidate, lowered
    parameters = (("prefetch_bytes", worth.num_bytes), ("prefetch_order", worth.order.value))
    candidate = replace(
        candidate,
        parameters=(*candidate.parameters, *parameters),
        estimate=estimate.plus(Estimate((Term(TERM, -worth.saved_us),))),
    )
    return candidate, replace(lowered, prefetch=Prefetch(worth.num_bytes, worth.order, worth.max_tokens))
