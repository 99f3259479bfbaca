"""What is measured of a machine, step by step, in the order in which all ranks take the steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from weaveopt.cost_model.machine import Crowded
from weaveopt.measure import contention, exchanges, fit, kernels
from weaveopt.measure.clock import Clock, CpuClock, CudaClock, Sample, meet, slowest
from weaveopt.measure.exchanges import COLLECTIVES, Fused, Ranks
from weaveopt.measure.kernels import AttentionCase, Grid, GroupedCase
from weaveopt.records.candidate import Algorithm, Form, Lowering

Corner = tuple[int, int, int]
"""(m, n, k) of a product."""
Tell = Callable[[str, int, int], None]
"""(what, steps done, steps in all)."""

GPU_GRID = Grid(
    m=(
        1, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192,
        16384,
    ),
    n=(256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 14336, 28672),
    k=(256, 512, 1024, 2048, 3584, 4096, 5120, 7168, 8192, 14336),
)  # fmt: skip
GPU_FP32_GRID = Grid(m=(1, 16, 64, 256, 1024, 4096), n=(1024, 4096, 8192), k=(1024, 4096, 8192))
LARGEST_FLOPS = 2.0 * 16384 * 14336 * 8192
CPU_GRID = Grid(m=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), n=(512, 2048, 4096), k=(512, 2048, 4096))
CPU_RATES = 2048
GPU_CACHE_BYTES, CPU_CACHE_BYTES = 200 << 20, 96 << 20
GPU_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
GPU_HIDDENS = (2048, 4096, 5120, 8192, 16384)
FUSED_LIMIT_BYTES = 512 << 20
MAIL_ONE_SHOT_BYTES, MAIL_TWO_SHOT_BYTES, BULK_BYTES = 2 << 20, 64 << 20, 1 << 20
BULK_CTAS = (8, 16, 32, 64, 128)
NORM_TOKENS = (1, 16, 64, 256, 512, 1024, 4096, 16384)
NORM_HIDDENS = (2048, 4096, 8192)
GATE_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
GATE_HIDDEN = 7168
CPU_NORM_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
CPU_HIDDEN = 4096
SHM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GPU_ATTENTION = (
    *(AttentionCase(1, 16, n, n) for n in (128, 256, 512, 1024, 2048, 4096)),
    *(AttentionCase(1, heads, 2048, 2048) for heads in (8, 32)),
    *(AttentionCase(1, 16, n, n, causal=True) for n in (256, 512, 1024, 2048, 4096)),
    *(AttentionCase(batch, 16, 1, 2048) for batch in (1, 8, 32)),
)  # fmt: skip
GPU_GROUPED = tuple(
    GroupedCase(8, rows, k, n) for k, n in ((4096, 7168), (3584, 4096)) for rows in (64, 512, 2048, 8192)
)
"""Experts of mixtures as ranks hold them, from few rows each to many."""


@dataclass
class Found:
    """Samples by what was measured. Complete and alike on every rank once `Suite.run` is through."""

    launch_us: float = 0.0
    eager_us: float = 0.0
    products: dict[str, dict[Corner, Sample]] = field(default_factory=dict)
    norms: dict[int, list[tuple[int, Sample]]] = field(default_factory=dict)
    gates: list[tuple[int, Sample]] = field(default_factory=list)
    copy: tuple[int, Sample] | None = None
    attention: dict[AttentionCase, Sample] = field(default_factory=dict)
    grouped: dict[GroupedCase, tuple[Sample, Sample]] = field(default_factory=dict)
    """Grouped, and as one product."""
    collectives: dict[tuple[str, int], list[tuple[int, Sample]]] = field(default_factory=dict)
    """By (kind, world): (bytes, time)."""
    fused: dict[tuple[int, int, Lowering], list[tuple[int, Sample]]] = field(default_factory=dict)
    """By (world, hidden, kernel; its `max_tokens` is 0): (bytes, time)."""
    shm_whole_us: dict[int, float] = field(default_factory=dict)
    """By world: the largest two-shot exchange with the rows of the sum handed out too."""
    crowded: list[Crowded] = field(default_factory=list)
    copies: tuple[float, float, float] | None = None


class Suite:
    """All measurements of one kind of device, in order. `quick`: a coarse look for tests."""

    def __init__(self, device: torch.device, tell: Tell, quick: bool = False) -> None:
        self.device, self.tell, self.quick = device, tell, quick
        self.is_gpu = device.type == "cuda"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.clock: Clock = CudaClock() if self.is_gpu else CpuClock()
        self.found = Found()

    @property
    def worlds(self) -> tuple[int, ...]:
        """Sizes of the groups that measure together."""
        every = range(2, self.world + 1)
        # GPU groups are halves of halves; CPU ranks come in any number.
        return tuple(n for n in every if not self.is_gpu or n == self.world or n & (n - 1) == 0)

    @property
    def grid(self) -> Grid:
        grid = GPU_GRID if self.is_gpu else CPU_GRID
        return Grid(grid.m[::5], grid.n[::4], grid.k[::4]) if self.quick else grid

    def run(self) -> Found:
        with torch.no_grad():
            self.own_kernels()
            for world in self.worlds:
                ranks = exchanges.subgroup(world, self.device)
                if ranks.inside:
                    self.together(ranks)
                meet()
        everything = [self.found]
        dist.broadcast_object_list(everything, src=0)
        self.found = everything[0]
        return self.found

    # Kernels of a rank's own.

    @contextmanager
    def _as_many_as_cores(self) -> Iterator[bool]:
        """CPU ranks beyond the cores wait, or the cores would be shared by what is measured."""
        yield self.is_gpu or self.rank < len(os.sched_getaffinity(0))
        meet()

    def own_kernels(self) -> None:
        self.tell("launches", 0, 1)
        with self._as_many_as_cores() as active:
            if active:
                self.found.launch_us, self.found.eager_us = kernels.launches(self.clock, self.device)
        for dtype in (torch.bfloat16, torch.float32):
            self.products(dtype)
        self.memory()
        if self.is_gpu:
            self.attention()
            self.grouped()

    def products(self, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        grid = self.grid if dtype is torch.bfloat16 or not self.is_gpu else GPU_FP32_GRID
        corners = [corner for corner in grid.corners if 2.0 * corner[0] * corner[1] * corner[2] <= LARGEST_FLOPS]
        if not self.is_gpu:
            # Large ones take too long for what they tell.
            corners = [corner for corner in corners if corner[0] <= 256 or max(corner[1:]) <= CPU_RATES]
        cache = GPU_CACHE_BYTES if self.is_gpu else CPU_CACHE_BYTES
        copies = 2 if self.is_gpu and self.world > 2 else self.world
        mine: dict[int, Sample] = {}
        with self._as_many_as_cores() as active:
            if active:
                products = kernels.Products(self.device, dtype, cache, (grid.m[-1], grid.n[-1], grid.k[-1]))
                share = list(kernels.shared_out(range(len(corners)), self.rank, self.world, copies))
                for done, index in enumerate(share):
                    if done % 16 == 0:
                        self.tell(f"products {name}", done, len(share))
                    m, n, k = corners[index]
                    mine[index] = products.sample(self.clock, m, n, k, self._product_guess_us(m, n, k))
                del products
        self.found.products[name] = self._merged(corners, mine)
        if self.is_gpu:
            torch.cuda.empty_cache()

    def _product_guess_us(self, m: int, n: int, k: int) -> float:
        return 3.0 + max(m * n * k / 3e8, (m * n + m * k + n * k) / 1.5e6)

    def _merged(self, corners: list[Corner], mine: dict[int, Sample]) -> dict[Corner, Sample]:
        """Every rank's samples together: where several measured the same, the slowest."""
        none = Sample(0.0, 0.0)
        merged = slowest([mine.get(index, none) for index in range(len(corners))])
        return {corner: sample for corner, sample in zip(corners, merged, strict=True) if sample.us > 0}

    def memory(self) -> None:
        torch._inductor.config.compile_threads = 1  # a pool of compilers would be measured too
        torch._dynamo.config.recompile_limit = 1024
        hiddens: tuple[int, ...] = NORM_HIDDENS if self.is_gpu else (CPU_HIDDEN,)
        tokens: tuple[int, ...] = NORM_TOKENS if self.is_gpu else CPU_NORM_TOKENS
        if self.quick:
            hiddens, tokens = hiddens[:1], tokens[::3]
        cases = [(kernels.NORM, hidden, count) for hidden in hiddens for count in tokens]
        if self.is_gpu:
            cases += [(kernels.GATE, GATE_HIDDEN, count) for count in (GATE_TOKENS[::3] if self.quick else GATE_TOKENS)]
        mine: list[tuple[int, Sample]] = []
        with self._as_many_as_cores() as active:
            for done, (kernel, hidden, count) in enumerate(cases):
                self.tell("kernels bound by memory", done, len(cases))
                if active:
                    num_bytes = kernel.num_bytes(count, hidden)
                    guess_us = 2.0 + num_bytes / (3e6 if self.is_gpu else 2e4)
                    mine.append(kernels.fused_kernel(self.clock, self.device, kernel, count, hidden, guess_us))
                else:
                    mine.append((kernel.num_bytes(count, hidden), Sample(0.0, 0.0)))
            large = 1 << (31 if self.is_gpu else 28)
            copied = Sample(0.0, 0.0)
            if active:
                copied = kernels.copy(self.clock, self.device, large, large / (3e6 if self.is_gpu else 1e4))
        merged = slowest([sample for _, sample in mine] + [copied])
        call_us = 0.0 if self.is_gpu else self.found.launch_us
        for (kernel, hidden, _), (num_bytes, _), sample in zip(cases, mine, merged, strict=False):
            # On CPU ranks the call of a compiled function is paid once a graph, not once a kernel.
            own = Sample(max(sample.us - call_us, 0.3), sample.spread)
            rows = self.found.norms.setdefault(hidden, []) if kernel is kernels.NORM else self.found.gates
            rows.append((num_bytes, own))
        self.found.copy = (large, merged[-1])

    def attention(self) -> None:
        cases = GPU_ATTENTION[::2] if self.quick else GPU_ATTENTION
        mine = []
        for done, case in enumerate(cases):
            self.tell("attention", done, len(cases))
            mine.append(kernels.attention(self.clock, self.device, case, 30.0))
        self.found.attention = dict(zip(cases, slowest(mine), strict=True))

    def grouped(self) -> None:
        if not kernels.has_grouped(self.device):
            return
        cases = GPU_GROUPED[::3] if self.quick else GPU_GROUPED
        mine: list[tuple[Sample, Sample]] = []
        for done, case in enumerate(cases):
            self.tell("grouped products", done, len(cases))
            guess_us = 3.0 + self._product_guess_us(case.one.m, case.one.n, case.one.k)
            mine.append(kernels.grouped(self.clock, self.device, case, guess_us))
        by_expert, at_once = (slowest([pair[which] for pair in mine]) for which in (0, 1))
        self.found.grouped = dict(zip(cases, zip(by_expert, at_once, strict=True), strict=True))

    # What ranks do together.

    def together(self, ranks: Ranks) -> None:
        self.collectives(ranks)
        if self.is_gpu:
            self.fused_peer(ranks)
        else:
            self.fused_shm(ranks)
        if self.is_gpu and ranks.world == self.world and not self.quick:
            self.tell("copies from peers", 0, 1)
            self.found.copies = contention.copies(ranks)

    def collectives(self, ranks: Ranks) -> None:
        exponents = range(11, 29 if self.is_gpu else 27, 4 if self.quick else 1)
        little_us = self.found.launch_us if self.is_gpu else self.found.eager_us
        for kind in COLLECTIVES:
            if kind == "all_to_all" and not self.is_gpu:
                continue  # Gloo has none for tensors of uneven parts
            sizes = [1 << exponent for exponent in (exponents if kind == "all_reduce" else exponents[::2])]

            def take(index: int, kind: str = kind, sizes: Sequence[int] = sizes) -> Sample:
                guess_us = 15.0 + sizes[index] / (2e5 if self.is_gpu else 5e2)
                launch = exchanges.collective(ranks, kind, sizes[index])
                sample = self.clock.together(launch, guess_us, ranks.process_group)
                return Sample(sample.us - min(little_us, sample.us / 2), sample.spread)

            rows = self._curve(f"{kind} of {ranks.world} ranks", sizes, take)
            self.found.collectives[kind, ranks.world] = rows

    def _curve(self, what: str, sizes: Sequence[int], take: Callable[[int], Sample]) -> list[tuple[int, Sample]]:
        """A time for each size, those that stand out measured again."""
        rows = []
        for index, size in enumerate(sizes):
            self.tell(what, index, len(sizes))
            rows.append((size, take(index)))
        return fit.calmed(rows, take)

    def fused_peer(self, ranks: Ranks) -> None:
        every = [fused for fused in self._peer_kernels() if exchanges.is_supported(fused, ranks.world, ranks.device)]
        exchanges.reserve_peer(ranks, [*every, *contention.kernels()])
        curves: dict[tuple[int, Lowering], list[Fused]] = {}
        for fused in every:
            curves.setdefault((fused.hidden, Lowering(0, *_kernel(fused.lowering))), []).append(fused)
        for (hidden, kernel), sizes in curves.items():

            def take(index: int, sizes: Sequence[Fused] = sizes) -> Sample:
                guess_us = 5.0 + sizes[index].bytes / 2e5
                return self.clock.together(exchanges.fused_peer(ranks, sizes[index]), guess_us, ranks.process_group)

            what = f"fused all-reduce of {ranks.world} ranks"
            self.found.fused[ranks.world, hidden, kernel] = self._curve(what, [each.bytes for each in sizes], take)
        if ranks.world == self.world and not self.quick:
            self.tell("product beside exchange", 0, 1)
            self.found.crowded = contention.crowded(ranks)

    def _peer_kernels(self) -> Iterator[Fused]:
        hiddens, tokens = (GPU_HIDDENS[1:2], GPU_TOKENS[::5]) if self.quick else (GPU_HIDDENS, GPU_TOKENS)
        for hidden in hiddens:
            for count in tokens:
                size = count * hidden * exchanges.DTYPE.itemsize
                if size > FUSED_LIMIT_BYTES:
                    continue
                ways: list[tuple[Algorithm, Form, int]] = []
                if size <= MAIL_ONE_SHOT_BYTES:
                    ways.append((Algorithm.ONE_SHOT, Form.MAIL, 0))
                if size <= MAIL_TWO_SHOT_BYTES:
                    ways.append((Algorithm.TWO_SHOT, Form.MAIL, 0))
                if size >= BULK_BYTES:
                    ways += [(Algorithm.TWO_SHOT, Form.BULK, ctas) for ctas in BULK_CTAS]
                for way in ways:
                    yield Fused(Lowering(count, *way), hidden, count)

    def fused_shm(self, ranks: Ranks) -> None:
        tokens = SHM_TOKENS[::3] if self.quick else SHM_TOKENS
        exchanges.reserve_shm(ranks, CPU_HIDDEN, tokens[-1])
        copies_us = [exchanges.copy_us(self.clock, ranks, count, CPU_HIDDEN) for count in tokens]

        def timed(fused: Fused, copy_us: float, sharded: bool = True) -> Sample:
            launch = exchanges.fused_shm(ranks, fused, tokens[-1], sharded)
            sample = self.clock.together(launch, 100.0, ranks.process_group)
            return Sample(max(sample.us - copy_us, sample.us / 2), sample.spread)

        for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT):
            kernel = Lowering(0, algorithm, Form.SEGMENT)
            every = [Fused(kernel, CPU_HIDDEN, count) for count in tokens]

            def take(index: int, every: Sequence[Fused] = every) -> Sample:
                return timed(every[index], copies_us[index])

            what = f"fused all-reduce of {ranks.world} ranks"
            self.found.fused[ranks.world, CPU_HIDDEN, kernel] = self._curve(what, [each.bytes for each in every], take)
        largest = Fused(Lowering(0, Algorithm.TWO_SHOT, Form.SEGMENT), CPU_HIDDEN, tokens[-1])
        self.found.shm_whole_us[ranks.world] = timed(largest, copies_us[-1], sharded=False).us


def _kernel(lowering: Lowering) -> tuple[Algorithm, Form, int]:
    return lowering.algorithm, lowering.form, lowering.num_ctas
