"""Time and traffic of a mixture whose weights travel: every rank computes its own tokens with the experts of all.

Nothing waits for another rank, and no rank is the busiest one. Every rank reads all experts that its tokens chose, of
which it has `1 / world` itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.curve import nearest_curve, read_points
from weaveopt.cost_model.exchange import ShardedMixture
from weaveopt.cost_model.host import host_us
from weaveopt.cost_model.kernels import memory_us
from weaveopt.cost_model.machine import CopyContention, Machine
from weaveopt.cost_model.mixture import Mixture, cpu_parts, kernels_us
from weaveopt.cost_model.uncertainty import read
from weaveopt.records.candidate import Fabric

READS, IN_PLACE = "expert_reads", "in_place"
"""Operation and variant of a fabric's curve: experts' kernels whose weights are all in a peer's memory, with few rows,
by the bytes of the experts that have rows."""
TILE_ROWS = 288
"""Rows of an expert's largest tile. Reads of a peer's memory miss the caches of the reader, so each tile reads the
weights again."""


def of_own_tokens(sharded: ShardedMixture) -> Mixture:
    """Mixture that each rank computes: its own tokens, the experts of all ranks."""
    return replace(sharded.of_rank, experts=sharded.of_rank.experts * sharded.world, skew=sharded.skew)


def missing_bytes(sharded: ShardedMixture) -> int:
    """Bytes of the experts that a rank's tokens chose and that it lacks, of one layer."""
    return round(of_own_tokens(sharded).weight_bytes * (sharded.world - 1) / sharded.world)


def layer_missing_bytes(sharded: ShardedMixture) -> int:
    """Bytes of all experts of one layer that a rank lacks."""
    every = of_own_tokens(sharded)
    weights = every.experts * (every.wide + every.width) * every.hidden
    return weights * sharded.row_bytes // every.hidden * (sharded.world - 1) // sharded.world


def cached_bytes(sharded: ShardedMixture, most_bytes: int) -> int:
    """Bytes of the whole experts, of those that a rank lacks of one layer, that `most_bytes` have room for."""
    experts = sharded.of_rank.experts * (sharded.world - 1)
    expert_bytes = layer_missing_bytes(sharded) // max(experts, 1)
    return min(most_bytes // max(expert_bytes, 1), experts) * expert_bytes


@dataclass(frozen=True)
class InPlaceParts:
    """Times of the operation on CPU ranks that read their peers' weights in place, in microseconds."""

    experts: float
    memory: float
    """Rows into the order of the experts and back, activations, the sum over choices, calls of the library."""
    host: float


def in_place_parts(machine: Machine, sharded: ShardedMixture) -> InPlaceParts:
    """Parts of one call. Remote weights are read at the rate of local ones: they are memory of the same host."""
    parts = cpu_parts(machine, of_own_tokens(sharded))
    return InPlaceParts(experts=parts.gemm_us, memory=parts.memory_us, host=host_us(machine))


_LAUNCHES = 5
"""Kernels of a call on GPUs: two that route, two GEMMs, the sum."""


@dataclass(frozen=True)
class ReadParts:
    """Times of the operation on GPUs whose kernels read their peers' weights in place, in microseconds."""

    experts: float
    """Kernels, had they all weights in this GPU's memory."""
    reads: float
    """Additional time because the chosen experts of peers come over the link."""
    host: float


def read_parts(machine: Machine, fabric: Fabric, sharded: ShardedMixture, kernels: str) -> ReadParts | None:
    """With experts' kernels of that name. None where the profile lacks one of the times: kernels, reads of peers."""
    own = of_own_tokens(sharded)
    local_us = kernels_us(machine, own, kernels)
    if local_us is None or fabric not in machine.fabrics:
        return None
    curve = nearest_curve(fabric_costs(machine, fabric).curves_of(READS, IN_PLACE), sharded.world)
    if curve is None:
        return None
    tiles = math.ceil(own.rows / max(own.active, 1) / TILE_ROWS)
    read_us = read_points(machine, curve.origin, curve.points, max(float(missing_bytes(sharded) * tiles), 1.0))
    return ReadParts(local_us, max(read_us - local_us, 0.0), _LAUNCHES * host_us(machine))


def pulled_us(machine: Machine, sharded: ShardedMixture) -> float:
    """The library form: the same, and each missing expert that was chosen is copied first."""
    parts = in_place_parts(machine, sharded)
    return parts.experts + parts.memory + parts.host + memory_us(machine, 2 * missing_bytes(sharded))


@dataclass(frozen=True)
class AheadParts:
    """Times of the operation on GPUs whose copy engines pull a layer ahead, in microseconds."""

    experts: float
    fetch: float
    """All experts of a layer that a rank lacks and does not keep, while its kernels run and its peers pull too."""
    hidden: float
    """Part of the fetch that runs concurrently with the experts before and the work up to the next ones."""
    contention: float
    """Time that the pulls take from the kernels which they run concurrently with; 0 where nobody measured it."""
    host: float

    @property
    def exposed(self) -> float:
        return self.fetch - self.hidden


def ahead_parts(
    machine: Machine, sharded: ShardedMixture, kernels: str, window_us: float, cache_bytes: int = 0
) -> AheadParts | None:
    """With experts' kernels of that name. `window_us`: work between two mixtures; `cache_bytes`: missing experts of a
    layer that are kept for good. None where the profile lacks one of the times: kernels, and pulls by copy engines."""
    engine, experts = machine.copy_engine, kernels_us(machine, of_own_tokens(sharded), kernels)
    if experts is None or engine is None:
        return None
    num_bytes = layer_missing_bytes(sharded) - cached_bytes(sharded, cache_bytes)
    latency_us = engine.latency_us if num_bytes else 0.0
    fetch_us = latency_us + num_bytes / engine.contended_bytes_per_s * 1e6
    fetch = read(machine, engine.origin, fetch_us, ("copy_engine", num_bytes))
    hidden = min(fetch, experts + window_us)
    copies = copy_contention(machine)
    slowdown = 0.0 if copies is None else copies.gemm - 1.0
    return AheadParts(experts, fetch, hidden, slowdown * hidden, _LAUNCHES * host_us(machine))


def copy_contention(machine: Machine) -> CopyContention | None:
    """Contention of GEMMs and pulls by copy engines; None where nobody measured it."""
    return None if machine.contention is None else machine.contention.copies
