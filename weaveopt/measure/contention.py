"""Communication and computation at the same time on one GPU, and copies without any SM."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from weaveopt.cost_model.machine import Crowded
from weaveopt.fabrics import symmetric
from weaveopt.measure.clock import Launch, Sample, meet, slowest
from weaveopt.measure.exchanges import DTYPE, Fused, Ranks, fused_peer
from weaveopt.records.candidate import Algorithm, Form, Lowering

TOKENS, HIDDEN, DEPTH = 4096, 8192, 7168
CTAS = (8, 16, 32, 64)
ROUNDS = 5
COPY_BYTES = 64 << 20
Step = Callable[[], object]


def kernels() -> list[Fused]:
    """The exchanges that run beside a product: for the arena."""
    return [Fused(Lowering(TOKENS, Algorithm.TWO_SHOT, Form.BULK, ctas), HIDDEN, TOKENS) for ctas in CTAS]


class Product:
    """A product that fills the device for about half a millisecond."""

    def __init__(self, device: torch.device) -> None:
        self._a = torch.randn(TOKENS, DEPTH, device=device, dtype=DTYPE)
        self._weight = torch.randn(HIDDEN, DEPTH, device=device, dtype=DTYPE).t() * 0.02
        self._out = torch.empty(TOKENS, HIDDEN, device=device, dtype=DTYPE)

    def __call__(self) -> object:
        return torch.mm(self._a, self._weight, out=self._out)


def crowded(ranks: Ranks) -> list[Crowded]:
    """For each number of CTAs, how much slower product and exchange are beside each other."""
    product = Product(ranks.device)
    found = []
    for fused in kernels():
        exchange = fused_peer(ranks, fused)
        step = _numbered(exchange)
        alone_us, exchange_us = _beside(ranks, product, 12, None, 0), _beside(ranks, step, 24, None, 0)
        # The other one runs from before the timed one's start until after its end.
        product_us = _beside(ranks, product, 12, step, 2 * 12 * alone_us / exchange_us)
        exchange_beside_us = _beside(ranks, step, 24, product, 3 * 24 * exchange_us / alone_us)
        found.append(
            Crowded(
                fused.lowering.num_ctas,
                round(max(product_us / alone_us, 1.0), 3),
                round(max(exchange_beside_us / exchange_us, 1.0), 3),
            )
        )
    return found


def _numbered(launch: Launch) -> Step:
    def step() -> object:
        return launch(0)

    return step


def _beside(ranks: Ranks, timed: Step, count: int, other: Step | None, other_count: float) -> float:
    """Microseconds of one `timed` while `other` runs on a stream of its own; the slowest rank's."""
    side = torch.cuda.Stream()
    times = []
    for _ in range(ROUNDS):
        meet(ranks.process_group)
        if other is not None:
            with torch.cuda.stream(side):
                for _ in range(int(other_count) + 2):
                    other()
            # Both streams are full before anything is timed.
            timed()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            timed()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    [slow] = slowest([Sample(median(times), 0.0)], ranks.process_group)
    return slow.us


def copies(ranks: Ranks) -> tuple[float, float, float]:
    """(latency in us, bytes a second alone, the same while all ranks copy and products run) of pulls from a peer."""
    from torch._C._distributed_c10d import _SymmetricMemory

    count = COPY_BYTES // DTYPE.itemsize
    assert ranks.process_group is not None
    buffer = _SymmetricMemory.empty_strided_p2p((count,), (1,), DTYPE, ranks.device)
    handle = symmetric.rendezvous(buffer, ranks.process_group)
    peer = handle.get_buffer((ranks.rank + 1) % ranks.world, (count,), DTYPE)
    target = torch.empty(count, device=ranks.device, dtype=DTYPE)
    product = Product(ranks.device)

    def pull() -> object:
        return target.copy_(peer)

    def pull_little() -> object:
        return target[:8].copy_(peer[:8])

    times = []
    for who in range(ranks.world):  # one rank after the other: nobody else is on the links
        meet(ranks.process_group)
        if who == ranks.rank:
            times = [_own_us(pull), _own_us(pull_little)]
    meet(ranks.process_group)
    alone_us, latency_us = (sample.us for sample in slowest([Sample(us, 0.0) for us in times], ranks.process_group))
    contended_us = _beside(ranks, pull, 12, product, 20)
    return latency_us, COPY_BYTES / alone_us * 1e6, COPY_BYTES / contended_us * 1e6


def _own_us(step: Step) -> float:
    step()
    times: list[float] = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(8):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / 8)
    return median(times)
