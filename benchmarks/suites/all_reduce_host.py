"""`weave::all_reduce_norm` between GPUs that share memory of their host, against NCCL without peer access.

Run with `NCCL_P2P_DISABLE=1` where the GPUs have peer access: then NCCL goes through memory of the host too, and the
host stands in for one without. Torch's symmetric memory needs peer access and is no baseline. `weave` is what the
profile's table picks; where the profile has no times of the fabric that is to leave the site alone. Every variant's
time is among the parameters.

`bound` is the link's share alone: each byte of a two-shot written to the host and read from it at the rate measured,
both ways at once. That rate is of the copy engines: stores of kernels can be a few percent faster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, product
from benchmarks.timing import Effort
from benchmarks.workloads.reduction import NCCL, Case, Variant, measure
from weaveopt import cost_model
from weaveopt.measure.cases.reduction.calls import TIMEOUT_S
from weaveopt.measure.cases.reduction.host import kernels_of
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.prices.table import lowerings
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import KernelRow
from weaveopt.records.candidate import Fabric

NAME = "all_reduce_host"
TOKENS = (1, 8, 64, 512, 4096)
HIDDENS = (8192,)
COPIED_BYTES, COPIES = 256 << 20, 4


def link_bytes_per_s(place: Place) -> float:
    """Rate of copies to and from locked memory of the host at once, one way, of the slowest rank; all copy together."""
    import torch
    import torch.distributed as dist

    gpu = torch.empty(2, COPIED_BYTES, dtype=torch.uint8, device=place.device)
    host = torch.empty(2, COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def copy() -> None:
        with torch.cuda.stream(up):
            host[0].copy_(gpu[0], non_blocking=True)
        with torch.cuda.stream(down):
            gpu[1].copy_(host[1], non_blocking=True)

    copy()
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for stream in (up, down):
        stream.wait_event(begin)
    for _ in range(COPIES):
        copy()
    for stream in (up, down):
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    slowest_s = torch.tensor(begin.elapsed_time(end) / 1e3, device=place.device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    return COPIES * COPIED_BYTES / float(slowest_s)


class Bench:
    """The suite on this rank."""

    def __init__(self, place: Place, profile: str) -> None:
        self.place, self.machine = place, cost_model.load(profile)

    def rows_of(self, cases: Sequence[Case]) -> Iterator[record.Row]:
        import torch._inductor.config as inductor_config

        import weaveopt.ops  # noqa: F401
        from weaveopt.fabrics import host, topology
        from weaveopt.ops.reduction.buffers import memory_plan

        inductor_config.compile_threads = 1  # one kernel at a time: no pool of processes to start
        rate = link_bytes_per_s(self.place)
        self.place.say(f"link: {rate / 1e9:.1f} GB/s each way at once, through memory of the host")
        jobs = [(case, self.variants(case)) for case in cases]
        calls = [variant.call(case, self.place) for case, variants in jobs for variant in variants]
        # All of it before the first capture: graphs hold the arena's addresses.
        plan = memory_plan(self.place.group, calls)
        host.reserve(topology.discover(self.place.group, TIMEOUT_S), plan, 0, TIMEOUT_S)
        for case, variants in jobs:
            us = measure(self.place, case, variants, None, Effort(4, 5))
            yield self.row(case, variants, us, rate)

    def variants(self, case: Case) -> list[Variant]:
        """Every kernel that may pay at the size, and the profile's choice."""
        found = [Variant(row, fabric=Fabric.HOST) for row in kernels_of(case.tokens, case.bytes)]
        found = [each for each in found if each.is_supported(case, self.place)]
        chosen = self.choice(case)
        return found if chosen is None or chosen in found else [*found, chosen]

    def choice(self, case: Case) -> Variant | None:
        """Variant that the profile's table picks for graphs of this one size; None: it leaves them alone."""
        rows = lowerings(
            self.machine, Fabric.HOST, case.hidden, "bfloat16", self.place.world, 1, case.tokens, case.tokens
        )
        row = next((row for row in rows if case.tokens <= row.max_tokens), None)
        if row is None:
            return None
        return Variant(KernelRow(case.tokens, row.algorithm, row.transfer, row.num_ctas), fabric=Fabric.HOST)

    def predicted_us(self, case: Case, variant: Variant) -> float:
        workload = Workload(case.tokens, case.tokens, case.hidden, "bfloat16", self.place.world)
        row = variant.row
        return estimate_fused(
            self.machine, workload, Fabric.HOST, row.algorithm, True, row.transfer, row.num_ctas
        ).us  # fmt: skip

    def row(self, case: Case, variants: Sequence[Variant], us: dict[str, float], rate: float) -> record.Row:
        world, chosen = self.place.world, self.choice(case)
        fastest = min(variants, key=lambda variant: us[variant.name])
        return record.row(
            case={"ranks": world, "hidden": case.hidden, "tokens": case.tokens, "dtype": "bfloat16"},
            weave_us=us[NCCL] if chosen is None else us[chosen.name],
            baselines={NCCL: us[NCCL]},
            predicted_us=None if chosen is None else self.predicted_us(case, chosen),
            bound_us=2 * (world - 1) / world * case.bytes / rate * 1e6,
            parameters={
                "runs": "leave" if chosen is None else chosen.name,
                "fastest": fastest.name,
                "fastest_over": round(us[NCCL] / us[fastest.name], 3),
                "link_gb_per_s": round(rate / 1e9, 1),
                "nccl_p2p_disable": os.environ.get("NCCL_P2P_DISABLE", ""),
                **{f"{variant.name}_us": round(us[variant.name], 3) for variant in variants},
            },
        )


SETTINGS = (
    Setting("tokens", TOKENS, quick=(1, 64)),
    Setting("hiddens", HIDDENS),
    Setting("profile", "", "machine profile that chooses and predicts (default: MACHINE if shipped, else h200x4)"),
)


def cases(asked: Asked) -> list[Case]:
    return list(product(lambda hidden, count: Case(count, hidden), asked.of(SETTINGS[1]), asked.of(SETTINGS[0])))


def rows(place: Place, found: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    profile = asked.of(SETTINGS[2]) or (asked.machine if asked.machine in cost_model.names() else "h200x4")
    return Bench(place, profile).rows_of(found)


SUITES = (
    Suite(
        NAME, "all-reduce + residual + RMSNorm through memory of the host, against NCCL", Needs(GPU, 2, worlds=(4, 2)),
        cases, rows, ours=("one_shot", "two_shot"), baselines=(NCCL,),
        predicted="the profile's price of the variant that it chooses",
        bound="the link's share alone, each way at the rate measured with both at once", settings=SETTINGS,
    ),
)  # fmt: skip
