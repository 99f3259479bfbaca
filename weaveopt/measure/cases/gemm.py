"""GEMMs on a grid of rows, columns and depths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from weaveopt.cost_model.machine import GemmCosts
from weaveopt.measure import fit
from weaveopt.measure.cases import gemm_fit
from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.gemm_fit import Corner, Grid
from weaveopt.measure.clock import Clock, Sample, slowest
from weaveopt.measure.draft import Draft
from weaveopt.measure.session import CalibrationSession

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
"""Columns and depth at which rates by rows are read, on machines without waves."""
CPU_DRAWN = 1 << 20
GPU_CACHE_BYTES, CPU_CACHE_BYTES = 200 << 20, 96 << 20


class GemmRunner:
    """`a[m, k] @ weight[n, k].t()`. Weights take turns in more memory than the caches hold, as a model's layers do."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, cache_bytes: int, largest: tuple[int, int, int]
    ) -> None:
        m, n, k = largest
        self._weights = _random(max(2 * cache_bytes // dtype.itemsize, n * k), device, dtype) * 0.05
        self._rows = _random(m * k, device, dtype) * 0.5
        self._out = torch.empty(m * n, device=device, dtype=dtype)

    def sample(self, clock: Clock, m: int, n: int, k: int, expected_us: float) -> Sample:
        a = self._rows[: m * k].view(m, k)
        out = self._out[: m * n].view(m, n)
        copies = max(1, min(64, self._weights.numel() // (n * k)))
        weights = [self._weights[i * n * k : (i + 1) * n * k].view(n, k).t() for i in range(copies)]
        return clock.alone(lambda index: torch.mm(a, weights[index % copies], out=out), expected_us)


def _random(count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers. A CPU, whose GEMMs take as long whatever the numbers are, repeats a few of them: to draw all
    would take seconds."""
    drawn = torch.randn(min(count, CPU_DRAWN) if device.type == "cpu" else count, device=device).to(dtype)
    return drawn if drawn.numel() == count else drawn.repeat(-(-count // drawn.numel()))[:count]


def guess_us(m: int, n: int, k: int) -> float:
    """Guess a GEMM's time for the clock, before anything is measured."""
    return 3.0 + max(m * n * k / 3e8, (m * n + m * k + n * k) / 1.5e6)


def shared_out(items: Sequence[int], rank: int, world: int, copies: int) -> Iterator[int]:
    """The items of this rank: each goes to `copies` ranks, so that ranks need not all measure everything."""
    groups = max(1, world // copies)
    for index, item in enumerate(items):
        if index % groups == rank % groups:
            yield item


@dataclass
class Gemms(Family):
    """Measurements in bfloat16 and float32; the corners are divided among the ranks."""

    devices: ClassVar = frozenset({"cpu", "cuda"})
    grids: dict[str, Grid] = field(default_factory=dict)
    times: dict[str, dict[Corner, Sample]] = field(default_factory=dict)
    """Times of the corners, by dtype."""

    def measure_alone(self, session: CalibrationSession) -> None:
        grid = GPU_GRID if session.is_gpu else CPU_GRID
        if session.quick:
            grid = Grid(grid.m[::5], grid.n[::4], grid.k[::4])
        self._measure(session, torch.bfloat16, grid)
        self._measure(session, torch.float32, GPU_FP32_GRID if session.is_gpu else grid)

    def _measure(self, session: CalibrationSession, dtype: torch.dtype, grid: Grid) -> None:
        name = str(dtype).removeprefix("torch.")
        corners = [corner for corner in grid.corners if 2.0 * corner[0] * corner[1] * corner[2] <= LARGEST_FLOPS]
        if not session.is_gpu:
            # Large ones take too long for the information that they add.
            corners = [corner for corner in corners if corner[0] <= 256 or max(corner[1:]) <= CPU_RATES]
        cache_bytes = GPU_CACHE_BYTES if session.is_gpu else CPU_CACHE_BYTES
        copies = 2 if session.is_gpu and session.world > 2 else session.world
        mine: dict[int, Sample] = {}
        with session.as_many_as_cores() as active:
            if active:
                runner = GemmRunner(session.device, dtype, cache_bytes, (grid.m[-1], grid.n[-1], grid.k[-1]))
                share = list(shared_out(range(len(corners)), session.rank, session.world, copies))
                for done, index in enumerate(share):
                    session.show_progress(f"GEMMs {name}", done, len(share))
                    mine[index] = runner.sample(session.clock, *corners[index], guess_us(*corners[index]))
                if not session.is_gpu:
                    _calm(mine, corners, lambda corner: runner.sample(session.clock, *corner, guess_us(*corner)))
                del runner
        self.grids[name], self.times[name] = grid, _merged(corners, mine)
        if session.is_gpu:
            torch.cuda.empty_cache()

    def write(self, draft: Draft) -> None:
        draft.gemms += [self._costs(dtype, draft) for dtype in sorted(self.times)]

    def _costs(self, dtype: str, draft: Draft) -> GemmCosts:
        times, grid = self.times[dtype], self.grids[dtype]
        origin = draft.origin(f"gemms.{dtype}", times.values(), f"{len(times)} GEMMs, weights out of cache")
        if draft.is_gpu:
            return gemm_fit.tiled_gemms(dtype, origin, draft.units, grid, times)
        square = {corner: sample for corner, sample in times.items() if corner[1] == corner[2] == CPU_RATES}
        if not square:  # a coarse look
            n, k = max((corner[1:] for corner in times), key=lambda pair: pair[0] * pair[1])
            square = {corner: sample for corner, sample in times.items() if corner[1:] == (n, k)}
        size = max(corner[1] for corner in square)
        assert draft.launch is not None, "launches are measured first"
        rated = gemm_fit.rated_gemms(dtype, origin, min(draft.launch.graph_us, 2.0), size, square)
        return gemm_fit.with_samples(rated, grid, times)


def _calm(mine: dict[int, Sample], corners: Sequence[Corner], again: Callable[[Corner], Sample]) -> None:
    """Measures again what stands out among GEMMs of the same weight: another program may slow down a whole time."""
    for weight in sorted({corners[index][1:] for index in mine}):
        of_weight = [index for index in sorted(mine, key=lambda index: corners[index]) if corners[index][1:] == weight]
        rows = [(corners[index][0], mine[index]) for index in of_weight]
        calmed = fit.calmed(rows, lambda position, indices=of_weight: again(corners[indices[position]]))  # type: ignore[misc]
        mine.update(zip(of_weight, (sample for _, sample in calmed), strict=True))


def _merged(corners: list[Corner], mine: dict[int, Sample]) -> dict[Corner, Sample]:
    """Every rank's samples together: where several measured the same, the slowest."""
    none = Sample(0.0, 0.0)
    merged = slowest([mine.get(index, none) for index in range(len(corners))])
    return {corner: sample for corner, sample in zip(corners, merged, strict=True) if sample.us > 0}
