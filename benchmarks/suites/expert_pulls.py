"""Experts' weights from another GPU: pulls by copy engines, kernels that overlap with pulls, and kernels that read a
peer's memory; on every rank at a time, each from the next one.

Kinds of cases, and what a row compares:

- `pull`, `size` MiB: memcpy nodes of a CUDA graph out of the peer's symmetric memory, against copies on a stream.
  `sm_kernels` counts the kernels in a trace of the graph's replay: 0 if copy engines do all the work.
- `gemm`, `experts`, `attention`, `memory`: a kernel during pulls of all ranks, against `alone`. `pull_ratio` is the
  time of a pull during the kernel over that of one alone. `hot_*` are means of a second or more, with watts and clocks.
- `in_place`, `size` tokens: `weave::moe_experts.ranges` with half of the experts in the peer's memory, against `local`,
  all of them here, and `pulled_first`, which copies that half before. Experts are Qwen3-30B-A3B's: 16 tokens give each
  of them a row. `remote_gb_per_s` counts the remote experts that have rows, once.
- `launch`, `size` mappings of a peer's memory: the host's time for a kernel's launch, against `before` they were made.

A ratio below 1 is a slowdown. Nothing is predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from benchmarks import clocks, record
from benchmarks.ranks import Place, slowest
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite
from benchmarks.timing import Effort, Step, capture, chain, enqueued_us, graphs_us
from weaveopt.fabrics import symmetric
from weaveopt.measure.clock import barrier
from weaveopt.measure.concurrent_kernels import DTYPE, LargeGemm, alone_us, concurrent_us
from weaveopt.measure.ranks import Ranks, subgroup
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel

PULL, IN_PLACE, LAUNCH = "pull", "in_place", "launch"
OVERLAPPED = ("gemm", "experts", "attention", "memory")
PULLED_MIB = Setting("pulled_mib", (8, 64, 576), "of a pull; 576 MiB: what a rank of two lacks in Qwen3-30B-A3B")
TOKENS = Setting("tokens", (1, 8, 16, 128, 512, 2048, 4608), "of a rank")
MAPPINGS = Setting("mappings", (200,), "of a peer's memory")
HOT_S = Setting("hot_s", 1.2, "seconds of a kernel that repeats, alone and during pulls")

PULL_BYTES = 64 << 20
"""A pull of those that overlap with kernels: one memcpy node."""
NODES = 8
"""Memcpy nodes of a graph."""
EXPERTS, HIDDEN, INNER, CHOICES = 128, 2048, 768, 8
SPREAD = 61
"""Step between the experts of consecutive choices: coprime with their number, so that all have as many rows."""
FEW_TOKENS = 512
"""Tokens up to which Triton's kernels run, and beyond the native ones."""
LAUNCHES, REPLAYS = 200, 10
"""Fewer than a stream holds, so no launch waits for the device."""
AHEAD = 3
"""Graphs of pulls that are enqueued before the kernels that they overlap with."""
SETTLING = 0.3
"""Share of a repeated kernel's time, from its start on, that does not count: clocks follow the load."""


@dataclass(frozen=True)
class Case:
    kind: str
    size: int = 0


def cases(asked: Asked) -> list[Case]:
    return [
        *(Case(PULL, size) for size in asked.of(PULLED_MIB)),
        *(Case(kind) for kind in OVERLAPPED),
        *(Case(IN_PLACE, size) for size in asked.of(TOKENS)),
        *(Case(LAUNCH, size) for size in asked.of(MAPPINGS)),
    ]


class NextRankMemory:
    """Symmetric memory of this rank and of the next one."""

    def __init__(self, place: Place, shape: Sequence[int], dtype: torch.dtype) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        sizes = tuple(shape)
        strides = torch.empty(sizes, device="meta").stride()
        self.own: Tensor = _SymmetricMemory.empty_strided_p2p(sizes, strides, dtype, place.device)
        group = dist.distributed_c10d._get_default_group()
        self._handle = symmetric.rendezvous(self.own, group)
        self.peer = self._handle.get_buffer((place.rank + 1) % place.world, sizes, dtype)


class Pulls:
    """A graph of memcpy nodes from the next rank."""

    def __init__(self, place: Place, num_bytes: int, nodes: int = NODES) -> None:
        self.num_bytes, self.nodes = num_bytes, nodes
        self.memory = NextRankMemory(place, (num_bytes,), torch.uint8)
        self.memory.own.fill_(place.rank + 1)
        self.target = torch.zeros(num_bytes, device=place.device, dtype=torch.uint8)
        barrier()
        self.graph = capture(chain(self.pull, nodes), torch.cuda.graph_pool_handle())
        wanted = (place.rank + 1) % place.world + 1
        assert bool((self.target == wanted).all()), f"rank {place.rank} pulled other bytes than {wanted}"

    def pull(self) -> object:
        return self.target.copy_(self.memory.peer)


def names_on_device(step: Step) -> list[str]:
    """Names of the kernels and copies that a step runs."""
    barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    barrier()
    return [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]


def pull_row(place: Place, case: Case) -> record.Row:
    pulls = Pulls(place, case.size << 20)
    names = names_on_device(pulls.graph.replay)
    copies = [name for name in names if name.lower().startswith("memcpy")]
    effort = Effort(5, 3)
    one_by_one = alone_in_turn_us(place, pulls.graph.replay) / pulls.nodes
    stream = enqueued_us(place, {"stream": chain(pulls.pull, pulls.nodes)}, effort, calls=pulls.nodes)["stream"]
    ours = graphs_us(place, {"graph": pulls.graph}, effort, pulls.nodes)["graph"]
    return record.row(
        case=words(place, case), weave_us=ours, baselines={"stream": stream},
        parameters={
            "gb_per_s": gb_per_s(pulls.num_bytes, ours), "one_rank_gb_per_s": gb_per_s(pulls.num_bytes, one_by_one),
            "memcpys": len(copies), "sm_kernels": len(names) - len(copies), "seen": " | ".join(sorted(set(names))),
        },
    )  # fmt: skip


def alone_in_turn_us(place: Place, step: Step) -> float:
    """Microseconds of a step while the other ranks are idle; the slowest rank's."""
    found = 0.0
    for rank in range(place.world):
        barrier()
        if rank == place.rank:
            found = alone_us(step)
    barrier()
    return slowest([found])[0]


def experts_call(kernels: ExpertsKernel) -> str:
    return ExpertsCall("silu", gated=True, kernels=kernels.value).encode()


def even_routing(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Experts and weights of the tokens; from 16 tokens on, every expert has rows."""
    ids = (torch.arange(tokens * CHOICES, device=device) * SPREAD % EXPERTS).view(tokens, CHOICES)
    return ids, torch.full((tokens, CHOICES), 1 / CHOICES, device=device)


def random_weight(place: Place, rows: int, columns: int, experts: int = EXPERTS) -> Tensor:
    return torch.randn(experts, rows, columns, device=place.device, dtype=DTYPE) * columns**-0.5


def kernel_of(place: Place, kind: str) -> Step:
    """A kernel of about half a millisecond or more; `experts` are those of a layer, with 8192 tokens."""
    if kind == "gemm":
        return LargeGemm(place.device)
    if kind == "attention":
        q, k, v = (torch.randn(2, 32, 4096, 128, device=place.device, dtype=DTYPE) for _ in range(3))
        return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    if kind == "memory":
        a, b, out = (torch.zeros(128 << 20, device=place.device, dtype=DTYPE) for _ in range(3))
        return lambda: torch.add(a, b, out=out)
    assert kind == "experts", kind
    x = torch.randn(8192, HIDDEN, device=place.device, dtype=DTYPE)
    gate_up, down = random_weight(place, 2 * INNER, HIDDEN), random_weight(place, HIDDEN, INNER)
    ids, weights = even_routing(len(x), place.device)
    text = experts_call(ExpertsKernel.HOPPER)
    return lambda: torch.ops.weave.moe_experts(x, ids, weights, gate_up, None, down, None, text)


@dataclass(frozen=True)
class Hot:
    """A kernel that repeats for a second or more."""

    us: float
    clocks: clocks.Clocks | None

    def words(self, name: str) -> dict[str, record.Scalar]:
        found: dict[str, record.Scalar] = {f"hot_{name}_us": round(self.us, 2)}
        if self.clocks is not None:
            found[f"{name}_mhz"] = round(self.clocks.sm_mhz)
            found[f"{name}_watts"] = round(self.clocks.watts)
            found[f"{name}_limited"] = round(self.clocks.limited, 2)
        return found


def hot(place: Place, step: Step, us: float, seconds: float, pulls: Pulls | None, pulls_us: float) -> Hot:
    """`step`, which takes about `us`, back to back with itself; with `pulls` as many graphs of pulls on another stream
    as last as long."""
    count = max(int(seconds * 1e6 / us), 8)
    side, done, pulled_us = torch.cuda.Stream(), 0, 0.0
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first = int(count * SETTLING)

    def run() -> None:
        nonlocal done, pulled_us
        if pulls is not None and pulled_us <= done * us + AHEAD * pulls_us:
            with torch.cuda.stream(side):
                pulls.graph.replay()
            pulled_us += pulls_us
        if done == first:
            begin.record()
        step()
        done += 1
        if done == count:
            end.record()

    barrier()
    seen = clocks.observe(run, count, place.device)
    if done < count:  # nvidia-smi is missing
        for _ in range(count - done):
            run()
    torch.cuda.synchronize()
    return Hot(slowest([begin.elapsed_time(end) * 1e3 / (count - first)])[0], seen)


def overlapped_row(place: Place, case: Case, pulls: Pulls, ranks: Ranks, asked: Asked) -> record.Row:
    step, replay = kernel_of(place, case.kind), pulls.graph.replay
    alone, pull_alone = slowest([alone_us(step), 0.0])[0], concurrent_us(ranks, replay, 6, None, 0)
    count = max(int(10e3 / alone), 4)
    during = concurrent_us(ranks, step, count, replay, 1.6 * count * alone / pull_alone)
    pull_during = concurrent_us(ranks, replay, 6, step, 1.6 * 6 * pull_alone / alone)
    seconds = asked.of(HOT_S)
    by_itself = hot(place, step, alone, seconds, None, 0.0)
    with_pulls = hot(place, step, during, seconds, pulls, pull_during)
    return record.row(
        case=words(place, case), weave_us=during, baselines={"alone": alone},
        parameters={
            "pull_gb_per_s": gb_per_s(pulls.num_bytes * pulls.nodes, pull_alone),
            "pull_during_gb_per_s": gb_per_s(pulls.num_bytes * pulls.nodes, pull_during),
            "pull_ratio": round(pull_during / pull_alone, 3), "hot_ratio": round(by_itself.us / with_pulls.us, 3),
            **by_itself.words("alone"), **with_pulls.words("during"),
        },
    )  # fmt: skip


class SplitExperts:
    """Weights of a layer, half of them in symmetric memory, which the next rank reads."""

    def __init__(self, place: Place) -> None:
        half = EXPERTS // 2
        self.local = [random_weight(place, *size, half) for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
        self.memory = [NextRankMemory(place, each.shape, DTYPE) for each in self.local]
        for memory in self.memory:
            memory.own.normal_(std=0.02)
        self.copies = [torch.empty_like(each) for each in self.local]
        barrier()
        self.copy()

    def remote_bytes(self, tokens: int) -> int:
        """Bytes of the peer's experts that the tokens choose."""
        ids, _ = even_routing(tokens, self.copies[0].device)
        half = EXPERTS // 2
        return int((ids.unique() >= half).sum()) * sum(each.nbytes for each in self.copies) // half

    def copy(self) -> None:
        for target, memory in zip(self.copies, self.memory, strict=True):
            target.copy_(memory.peer)

    def call(self, x: Tensor, remote: Sequence[Tensor], kernels: ExpertsKernel) -> Callable[[], Tensor]:
        ids, weights = even_routing(len(x), x.device)
        (gate_up, down), (far_gate_up, far_down) = self.local, remote
        text = experts_call(kernels)

        def run() -> Tensor:
            result: Tensor = torch.ops.weave.moe_experts.ranges(
                x, ids, weights, [gate_up, far_gate_up], None, [down, far_down], None, text
            )
            return result

        return run


def in_place_row(place: Place, case: Case, split: SplitExperts) -> record.Row:
    x = torch.randn(case.size, HIDDEN, device=place.device, dtype=DTYPE)
    kernels = ExpertsKernel.TRITON if case.size <= FEW_TOKENS else ExpertsKernel.HOPPER
    num_bytes = split.remote_bytes(case.size)
    in_place = split.call(x, [memory.peer for memory in split.memory], kernels)
    local = split.call(x, split.copies, kernels)

    def pulled_first() -> object:
        split.copy()
        return local()

    assert torch.equal(in_place(), local()), f"{case}, rank {place.rank}: other bits than from this GPU's memory"
    pool = torch.cuda.graph_pool_handle()
    steps = {IN_PLACE: in_place, "local": local, "pulled_first": pulled_first}
    us = graphs_us(place, {name: capture(step, pool) for name, step in steps.items()}, Effort(6, 3))
    return record.row(
        case=words(place, case), weave_us=us[IN_PLACE],
        baselines={name: us[name] for name in ("local", "pulled_first")},
        parameters={"kernels": kernels.value, "remote_gb_per_s": gb_per_s(num_bytes, us[IN_PLACE])},
    )  # fmt: skip


def launch_us(place: Place) -> tuple[float, float]:
    """Host microseconds of a kernel's launch, and of the launch of a graph of 100."""
    x = torch.zeros(16, device=place.device)
    graph = capture(chain(lambda: x.add_(1), 100), torch.cuda.graph_pool_handle())
    return host_us_of(lambda: x.add_(1), LAUNCHES), host_us_of(graph.replay, REPLAYS)


def host_us_of(step: Step, count: int) -> float:
    """Host microseconds of a step that the device need not end: the median of several times `count` of them."""
    found = []
    for _ in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        found.append((time.perf_counter() - begin) * 1e6 / count)
    torch.cuda.synchronize()
    return median(found)


def launch_row(place: Place, case: Case, kept: list[NextRankMemory]) -> record.Row:
    before, graph_before = launch_us(place)
    barrier()
    begin = time.perf_counter()
    kept += [NextRankMemory(place, (2 << 20,), torch.uint8) for _ in range(case.size)]
    seconds = time.perf_counter() - begin
    after, graph_after = launch_us(place)
    before, after, graph_before, graph_after, seconds = slowest([before, after, graph_before, graph_after, seconds])
    return record.row(
        case=words(place, case), weave_us=after, baselines={"before": before},
        parameters={
            "graph_before_us": round(graph_before, 2), "graph_us": round(graph_after, 2),
            "rendezvous_ms": round(seconds * 1e3 / case.size, 2),
        },
    )  # fmt: skip


def words(place: Place, case: Case) -> dict[str, record.Scalar]:
    return {"ranks": place.world, "kind": case.kind, "size": case.size, "dtype": "bfloat16"}


def gb_per_s(num_bytes: float, us: float) -> float:
    return round(num_bytes / us / 1e3, 1)


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    ranks = subgroup(place.world, place.device)
    pulls: Pulls | None = None
    split: SplitExperts | None = None
    kept: list[NextRankMemory] = []
    for case in cases:
        if case.kind == PULL:
            yield pull_row(place, case)
        elif case.kind in OVERLAPPED:
            pulls = pulls or Pulls(place, PULL_BYTES)
            yield overlapped_row(place, case, pulls, ranks, asked)
        elif case.kind == IN_PLACE:
            split = split or SplitExperts(place)
            yield in_place_row(place, case, split)
        else:
            yield launch_row(place, case, kept)
        torch.cuda.empty_cache()


SUITES = (
    Suite(
        "expert_pulls", "experts' weights from a peer: pulls by copy engines, what they slow down, reads in place",
        Needs(GPU, 2), cases, rows, ours=("weave",),
        baselines=("stream", "alone", "local", "pulled_first", "before"),
        settings=(PULLED_MIB, TOKENS, MAPPINGS, HOT_S), by_name_only=True,
    ),
)  # fmt: skip
