"""The kernel between GPUs of several hosts, on GPUs of one machine that take themselves for hosts (`WEAVE_HOST`).

Rows as packets, and as they are with flags, of 4096 to 16384 elements and 8 KiB to 2 MiB. Baselines are the one-host
kernels over NVLink on the same GPUs, one-shot and two-shot (128 KiB to 2 MiB is theirs), and NCCL's all-reduce alone,
without addition and norm. Over NVLink rows are stored where they go, so this is what the protocol takes and says
nothing of a network. Each is a chain of calls in a CUDA graph; a time is one call's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite
from benchmarks.timing import Effort, Step, replayed_us
from weaveopt import cost_model
from weaveopt.cost_model import Machine
from weaveopt.fabrics import nvshmem, peer, topology
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

HIDDENS = Setting("hiddens", (4096, 8192, 16384), quick=(4096,))
PROFILE = Setting("profile", "", "what calibrate measured on such ranks")
MOST_BYTES = 2 << 20
ELEMENT_BYTES = 2
"""Size of a bf16 element."""
CALLS = 20
TIMEOUT_S = 60.0
KERNELS = {
    "one_shot": KernelRow(0, Algorithm.ONE_SHOT, Transfer.LL_PACKET),
    "two_shot": KernelRow(0, Algorithm.TWO_SHOT, Transfer.LL_PACKET),
    "two_shot_bulk": KernelRow(0, Algorithm.TWO_SHOT, Transfer.BULK),
    "hosts_packets": KernelRow(0, Algorithm.DOUBLING, Transfer.PACKET),
    "hosts_flagged_rows": KernelRow(0, Algorithm.DOUBLING, Transfer.FLAGGED_ROW),
}
BETWEEN_HOSTS = ("hosts_packets", "hosts_flagged_rows")


@dataclass(frozen=True)
class Case:
    hidden: int
    tokens: int


def sizes(hidden: int) -> list[int]:
    """Tokens, up to 2 MiB."""
    most = MOST_BYTES // (hidden * ELEMENT_BYTES)
    return [1 << exponent for exponent in range(most.bit_length())]


def call_of(name: str, hidden: int, tokens: int, group: str, world: int) -> ReductionCall:
    between = name in BETWEEN_HOSTS
    return ReductionCall(
        site=f"benchmark.{name}.{hidden}.{tokens}", group=group, fabric=Fabric.NVSHMEM if between else Fabric.PEER,
        world=world, hosts=world if between else 1, hidden=hidden, dtype="bfloat16", out_dtype="bfloat16",
        max_tokens=tokens, table=(replace(KERNELS[name], max_tokens=tokens),), post=None,
        norm=NormSpec(NormKind.RMS, 1e-5), sum_out=SumOut.WHOLE, timeout_s=TIMEOUT_S,
    )  # fmt: skip


def chain(call: ReductionCall, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Step:
    text = call.encode()

    def step() -> None:
        total = residual
        for _ in range(CALLS):
            _, total = torch.ops.weave.all_reduce_norm(partial, None, None, total, None, None, weight, None, text)

    return step


def measure(place: Place, group: str, hidden: int, tokens: int) -> dict[str, float]:
    """Microseconds of a call, by kernel, and of NCCL's all-reduce."""
    rows = torch.randn(tokens, hidden, device=place.device, dtype=torch.bfloat16)
    residual, weight = torch.zeros_like(rows), torch.ones(hidden, device=place.device, dtype=torch.bfloat16)
    reduced = rows.clone()

    def nccl() -> None:
        for _ in range(CALLS):
            dist.all_reduce(reduced)

    steps: dict[str, Step] = {"nccl_all_reduce": nccl}
    for name in KERNELS:
        call = call_of(name, hidden, tokens, place.group if name in BETWEEN_HOSTS else group, place.world)
        steps[name] = chain(call, rows, residual, weight)
    return replayed_us(place, steps, Effort(7, 8), CALLS)


def predicted(profile: Machine, transfer: Transfer, hidden: int, tokens: int, world: int) -> float:
    workload = Workload(tokens, tokens, hidden, "bfloat16", world, world)
    return estimate_fused(profile, workload, Fabric.NVSHMEM, Algorithm.DOUBLING, transfer=transfer).us


def cases(asked: Asked) -> list[Case]:
    every = [Case(hidden, tokens) for hidden in asked.of(HIDDENS) for tokens in sizes(hidden)]
    return every[::4] if asked.quick else every


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    profile = cost_model.load(asked.of(PROFILE)) if asked.of(PROFILE) else None
    one_host = str(dist.new_group(list(range(place.world))).group_name)
    here = topology.discover(one_host, TIMEOUT_S)
    os.environ["WEAVE_HOST"] = f"host{place.rank}"
    apart = topology.discover(place.group, TIMEOUT_S)
    largest = [
        (name, hidden, sizes(hidden)[-1]) for name in KERNELS for hidden in dict.fromkeys(case.hidden for case in cases)
    ]
    within = [call_of(*each, one_host, place.world) for each in largest if each[0] not in BETWEEN_HOSTS]
    between = [call_of(*each, place.group, place.world) for each in largest if each[0] in BETWEEN_HOSTS]
    peer.reserve(here, memory_plan(one_host, within), 0, TIMEOUT_S)
    nvshmem.reserve(apart, memory_plan(place.group, between), 0, TIMEOUT_S)
    for hidden, tokens in ((case.hidden, case.tokens) for case in cases):
        found = measure(place, one_host, hidden, tokens)
        others = {name: us for name, us in found.items() if name not in BETWEEN_HOSTS}
        for name in BETWEEN_HOSTS:
            transfer = KERNELS[name].transfer
            case: dict[str, record.Scalar] = {
                "ranks": place.world, "hidden": hidden, "tokens": tokens,
                "kib": tokens * hidden * ELEMENT_BYTES // 1024, "transfer": transfer.value,
            }  # fmt: skip
            priced_us = None if profile is None else predicted(profile, transfer, hidden, tokens, place.world)
            yield record.row(case=case, weave_us=found[name], baselines=others, predicted_us=priced_us)


SUITES = (
    Suite(
        "hosts_gpu", "the kernel between hosts, on GPUs that take themselves for hosts", Needs(GPU, 2, worlds=(2,)),
        cases, rows, ours=BETWEEN_HOSTS,
        baselines=("nccl_all_reduce", *(name for name in KERNELS if name not in BETWEEN_HOSTS)),
        predicted="the price of `profile`", settings=(HIDDENS, PROFILE),
    ),
)  # fmt: skip
