"""Cases that the cost model is compared with the clock on: others than those that profiles are made of."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.workloads import prediction_sweep
from benchmarks.workloads.prediction_model import choice_row, name_of, predicted_us
from weaveopt import cost_model
from weaveopt.cost_model import Machine
from weaveopt.measure.cases import collectives, gemm, memory
from weaveopt.measure.cases.attention import library as attention
from weaveopt.measure.cases.attention.library import AttentionCase
from weaveopt.measure.cases.reduction import calls, peer
from weaveopt.measure.cases.reduction.calls import Fused
from weaveopt.measure.clock import Clock, CudaClock, Launch, Sample, barrier, slowest
from weaveopt.measure.host_clock import CpuClock
from weaveopt.measure.ranks import Ranks, subgroup
from weaveopt.ops.reduction.prices.kernels import kernel_variants
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import LEAVE, Fabric


@dataclass(frozen=True)
class Cases:
    """Cases of one kind of device."""

    products: int
    product_rows: tuple[int, int]
    product_sides: tuple[int, ...]
    norms: tuple[tuple[int, int], ...]
    """(tokens, hidden)."""
    attention: tuple[AttentionCase, ...]
    message_bytes: tuple[int, ...]
    site_tokens: tuple[int, ...]
    site_hiddens: tuple[int, ...]
    ctas: tuple[int, ...]
    """Numbers of CTAs that no profile holds, for bulk copies."""


GPU = Cases(
    products=90,
    product_rows=(1, 12000),
    # Of models' layers, whole and shared by 2, 4 and 8 ranks.
    product_sides=(
        640, 896, 1280, 1536, 1792, 2304, 2560, 3456, 3696, 4608, 5376, 6912, 7392, 8064, 9216, 10240, 12288,
    ),
    norms=((3, 5120), (3, 8192), (100, 8192), (700, 5120), (700, 8192), (3000, 8192), (9000, 5120), (20000, 4096)),
    attention=(
        AttentionCase(1, 16, 700, 700), AttentionCase(1, 8, 1500, 1500), AttentionCase(1, 32, 1024, 1024),
        AttentionCase(2, 16, 1024, 1024), AttentionCase(1, 16, 3000, 3000), AttentionCase(1, 10, 2048, 2048),
        AttentionCase(1, 16, 1500, 1500, True), AttentionCase(1, 16, 3000, 3000, True), AttentionCase(4, 16, 1, 2048),
        AttentionCase(16, 16, 1, 1500), AttentionCase(24, 8, 1, 4096),
    ),
    message_bytes=(24 << 10, 200 << 10, 1536 << 10, 6 << 20, 24 << 20, 96 << 20),
    site_tokens=(1, 3, 12, 24, 50, 100, 200, 400, 700, 1000, 1500, 3000, 6000, 12000),
    site_hiddens=(6144, 8192),
    ctas=(12, 24, 48, 96),
)  # fmt: skip
CPU = Cases(
    products=24,
    product_rows=(1, 1024),
    product_sides=(640, 768, 1024, 1536, 1792),
    norms=((3, 4096), (24, 4096), (200, 4096), (700, 4096)),
    attention=(),
    message_bytes=(24 << 10, 200 << 10, 1536 << 10, 6 << 20),
    site_tokens=(3, 24, 100, 400, 700),
    site_hiddens=(4096,),
    ctas=(),
)


class Trial:
    """All measurements, in the same order on all ranks."""

    def __init__(self, device: torch.device, machine: Machine, quick: bool, num_swept: int) -> None:
        self.device, self.machine, self.quick, self.num_swept = device, machine, quick, num_swept
        self.is_gpu = device.type == "cuda"
        self.cases = GPU if self.is_gpu else CPU
        self.clock: Clock = CudaClock() if self.is_gpu else CpuClock()
        self.rows: list[record.Row] = []
        self.world = dist.get_world_size()
        self.worlds = sorted({2, self.world}, reverse=True)
        self.fabric = Fabric.PEER if self.is_gpu else Fabric.SHM
        self.span = prediction_sweep.GPU if self.is_gpu else prediction_sweep.CPU
        self.most = 0
        """On shared memory: the most tokens of a site."""
        self.code_us = 0.0 if self.is_gpu else memory.call_us(self.clock, device, memory.NORM)
        """CPU ranks: host time of the generated code around a kernel, which is no part of its price."""

    def add(self, kind: str, case: dict[str, record.Scalar], sample: Sample) -> None:
        named: dict[str, record.Scalar] = {"kind": kind, **case}
        row = record.row(
            case=named,
            weave_us=sample.us,
            baselines={"measured": sample.us},
            predicted_us=predicted_us(self.machine, named),
            parameters={"spread": round(sample.spread, 4)},
        )
        self.rows.append(row)

    def run(self) -> list[record.Row]:
        with torch.no_grad():
            self.products()
            self.kernels()
            for world in self.worlds:
                ranks = subgroup(world, self.device)
                for step in (self.collectives, self.sites, self.sweep):
                    if ranks.inside:
                        step(ranks)
                    # After each one, because ranks outside the group wait here, and no longer than a collective may.
                    barrier()
        return self.rows

    def products(self) -> None:
        numbers = Random(7)
        low, high = self.cases.product_rows
        sides, count = self.cases.product_sides, 6 if self.quick else self.cases.products
        largest = (high, sides[-1], sides[-1])
        cache_bytes = gemm.GPU_CACHE_BYTES if self.is_gpu else gemm.CPU_CACHE_BYTES
        runner = gemm.GemmRunner(self.device, torch.bfloat16, cache_bytes, largest)
        for _ in range(count):
            m = int(low * (high / low) ** numbers.random())
            n, k = numbers.choice(sides), numbers.choice(sides)
            guess_us = cost_model.gemm_us(self.machine, cost_model.Gemm(m, k, n), "bfloat16")
            [sample] = slowest([runner.sample(self.clock, m, n, k, guess_us)])
            self.add("product", {"m": m, "n": n, "k": k}, sample)

    def kernels(self) -> None:
        torch._dynamo.config.recompile_limit = 1024
        for tokens, hidden in self.cases.norms[:2] if self.quick else self.cases.norms:
            _, sample = memory.fused_kernel(self.clock, self.device, memory.NORM, tokens, hidden, 10.0)
            sample = Sample(max(sample.us - self.code_us, 0.3), sample.spread)
            self.add("add_norm", {"tokens": tokens, "hidden": hidden}, slowest([sample])[0])
        for case in self.cases.attention[:2] if self.quick else self.cases.attention:
            sample = slowest([attention.attention(self.clock, self.device, case, 30.0)])[0]
            named: dict[str, record.Scalar] = {
                "batch": case.batch, "heads": case.heads, "q": case.queries, "kv": case.keys, "causal": case.causal,
            }  # fmt: skip
            self.add("attention", named, sample)

    def collectives(self, ranks: Ranks) -> None:
        kinds = collectives.COLLECTIVES if self.is_gpu else collectives.COLLECTIVES[:3]
        launch = self.machine.launch
        assert launch is not None, f"profile {self.machine.name} was not made by weaveopt calibrate"
        little_us = launch.graph_us if self.is_gpu else launch.eager_us
        for kind in kinds[:1] if self.quick else kinds:
            for size in self.cases.message_bytes:
                sample = collectives.library_call(self.clock, ranks, kind, size, 50.0, little_us)
                self.add(kind, {"ranks": ranks.world, "bytes": size}, sample)

    # Sites: every candidate of one, and leaving it alone.

    def candidates(self, ranks: Ranks, hidden: int, tokens: int) -> list[Fused]:
        """Every kernel that the model may choose, and for bulk copies other numbers of CTAs as well."""
        num_bytes = tokens * hidden * calls.DTYPE.itemsize
        found = [
            variant
            for variant in kernel_variants(self.machine, self.fabric, hidden, ranks.world)
            if variant.covers(num_bytes)
            if variant.transfer is not Transfer.BULK or num_bytes >= peer.BULK_BYTES
        ]
        every = [KernelRow(tokens, each.algorithm, each.transfer, each.num_ctas) for each in found]
        if any(each.transfer is Transfer.BULK for each in found):
            every += [KernelRow(tokens, Algorithm.TWO_SHOT, Transfer.BULK, ctas) for ctas in self.cases.ctas]
        fused = [Fused(lowering, hidden, tokens) for lowering in every]
        return [each for each in fused if calls.is_supported(each, ranks.world, ranks.device)]

    def sites(self, ranks: Ranks) -> None:
        cases = [(hidden, tokens) for hidden in self.cases.site_hiddens for tokens in self.cases.site_tokens]
        cases = cases[::6] if self.quick else cases
        every = {case: self.candidates(ranks, *case) for case in cases}
        self.reserve(ranks, [fused for each in every.values() for fused in each])
        for (hidden, tokens), candidates in every.items():
            self.site(ranks, hidden, tokens, candidates)

    def swept(self, ranks: Ranks) -> tuple[prediction_sweep.Choice, ...]:
        return prediction_sweep.plan(self.machine, ranks.world, self.num_swept, self.span)

    def reserve(self, ranks: Ranks, every: list[Fused]) -> None:
        """Symmetric memory for these and for the sweep, once, as ranks wait for it and graphs hold addresses."""
        every = every + [each.fused for each in self.swept(ranks) if each.fused is not None]
        if self.is_gpu:
            calls.reserve_peer(ranks, every)
            return
        self.most = max(fused.tokens for fused in every)
        calls.reserve_shm(ranks, max(fused.hidden for fused in every), self.most)

    def sweep(self, ranks: Ranks) -> None:
        """Sites at which only leaving and the choice are measured."""

        def leaving(launch: Launch) -> prediction_sweep.Timed:
            # On CPU ranks without guards, which are paid once a graph.
            guards_us = 0.0 if self.is_gpu or self.machine.launch is None else self.machine.launch.graph_us

            def timed(expected_us: float) -> Sample:
                sample = self.leave(ranks, launch, expected_us)
                return Sample(max(sample.us - guards_us, 1.0), sample.spread)

            return timed

        def exchange(fused: Fused) -> prediction_sweep.Timed:
            return self.exchange(ranks, fused)

        self.rows += prediction_sweep.measure(self.machine, ranks, self.swept(ranks), leaving, exchange)

    def leave(self, ranks: Ranks, launch: Launch, expected_us: float) -> Sample:
        """A site left alone."""
        return self.clock.together(launch, expected_us, ranks.process_group)

    def exchange(self, ranks: Ranks, fused: Fused, copy_us: float | None = None) -> prediction_sweep.Timed:
        """A fused kernel, ready for the clock; on CPU ranks without the copy that spares a GEMM, of `copy_us`."""
        if self.is_gpu:
            launch = calls.fused_peer(ranks, fused)
            return lambda expected_us: self.clock.together(launch, expected_us, ranks.process_group)
        launch = calls.fused_shm(ranks, fused, self.most)
        if copy_us is None:
            copy_us = calls.copy_us(self.clock, ranks, fused.tokens, fused.hidden)

        def timed(expected_us: float) -> Sample:
            sample = self.clock.together(launch, expected_us, ranks.process_group)
            return Sample(max(sample.us - copy_us, sample.us / 2), sample.spread)

        return timed

    def site(self, ranks: Ranks, hidden: int, tokens: int, every: list[Fused]) -> None:
        case: dict[str, record.Scalar] = {"ranks": ranks.world, "hidden": hidden, "tokens": tokens}
        us: dict[str, float] = {}
        sample = self.leave(ranks, unfused_site(ranks, hidden, tokens), 50.0)
        self.add(LEAVE, case, sample)
        us[LEAVE] = sample.us
        copy_us = 0.0 if self.is_gpu else calls.copy_us(self.clock, ranks, tokens, hidden)
        for fused in every:
            sample = self.exchange(ranks, fused, copy_us)(50.0)
            name = name_of(fused.row)
            self.add("fused", {**case, "kernel": name}, sample)
            if fused.row.num_ctas not in self.cases.ctas:
                us[name] = sample.us
        self.rows.append(choice_row(self.machine, case, us))


def unfused_site(ranks: Ranks, hidden: int, tokens: int) -> Launch:
    """Leaving a site alone in a graph of one size."""
    inputs = memory.kernel_inputs(ranks.device, memory.NORM, tokens, hidden)
    compiled: prediction_sweep.Compiled
    if ranks.device.type == "cpu":  # without guards, which are paid once a graph
        code = memory.generated_code(memory.add_norm, inputs)

        def compiled(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> object:
            return code([x, residual, weight])
    else:
        torch._dynamo.reset()
        compiled = torch.compile(memory.add_norm, dynamic=False)
    return prediction_sweep.left_alone(ranks, compiled, *inputs)
