"""GEMM + reduce-scatter and all-gather + GEMM: every variant and baseline, checked against products in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
from torch import Tensor

import weaveopt.ops  # noqa: F401
from benchmarks import record
from benchmarks.ranks import Place, barrier
from benchmarks.timing import Step, attempt
from benchmarks.workloads.gemm_all_reduce import EXCHANGE_CTAS, Inputs, chains_us
from benchmarks.workloads.reduction import PUSH_BYTES_PER_S
from weaveopt import _native
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.fabrics import peer, rows_call
from weaveopt.measure.cases.gemm_comm import all_gather as all_gather_gemm
from weaveopt.measure.cases.gemm_comm import reduce_scatter as gemm_reduce_scatter
from weaveopt.measure.cases.memory import add_norm
from weaveopt.measure.cases.reduction import calls
from weaveopt.ops.gemm_comm.all_gather import op as gathers
from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall
from weaveopt.ops.gemm_comm.reduce_scatter import op as scatters
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, GemmReduceScatterNormCall
from weaveopt.ops.reduction import buffers
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import MemoryPlan

TIMEOUT_S = 60.0
EPS = 1e-5
"""Epsilon of `add_norm`."""
GEMM, SEQUENCE, ASYNC_TP = "gemm", "sequence", "async_tp"
MULTICAST_TOKENS = 2048
"""Up to so many, torch gathers by NVLink multicast where it may, unless the gathered rows are asked for too."""

Product = Callable[[], Tensor]
Steps = dict[str, Step]
T = TypeVar("T")

compiled_add_norm = torch.compile(add_norm, dynamic=False, fullgraph=True)


class Bench:
    """How a suite's calls are made, checked and timed."""

    suite: str
    bare: str
    """The variant without a cut."""
    op: ModuleType
    kind: type[GemmReduceScatterCall] | type[AllGatherGemmCall]

    def __init__(self, place: Place, hiddens: list[int], cuts: list[str], most_tokens: int) -> None:
        self.place, self.hiddens, self.most_tokens = place, hiddens, most_tokens
        self.variants = [self.bare, *cuts]
        self.normed: list[str] = []
        """Variants that hold what follows them too."""
        self.left_out = False
        """Torch's own function raised."""

    def call(self, hidden: int, variant: str) -> GemmReduceScatterCall | AllGatherGemmCall:
        return self.kind(
            site=f"benchmark.{self.suite}.{hidden}.{variant}", group=self.place.group, fabric=Fabric.PEER,
            world=self.place.world, hidden=hidden, dtype="bfloat16", max_tokens=self.most_tokens, timeout_s=TIMEOUT_S,
            cut="" if variant == self.bare else str(TileConfig(*map(int, variant.split(":")))),
        )  # fmt: skip

    def plans(self) -> Iterator[MemoryPlan]:
        ours = [self.call(hidden, variant) for hidden in self.hiddens for variant in self.variants]
        site = self.op.SITES[Fabric.PEER]
        yield rows_call.memory_plan(self.place.group, [(call, site.buffers(call)) for call in ours])

    def attempt(self, act: Callable[[], T]) -> T | None:
        """Result of `act`, which calls torch's own function; None where it raises on a rank, and from then on."""
        found = None if self.left_out else attempt(self.place, f"{self.suite}: {ASYNC_TP}", act)
        self.left_out = found is None
        return found

    def compare(self, products: Mapping[str, Product], want: Tensor, atol: float) -> None:
        """Each twice in a row. Raises `AssertionError`; torch's own is left out instead."""
        memory = peer.of(self.place.group)
        rows = [each for each in memory.layout.buffers if each.fill is None]

        def agree(name: str, product: Product) -> bool:
            barrier()  # no peer writes
            for buffer in rows:
                memory.tensor(buffer.offset, (buffer.num_bytes,), torch.uint8).fill_(0xFF)  # NaN
            barrier()
            found = [product() for _ in range(2)]
            torch.cuda.synchronize()
            where = f"{self.suite}, {name}, {tuple(want.shape)}, rank {self.place.rank}"
            for got in found:
                torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=atol, msg=lambda text: f"{where}: {text}")
            return True

        for name, product in products.items():
            if name == ASYNC_TP:
                self.attempt(partial(agree, name, product))
            elif name != SEQUENCE:  # NCCL rounds after every addition
                agree(name, product)

    def times(self, steps: Steps, num_flops: float) -> dict[str, float]:
        """Microseconds a call, by name; without torch's own function once it raised."""
        if self.left_out:
            steps = {name: step for name, step in steps.items() if name != ASYNC_TP}
        us = chains_us(self.place, steps, num_flops, may_fail=(ASYNC_TP,))
        self.left_out = ASYNC_TP not in us
        return us

    def made(self, case: dict[str, int], us: dict[str, float]) -> record.Row:
        """The row of `case`; `us` has the variants, the GEMM alone and the baselines."""
        world = self.place.world
        sent_bytes = (world - 1) / world * case["tokens"] * case["hidden"] * torch.bfloat16.itemsize
        bound_us = max(us[GEMM], sent_bytes / PUSH_BYTES_PER_S * 1e6)
        variants = [*self.variants, *self.normed]
        best = min(variants, key=lambda name: us[name])
        return record.row(
            case={**case, "dtype": "bfloat16", "ranks": world}, weave_us=us[best], bound_us=bound_us,
            baselines={name: value for name, value in us.items() if name not in (GEMM, *variants)},
            parameters={
                "variant": best, "gemm_us": round(us[GEMM], 1), "over_bare_gemm": round(us[best] / us[GEMM], 3),
                **{f"us {name}": round(us[name], 1) for name in variants},
            },
        )  # fmt: skip


class Scatter(Bench):
    suite, bare = "gemm_reduce_scatter", gemm_reduce_scatter.GPU_VARIANT
    op, kind = scatters, GemmReduceScatterCall

    def __init__(
        self, place: Place, hiddens: list[int], cuts: list[str], norm_cuts: list[str], most_tokens: int
    ) -> None:
        super().__init__(place, hiddens, cuts, most_tokens)
        self.normed = [f"norm {cut}" for cut in norm_cuts]

    def with_norm(self, variant: str, inputs: Inputs, residual: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """One kernel whose results are those of `add_norm` of this rank's rows. Its buffer is every variant's."""
        hidden = inputs.weight.shape[0]
        call = GemmReduceScatterNormCall(
            site=f"benchmark.{self.suite}.{hidden}.{variant}", group=self.place.group, fabric=Fabric.PEER,
            world=self.place.world, hidden=hidden, dtype="bfloat16", max_tokens=self.most_tokens, timeout_s=TIMEOUT_S,
            cut=str(TileConfig(*map(int, variant.removeprefix("norm ").split(":")))), eps=EPS, cast_before_weight=True,
        )  # fmt: skip
        op, text, b = torch.ops.weave.gemm_reduce_scatter_norm.default, call.encode(), inputs.weight.t()
        return lambda: op(inputs.a, b, residual, inputs.norm_weight, text)

    def exchange(self, hidden: int, ctas: int) -> ReductionCall:
        row = KernelRow(self.most_tokens, Algorithm.TWO_SHOT, Transfer.BULK, ctas)
        fused, world = calls.Fused(row, hidden, self.most_tokens), self.place.world
        assert calls.is_supported(fused, world, self.place.device), f"no kernel for rows of {hidden}"
        return calls.peer_call(f"benchmark.exchange.{hidden}.{ctas}", self.place.group, world, fused, True)

    def plans(self) -> Iterator[MemoryPlan]:
        yield from super().plans()
        exchanges = [self.exchange(hidden, ctas) for hidden in self.hiddens for ctas in EXCHANGE_CTAS]
        yield buffers.memory_plan(self.place.group, exchanges)

    def products(self, inputs: Inputs, room: Tensor) -> dict[str, Product]:
        """This rank's rows of the sum, before any addition; `room` is for a GEMM's results."""
        a, b, world = inputs.a, inputs.weight.t(), self.place.world
        k, hidden = b.shape
        why = _native.product_unsupported(_native.DType.bfloat16, hidden, k, world, self.place.device.index or 0)
        assert not why and len(room) <= _native.product_most_tokens(world), why or f"tiles of {len(room)} rows"
        rows = room.new_empty(len(room) // world, hidden)

        def ours(variant: str) -> Product:
            op, text = torch.ops.weave.gemm_reduce_scatter.default, self.call(hidden, variant).encode()
            return lambda: op([a], [b], [], 1, text)

        def sequence() -> Tensor:
            dist.reduce_scatter_tensor(rows, torch.mm(a, b, out=room))
            return rows

        def async_tp() -> Tensor:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, self.place.group)

        return {**{variant: ours(variant) for variant in self.variants}, SEQUENCE: sequence, ASYNC_TP: async_tp}

    def check(self, hidden: int, rows: int, k: int) -> None:
        inputs = Inputs.make(self.place, rows * self.place.world, hidden, k)
        wide = torch.mm(inputs.a.float(), inputs.weight.float().t())
        dist.all_reduce(wide)
        want = wide[self.place.rank * rows : (self.place.rank + 1) * rows]
        # Partial results are rounded before they are summed, and may cancel out.
        self.compare(self.products(inputs, torch.empty_like(inputs.residual)), want, 6e-2)

        residual = inputs.residual[self.place.rank * rows : (self.place.rank + 1) * rows].clone()
        want = want + residual.float()
        wide = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + EPS) * inputs.norm_weight.float()

        def both(step: Callable[[], tuple[Tensor, Tensor]]) -> Product:
            return lambda: torch.stack(step())

        steps = {variant: both(self.with_norm(variant, inputs, residual)) for variant in self.normed}
        self.compare(steps, torch.stack([wide, want]), 6e-2)

    def row(self, hidden: int, k: int, tokens: int) -> record.Row:
        inputs, rows = Inputs.make(self.place, tokens, hidden, k), tokens // self.place.world
        room, scale = torch.empty_like(inputs.residual), inputs.norm_weight
        residual = inputs.residual[self.place.rank * rows : (self.place.rank + 1) * rows].clone()
        # Before any exchange: a rank that compiles for longer would have the others wait inside a kernel.
        compiled_add_norm(torch.zeros_like(residual), residual, scale)

        def multiply() -> Tensor:
            return torch.mm(inputs.a, inputs.weight.t(), out=room)

        def followed(product: Product) -> Step:
            return lambda: compiled_add_norm(product(), residual, scale)

        def strong(ctas: int) -> Step:
            op, text = torch.ops.weave.all_reduce_norm.default, self.exchange(hidden, ctas).encode()
            return lambda: op(multiply(), None, None, inputs.residual, None, None, scale, None, text)

        steps: Steps = {
            GEMM: multiply,
            **{f"strong_{ctas}": strong(ctas) for ctas in EXCHANGE_CTAS},
            **{name: followed(product) for name, product in self.products(inputs, room).items()},
            **{variant: self.with_norm(variant, inputs, residual) for variant in self.normed},
        }
        us = self.times(steps, 2.0 * tokens * hidden * k)
        us["strong_sequence"] = min(us.pop(f"strong_{ctas}") for ctas in EXCHANGE_CTAS)
        return self.made({"tokens": tokens, "hidden": hidden, "k": k}, us)


class Gather(Bench):
    suite, bare = "all_gather_gemm", all_gather_gemm.GPU_VARIANT
    op, kind = gathers, AllGatherGemmCall

    def products(self, inputs: Inputs, whole: Tensor, room: Tensor) -> dict[str, Product]:
        """`whole` has the rows of all ranks, of which `inputs.a` are this one's; `room` is for a GEMM's results."""
        shard, b, group = inputs.a, inputs.weight.t(), self.place.group
        hidden, width = b.shape
        why = _native.gemm_unsupported(_native.DType.bfloat16, width, hidden, self.place.device.index or 0)
        assert not why, why

        def ours(variant: str) -> Product:
            op, text = torch.ops.weave.all_gather_gemm.default, self.call(hidden, variant).encode()
            return lambda: op(shard, [b], [None], 1, text)[1]

        def sequence() -> Tensor:
            dist.all_gather_into_tensor(whole, shard)
            return torch.mm(whole, b, out=room)

        def async_tp() -> Tensor:
            asks_rows = len(whole) <= MULTICAST_TOKENS
            _, found = torch.ops.symm_mem.fused_all_gather_matmul(shard, [b], 0, group, return_A=asks_rows)
            return found[0]

        return {**{variant: ours(variant) for variant in self.variants}, SEQUENCE: sequence, ASYNC_TP: async_tp}

    def inputs(self, rows: int, hidden: int, width: int) -> tuple[Inputs, Tensor, Tensor]:
        """`rows` of this rank, those of all ranks, and room for a GEMM's results."""
        inputs = Inputs.make(self.place, rows, width, hidden)
        whole = inputs.a.new_empty(rows * self.place.world, hidden)
        dist.all_gather_into_tensor(whole, inputs.a)
        return inputs, whole, whole.new_empty(len(whole), width)

    def check(self, hidden: int, rows: int, width: int) -> None:
        inputs, whole, room = self.inputs(rows, hidden, width)
        want = torch.mm(whole.float(), inputs.weight.float().t())
        self.compare(self.products(inputs, whole, room), want, 2e-2)

    def row(self, hidden: int, width: int, tokens: int) -> record.Row:
        inputs, whole, room = self.inputs(tokens // self.place.world, hidden, width)
        alone: Steps = {GEMM: lambda: torch.mm(whole, inputs.weight.t(), out=room)}
        us = self.times({**alone, **self.products(inputs, whole, room)}, 2.0 * tokens * hidden * width)
        return self.made({"tokens": tokens, "hidden": hidden, "n": width}, us)
