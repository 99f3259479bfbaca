"""Kernels bound by memory: norms, point-wise kernels, and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.fx as fx
import torch.nn.functional as F

from weaveopt.cost_model.machine import MemoryCosts, RowCurve
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Clock, Launch, Sample, slowest
from weaveopt.measure.draft import Draft
from weaveopt.measure.fit import never_falling
from weaveopt.measure.session import CalibrationSession, Rows

Tensor = torch.Tensor
NORM_TOKENS = (1, 16, 64, 256, 512, 1024, 4096, 16384)
NORM_ROWS = (2048, 4096, 8192)
"""Elements of the rows that norms reduce."""
GATE_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
GATE_ROW = 7168
FEW_BYTES = 4 << 20
"""Bytes read and written of kernels that are measured in turns with another one."""
CPU_TOKENS = (1, 16, 256, 1024, 4096)
"""Each is compiled, which takes longer than measuring it. With 4 and 64 too, readings between differ by at most 3 %."""
CPU_ROW = 4096


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Residual add and RMSNorm, the kernel after the all-reduce in most models."""
    total = x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return total, (wide * scale).to(x.dtype) * weight


def gate(x: Tensor, y: Tensor) -> Tensor:
    """The point-wise kernel of a gated MLP."""
    return F.silu(x) * y


@dataclass(frozen=True)
class MemoryKernel:
    """One compiled kernel: its inputs of [tokens, hidden], and the passes over such memory that it makes."""

    function: Callable[..., object]
    inputs: int
    passes: int
    takes_weight: bool

    def num_bytes(self, tokens: int, hidden: int) -> int:
        return self.passes * tokens * hidden * torch.bfloat16.itemsize


NORM = MemoryKernel(add_norm, 2, 4, True)
GATE = MemoryKernel(gate, 2, 3, False)


Code = Callable[[list[Tensor]], object]
"""Generated code by its list of inputs, which it empties."""


def generated_code(function: Callable[..., object], inputs: Sequence[Tensor]) -> Code:
    """Inductor's code for static shapes, compiled, without Dynamo's guards. Inputs come in the order of their use."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    torch._dynamo.reset()
    codes: list[Code] = []

    def keep(*arguments: object, **more: object) -> object:
        codes.append(compile_fx_inner(*arguments, **more))  # type: ignore[arg-type]
        return codes[-1]

    def backend(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        return compile_fx(graph, examples, inner_compile=keep)  # type: ignore[arg-type,return-value]

    with torch._functorch.config.patch(enable_autograd_cache=False):  # it knows functions whole, not their code
        torch.compile(function, dynamic=False, backend=backend)(*inputs)
    if not codes:  # nothing is compiled under such a stance (`torch.compiler.set_stance`)
        return lambda given: function(*given)
    [code] = codes
    return code


def kernel_inputs(device: torch.device, kernel: MemoryKernel, tokens: int, hidden: int) -> list[Tensor]:
    inputs = [torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16) for _ in range(kernel.inputs)]
    if kernel.takes_weight:
        inputs.append(torch.randn(hidden, device=device, dtype=torch.bfloat16))
    return inputs


def compiled_call(device: torch.device, kernel: MemoryKernel, tokens: int, hidden: int) -> Launch:
    """Inductor's kernel for static shapes, compiled; on CPU ranks without guards, which are paid once a graph and take
    longer than a small kernel.
    """
    inputs = kernel_inputs(device, kernel, tokens, hidden)
    if device.type == "cpu":
        code = generated_code(kernel.function, inputs)
        return lambda index: code(list(inputs))
    torch._dynamo.reset()
    compiled = torch.compile(kernel.function, dynamic=False)
    compiled(*inputs)
    return lambda index: compiled(*inputs)


def fused_kernel(
    clock: Clock, device: torch.device, kernel: MemoryKernel, tokens: int, hidden: int, expected_us: float
) -> tuple[int, Sample]:
    """Inductor's kernel for static shapes, as (bytes read and written, time).

    Much of what a kernel of many rows reads was just written, and caches hold it; one of few rows waits for what the
    kernels before it displaced.
    """
    launch, num_bytes = compiled_call(device, kernel, tokens, hidden), kernel.num_bytes(tokens, hidden)
    measure = clock.among_others if num_bytes <= FEW_BYTES else clock.alone
    return num_bytes, measure(launch, expected_us)


def call_us(clock: Clock, device: torch.device, kernel: MemoryKernel) -> float:
    """Host time of the generated code around a kernel: a call with rows of 8 elements."""
    return clock.alone(compiled_call(device, kernel, 1, 8), 2.0).us


def copy(clock: Clock, device: torch.device, num_bytes: int, expected_us: float) -> Sample:
    """A copy of memory that no cache holds: `num_bytes` read and written in all."""
    source = torch.randn(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    return clock.alone(lambda index: target.copy_(source), expected_us)


@dataclass
class MemoryKernels(Family):
    """Inductor's kernels for static shapes, in bfloat16."""

    devices: ClassVar = frozenset({"cpu", "cuda"})
    norms: dict[int, Rows] = field(default_factory=dict)
    """(bytes read and written, time) by row length."""
    gates: Rows = field(default_factory=list)
    copied: tuple[int, Sample] | None = None
    """Bytes of one large copy, and its time."""

    def measure_alone(self, session: CalibrationSession) -> None:
        torch._inductor.config.compile_threads = 1  # a pool of compilers would be measured too
        torch._dynamo.config.recompile_limit = 1024
        rows: tuple[int, ...] = NORM_ROWS if session.is_gpu else (CPU_ROW,)
        tokens: tuple[int, ...] = NORM_TOKENS if session.is_gpu else CPU_TOKENS
        if session.quick:
            rows, tokens = rows[:1], tokens[::2]
        cases = [(NORM, row, count) for row in rows for count in tokens]
        if session.is_gpu:
            cases += [(GATE, GATE_ROW, count) for count in (GATE_TOKENS[::3] if session.quick else GATE_TOKENS)]
        if not session.is_gpu:
            self._compile_in_shares(session, cases)
        mine: list[tuple[int, Sample]] = []
        with session.as_many_as_cores() as active:
            for done, (kernel, row, count) in enumerate(cases):
                session.show_progress("kernels bound by memory", done, len(cases))
                if active:
                    num_bytes = kernel.num_bytes(count, row)
                    guess_us = 2.0 + num_bytes / (3e6 if session.is_gpu else 2e4)
                    mine.append(fused_kernel(session.clock, session.device, kernel, count, row, guess_us))
                else:
                    mine.append((kernel.num_bytes(count, row), Sample(0.0, 0.0)))
            large = 1 << (31 if session.is_gpu else 28)
            copied, apart_us = Sample(0.0, 0.0), 0.0
            if active:
                # Of CPU ranks, what generated code costs the host is a price of its own.
                apart_us = 0.0 if session.is_gpu else call_us(session.clock, session.device, NORM)
                copied = copy(session.clock, session.device, large, large / (3e6 if session.is_gpu else 1e4))
        own = [Sample(max(sample.us - apart_us, 0.3), sample.spread) for _, sample in mine]
        merged = slowest([*own, copied])
        for (kernel, row, _), (num_bytes, _), sample in zip(cases, mine, merged, strict=False):
            found = self.norms.setdefault(row, []) if kernel is NORM else self.gates
            found.append((num_bytes, sample))
        self.copied = (large, merged[-1])

    def _compile_in_shares(self, session: CalibrationSession, cases: Sequence[tuple[MemoryKernel, int, int]]) -> None:
        """Each rank compiles its share of the kernels, and finds those of the others in Inductor's cache."""
        with session.as_many_as_cores() as active:
            if active:
                for done, (kernel, row, count) in enumerate(cases[session.rank :: session.num_active]):
                    session.show_progress("compiling kernels", done, -(-len(cases) // session.num_active))
                    compiled_call(session.device, kernel, count, row)

    def write(self, draft: Draft) -> None:
        samples = [sample for rows in (*self.norms.values(), self.gates) for _, sample in rows]
        origin = draft.origin("memory", samples, "Inductor's kernels for static shapes, bfloat16")
        norms = tuple(
            RowCurve(row, never_falling([(size, sample.us) for size, sample in rows]))
            for row, rows in sorted(self.norms.items())
        )
        # Without a separately measured point-wise kernel, the norm's curve stands for all.
        points = never_falling([(size, sample.us) for size, sample in self.gates]) if self.gates else norms[0].points
        assert self.copied is not None, "write() before measure_alone()"
        copied_bytes, copied = self.copied
        bytes_per_s = round(copied_bytes / copied.us * 1e6, -6)
        draft.memory = MemoryCosts(origin, points[0].us, bytes_per_s, points, norms if self.gates else ())
