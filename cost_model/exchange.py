"""Time of an expert-parallel mixture, whose tokens are dispatched to the ranks of their experts and combined.

All wait for the busiest rank: what counts is the share of all choices that are of its experts, `1 / world` where
routing is uniform, and the rows that come to it. A row is sent once for each (token, destination), a result for each
choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weaveopt.cost_model.collectives import collective_us, fabric_costs, measured_parts_us
from weaveopt.cost_model.curve import nearest_curve, read_points
from weaveopt.cost_model.host import host_us
from weaveopt.cost_model.imbalance import busiest_over_mean
from weaveopt.cost_model.kernels import memory_us
from weaveopt.cost_model.machine import Curve, Machine
from weaveopt.cost_model.mixture import Mixture, gemms_us, kernels_us
from weaveopt.records.candidate import Fabric
from weaveopt.records.site import DTYPE_BYTES
from weaveopt.records.skew import UNIFORM, Skew

OP, DISPATCH, COMBINE = "expert_exchange", "dispatch", "combine"
"""Curves of a fabric of GPUs: rows to the ranks of their experts, by the bytes that a rank pushes to others; and the
sum of the returned results, by their bytes."""
_ID_BYTES = 8
_LIBRARY_KERNELS = 20
"""Kernels around the library's exchanges: routing, sorting, gathers, the weighted sum."""
_LIBRARY_PASSES = 33.0
"""Times that a rank's chosen rows are read or written around the library's exchanges on a GPU: gathers, scatters, and
the sum in fp32, operator by operator, of which copies by index do not reach the memory's rate. Of blocks that were
measured on two H100s, 21 to 51 are left without experts and exchanges, from 2048 tokens."""
_NATIVE_CALLS = 8
"""Into native code and out of torch in a call over shared memory, each as dear for the host as a kernel."""


@dataclass(frozen=True)
class ShardedMixture:
    """A mixture of which every one of `world` ranks holds some experts and some tokens."""

    of_rank: Mixture
    """A rank's own tokens, and its experts; its rows are as many as its tokens have choices."""
    world: int
    skew: Skew = UNIFORM
    """Skew of the choices of all tokens, over the experts of all ranks."""

    def with_tokens(self, tokens: int) -> ShardedMixture:
        """The same, with so many tokens on each rank."""
        return replace(self, of_rank=replace(self.of_rank, tokens=tokens))

    @property
    def row_bytes(self) -> int:
        return self.of_rank.hidden * DTYPE_BYTES[self.of_rank.dtype]

    @property
    def busiest_share(self) -> float:
        """Fraction of all choices that are of the busiest rank's experts."""
        return self.skew.of_busiest_rank(self.of_rank.experts, self.world)[0]

    @property
    def of_busiest(self) -> Mixture:
        """Mixture that the busiest rank computes, of all ranks' tokens; its `tokens` are one rank's."""
        share, skew = self.skew.of_busiest_rank(self.of_rank.experts, self.world)
        return replace(self.of_rank, choices=self.of_rank.choices * share * self.world, skew=skew)

    @property
    def rows_sent(self) -> float:
        """From all others to the busiest rank: no rank sends more."""
        missed: float = (1.0 - self.busiest_share) ** self.of_rank.choices
        return self.of_rank.tokens * (self.world - 1) * (1.0 - missed)

    @property
    def rows_returned(self) -> float:
        return self.of_rank.rows * (self.world - 1) * self.busiest_share

    @property
    def sent_bytes(self) -> float:
        return self.rows_sent * self.row_bytes

    @property
    def returned_bytes(self) -> float:
        return self.rows_returned * self.row_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes on the busiest rank's link: rows to experts, and results to the owners of the tokens."""
        return round(self.sent_bytes + self.returned_bytes)


@dataclass(frozen=True)
class PushedParts:
    """Times of the operation on a fabric where rows are stored into other ranks' memory, in microseconds."""

    experts: float
    weights: float
    """Further reads of the weights by every batch but the first, charged in full: the saving of a batch is not
    measured."""
    push: float
    gather: float
    combine: float
    synchronize: float
    host: float
    waiting: float = 0.0
    """For the rank with most tokens, which comes last."""


def pushed_parts(
    machine: Machine, fabric: Fabric, sharded: ShardedMixture, batches: int, window_us: float = 0.0
) -> PushedParts | None:
    """None where the profile has no synchronization of the fabric. `batches`: in how many parts experts see rows.
    `window_us`: what a rank computes on its own tokens before the call."""
    synchronize = synchronize_us(machine, fabric, sharded)
    if synchronize is None:
        return None
    last = of_last_rank(machine, sharded)
    moved = last.rows_sent + last.rows_returned
    return PushedParts(
        experts=experts_us(machine, sharded, batches),
        weights=(batches - 1) * memory_us(machine, sharded.of_busiest.weight_bytes),
        push=memory_us(machine, 2 * moved * sharded.row_bytes),
        gather=gather_us(machine, sharded, batches),
        combine=combine_us(machine, last),
        synchronize=synchronize,
        host=_NATIVE_CALLS * host_us(machine),
        waiting=waiting_us(machine, sharded.world, window_us),
    )


@dataclass(frozen=True)
class GpuParts:
    """Times of the operation between GPUs that reach each other's memory, in microseconds."""

    experts: float
    """As measured of a mixture whose tokens every rank has, its sum over choices included."""
    dispatch: float
    returned: float
    """Results of others' tokens over the link, at the rate of the dispatch, as far as the second GEMM does not hide
    them, which sends them as it makes them."""
    combine: float
    """Launch and wait of the sum over returned results. What it takes for its rows is in `experts`, which sums as
    many."""
    host: float
    waiting: float = 0.0
    """For the rank with most tokens, which comes last."""


_SECOND_GEMM = 1.0 / 3.0
"""Share of the second GEMM in the experts' time: a gated first one is twice as much work. Of experts that are not
gated it is a half, so less is taken to be hidden than is."""
_GPU_LAUNCHES = 6
"""Kernels of a call: dispatch, two that route, two GEMMs, the sum."""
_COUNT_CALLS = 2
"""Host calls before the kernels, if ranks hold batches of their own: one into native code, and the hosts' exchange of
counts. Each is taken to be as dear as a kernel, which was not measured. No device is waited for."""


def gpu_parts(
    machine: Machine,
    fabric: Fabric,
    sharded: ShardedMixture,
    kernels: str,
    transposed: bool,
    own_batches: bool = False,
    window_us: float = 0.0,
) -> GpuParts | None:
    """With experts' kernels of that name (see `kernels_us`). None where the profile lacks one of the times.
    `window_us`: what a rank computes on its own tokens before the call.

    Of the blocks measured on two H100s with even routing it is off by 6 % on average, and was by 13 % with all results
    charged as exposed and summed twice.
    """
    experts = kernels_us(machine, replace(sharded.of_busiest, transposed=transposed), kernels)
    pushed = _curve(machine, fabric, DISPATCH, sharded.world)
    summed = _curve(machine, fabric, COMBINE, sharded.world)
    if experts is None or pushed is None or summed is None:
        return None
    last = of_last_rank(machine, sharded) if own_batches else sharded
    sent_us = read_points(machine, pushed.origin, pushed.points, max(last.returned_bytes, 1.0)) - pushed.points[0].us
    return GpuParts(
        experts=experts,
        dispatch=read_points(machine, pushed.origin, pushed.points, max(last.sent_bytes, 1.0)),
        returned=max(sent_us - experts * _SECOND_GEMM, 0.0),
        combine=summed.points[0].us,
        host=(_GPU_LAUNCHES + own_batches * _COUNT_CALLS) * host_us(machine),
        waiting=waiting_us(machine, sharded.world, window_us),
    )


def _curve(machine: Machine, fabric: Fabric, variant: str, world: int) -> Curve | None:
    """The curve of the nearest world size; None if there is none."""
    if fabric not in {costs.fabric for costs in machine.fabric_costs}:
        return None
    return nearest_curve(fabric_costs(machine, fabric).curves_of(OP, variant), world)


def experts_us(machine: Machine, sharded: ShardedMixture, batches: int = 1) -> float:
    """Both grouped GEMMs and the pass between them, in microseconds; the pass in so many parts, which caches may hold
    where they do not hold the whole."""
    mixture = sharded.of_busiest
    between = mixture.rows * (mixture.wide + mixture.width) * DTYPE_BYTES[mixture.dtype]
    return gemms_us(machine, mixture) + batches * memory_us(machine, between / batches)


def combine_us(machine: Machine, sharded: ShardedMixture) -> float:
    """The weighted sum over choices."""
    mixture = sharded.of_rank
    return memory_us(machine, (mixture.rows + mixture.tokens) * sharded.row_bytes)


def gather_us(machine: Machine, sharded: ShardedMixture, batches: int = 1) -> float:
    """Rows into the order of the experts, and results out of it, in so many parts."""
    return batches * memory_us(machine, 4 * sharded.of_busiest.rows * sharded.row_bytes / batches)


def library_exchange_us(machine: Machine, sharded: ShardedMixture, hosts: int = 1) -> float:
    """Four all-to-alls (counts, rows, ids, results), in microseconds."""
    world, sent = sharded.world, sharded.rows_sent
    sizes = (
        2 * _ID_BYTES * world,
        sent * sharded.row_bytes,
        sent * sharded.of_rank.choices * _ID_BYTES,
        sharded.rows_returned * sharded.row_bytes,
    )
    return sum(collective_us(machine, "all_to_all", max(size, 1.0), world, hosts) for size in sizes)


def library_kernels_us(machine: Machine, sharded: ShardedMixture) -> float:
    """Time of the kernels around the library's exchanges on every rank."""
    if machine.device == "cuda":
        moved = memory_us(machine, _LIBRARY_PASSES * sharded.of_rank.rows * sharded.row_bytes)
    else:
        moved = combine_us(machine, sharded) + gather_us(machine, sharded)
    return moved + _LIBRARY_KERNELS * (memory_us(machine, 1) + host_us(machine))


def synchronize_us(machine: Machine, fabric: Fabric, sharded: ShardedMixture) -> float | None:
    """Both synchronizations of a call on a fabric: before the experts and after them.

    As measured of the fabric's own gather, without its rows. None where the profile has none.
    """
    parts = measured_parts_us(machine, fabric, "all_gather", 1, sharded.world)
    return None if parts is None else 2 * parts[0]


def of_last_rank(machine: Machine, sharded: ShardedMixture) -> ShardedMixture:
    """The mixture with the tokens of the rank that has most, where the machine's ranks differ. Experts have the rows of
    all ranks, which even out."""
    tokens = sharded.of_rank.tokens
    return sharded.with_tokens(round(tokens * busiest_over_mean(machine.imbalance, sharded.world)))


def waiting_us(machine: Machine, world: int, window_us: float) -> float:
    """Time that a rank of mean load waits for the busiest one, after `window_us` of work on its own tokens."""
    return (busiest_over_mean(machine.imbalance, world) - 1.0) * window_us
