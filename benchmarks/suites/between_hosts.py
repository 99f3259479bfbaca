"""All-reduce + addition + RMSNorm among CPU ranks of emulated hosts: weave over TCP against Gloo on the same links.

Hosts are network namespaces of one machine (tests/emulation/emulated_hosts.py). Gloo's all-reduce is followed by
Inductor's addition and norm. Every exchange between hosts is timed; `weave` is the one that the price chooses: by the
links asked for and the rest of `profile`, or, in `between_hosts_calibrated`, by a profile that `weaveopt calibrate`
writes on the very hosts first. All are timed on `calibrate`'s clock for CPU ranks, pass by pass in turns: the fastest
pass's median, of the ranks the slowest. In the end the price is held against the clock, and how far calls of one pass
are apart.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, log2
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import CPU, Asked, Needs, Setting, Suite, product
from weaveopt import cost_model
from weaveopt.cost_model.machine import Machine

HIDDEN = 4096
HOSTS = Setting("hosts", (2, 3, 4, 6, 8), quick=(2,))
RANKS = Setting("ranks", (1, 2), "on each host", quick=(1,))
GBIT = Setting("gbit", (10.0, 25.0), quick=(10.0,))
DELAY = Setting("delay_us", 50.0, "one way")
KIB = Setting("kib", (16, 64, 128, 512, 2048), quick=(64,))
PROFILE = Setting("profile", "cpu", "a machine's name, or a file of `weaveopt calibrate` on the same links")
FOLDER = Setting("folder", "", "folder that keeps the profiles (default: none is kept)")


@dataclass(frozen=True)
class Case:
    gbit: float
    hosts: int
    ranks_per_host: int
    kib: int
    delay_us: float

    @property
    def tokens(self) -> int:
        return self.kib * 1024 // (2 * HIDDEN)


def cases(asked: Asked) -> list[Case]:
    axes = asked.of(GBIT), asked.of(HOSTS), asked.of(RANKS), asked.of(KIB), (asked.of(DELAY),)
    return product(Case, *axes)


@dataclass(frozen=True)
class Measured:
    """One size, by exchange and as `gloo`: microseconds, and the spread of calls over their median."""

    tokens: int
    us: dict[str, float]
    spread: dict[str, float]


def rank_main(sizes: list[int]) -> None:
    """One rank: prints a line of times a size, from rank 0."""
    import weaveopt.ops  # noqa: F401
    from weaveopt.fabrics import tcp, topology
    from weaveopt.measure.clock import CollectiveRendezvous, Launch
    from weaveopt.measure.host_clock import CpuClock
    from weaveopt.ops.reduction.buffers import memory_plan
    from weaveopt.ops.reduction.call import ReductionCall
    from weaveopt.ops.reduction.variant import ALGORITHMS, KernelRow, Transfer
    from weaveopt.records.candidate import Fabric
    from weaveopt.records.norm import NormKind, NormSpec

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, hosts = dist.get_world_size(), dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)

    def add_norm(total: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = total + residual
        wide = total.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * normalized.to(total.dtype), total

    compiled = torch.compile(add_norm, dynamic=True)
    calls = {
        algorithm.value: ReductionCall(
            site=algorithm.value, group="0", fabric=Fabric.TCP, world=world, hosts=hosts, hidden=HIDDEN,
            dtype="bfloat16", out_dtype="bfloat16", max_tokens=max(sizes), post=None,
            table=(KernelRow(max(sizes), algorithm, Transfer.MESSAGE),),
            norm=NormSpec(NormKind.RMS, 1e-5, cast_before_weight=True), timeout_s=60.0,
        )
        for algorithm in ALGORITHMS[Transfer.MESSAGE]
    }  # fmt: skip
    tcp.reserve(topology.discover("0", 60.0), memory_plan("0", list(calls.values())), 0, 60.0)
    with torch.no_grad():
        for tokens in sizes:
            partial = torch.randn(tokens, HIDDEN).bfloat16()
            residual = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)

            def gloo(_: int, partial: torch.Tensor = partial, residual: torch.Tensor = residual) -> None:
                copy = partial.clone()
                dist.all_reduce(copy)
                compiled(copy, residual)

            def ours(call: str, _: int, partial: torch.Tensor = partial, residual: torch.Tensor = residual) -> None:
                torch.ops.weave.all_reduce_norm(partial, None, None, residual, None, None, weight, None, call)

            ways: dict[str, Launch] = {"gloo": gloo}
            ways |= {name: functools.partial(ours, call.encode()) for name, call in calls.items()}
            samples = CpuClock().in_turns(list(ways.values()), [0.0] * len(ways), CollectiveRendezvous())
            if dist.get_rank() == 0:
                found = Measured(
                    tokens,
                    us={name: sample.us for name, sample in zip(ways, samples, strict=True)},
                    spread={name: sample.spread for name, sample in zip(ways, samples, strict=True)},
                )
                print("TIMES " + json.dumps(asdict(found)), flush=True)
    dist.barrier()
    os._exit(0)


def with_link(profile: str, gbit: float, delay_us: float) -> Machine:
    """The profile; a shipped one with the link that is asked for, where a file's was measured on it."""
    machine = cost_model.load(profile)
    if profile not in cost_model.names():
        return machine
    return replace(machine, inter_host=replace(machine.inter_host, bytes_per_s=gbit * 1e9 / 8, latency_us=delay_us))


def predictions(profile: str, tokens: int, hosts: int, ranks: int, gbit: float, delay_us: float) -> dict[str, float]:
    """Microseconds of every exchange, by its name, and of the library's as `gloo`."""
    from weaveopt.ops.reduction.prices.estimate import estimate_fused, estimate_unfused
    from weaveopt.ops.reduction.prices.workload import Workload
    from weaveopt.ops.reduction.variant import ALGORITHMS, Transfer
    from weaveopt.records.candidate import Fabric

    machine = with_link(profile, gbit, delay_us)
    workload = Workload(tokens, tokens, HIDDEN, "bfloat16", hosts * ranks, hosts)
    found = {
        algorithm.value: estimate_fused(machine, workload, Fabric.TCP, algorithm).us + cost_model.host_us(machine)
        for algorithm in ALGORITHMS[Transfer.MESSAGE]
    }
    return found | {"gloo": estimate_unfused(machine, workload).us}


def bound_us(kib: int, hosts: int, gbit: float, delay_us: float) -> float:
    moved_bytes = 2 * (hosts - 1) / hosts * kib * 1024
    return 2 * ceil(log2(hosts)) * delay_us + moved_bytes * 8 / (gbit * 1e9) * 1e6


def measured(
    hosts: int, ranks: int, gbit: float, delay_us: float, sizes: Sequence[int], profile: Path | None
) -> list[Measured]:
    """A record a size; before, `weaveopt calibrate` writes `profile` on the same hosts, where it is asked for."""
    from tests.emulation import emulated_hosts

    with emulated_hosts.hosts(hosts, emulated_hosts.Link(delay_us, gbit)) as made:
        if profile is not None:
            words = ("calibrate", "--device", "cpu", "--base", "cpu", "--output", str(profile))
            told = emulated_hosts.finish(emulated_hosts.start(made, ranks, "weaveopt.cli.main", *words), 600.0)
            if any(status for status, _ in told):
                raise RuntimeError(f"{hosts} hosts x {ranks}: calibrate failed\n{told[0][1][-1500:]}")
        processes = emulated_hosts.start(made, ranks, __name__, *map(str, sizes))
        found = emulated_hosts.finish(processes, 600.0)
    bad = [out for status, out in found if status]
    if bad:
        print(f"{hosts} hosts x {ranks}: failed\n{bad[0][-1500:]}", flush=True)
    lines = [line for line in found[0][1].splitlines() if line.startswith("TIMES ")]
    return [Measured(**json.loads(line.removeprefix("TIMES "))) for line in lines]


def judged(rows: Sequence[record.Row], spreads: Sequence[float]) -> str:
    """How far the price is from the clock, and what its choice costs, in one line each."""
    errors, libraries, regrets = [], [], []
    for row in rows:
        told = {name: float(value) for name, value in row.parameters.items() if name.endswith("_us")}
        exchanges = {name: us for name, us in told.items() if not name.endswith("_predicted_us")}
        errors += [told[name.replace("_us", "_predicted_us")] / us - 1 for name, us in exchanges.items()]
        libraries.append(told["gloo_predicted_us"] / row.baselines["gloo"] - 1)
        regrets.append(row.weave_us / min(exchanges.values()) - 1)
    sizes = [abs(each) for each in errors]
    good = sum(each <= 0.05 for each in regrets)
    return (
        f"price of exchanges: mean error {statistics.fmean(sizes):.1%}, worst {max(sizes):.1%}, "
        f"bias {statistics.fmean(errors):+.1%}; of the library {statistics.fmean(map(abs, libraries)):.1%}; "
        f"calls of a pass apart: {statistics.median(spreads):.1%}\n"
        f"choice: the best or within 5 % of it in {good} of {len(regrets)} cases, at worst {1 + max(regrets):.2f} times"
    )


def row_of(case: Case, found: Measured, profile: str) -> record.Row:
    us, tokens, link = dict(found.us), found.tokens, (case.gbit, case.delay_us)
    predicted = predictions(profile, tokens, case.hosts, case.ranks_per_host, *link)
    gloo = us.pop("gloo")
    chosen = min((name for name in predicted if name in us), key=predicted.__getitem__)
    each_us = {f"{name}_us": round(value, 1) for name, value in us.items()}
    each_predicted = {f"{name}_predicted_us": round(value, 1) for name, value in predicted.items()}
    return record.row(
        case={"hosts": case.hosts, "ranks_per_host": case.ranks_per_host, "kib": case.kib, "gbit": case.gbit,
              "delay_us": case.delay_us},
        weave_us=us[chosen], baselines={"gloo": gloo}, predicted_us=predicted[chosen],
        bound_us=bound_us(case.kib, case.hosts, *link),
        parameters={"algorithm": chosen, **each_us, **each_predicted},
    )  # fmt: skip


def rows_by(calibrated: bool, place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    rows: list[record.Row] = []
    spreads: list[float] = []
    networks = dict.fromkeys((case.gbit, case.delay_us, case.hosts, case.ranks_per_host) for case in cases)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(asked.of(FOLDER) if calibrated and asked.of(FOLDER) else temporary)
        for gbit, delay_us, hosts, ranks in networks:
            here = [case for case in cases if (case.gbit, case.hosts, case.ranks_per_host) == (gbit, hosts, ranks)]
            written = folder / f"{hosts}x{ranks}-{gbit:g}-{delay_us:g}.json" if calibrated else None
            every = measured(hosts, ranks, gbit, delay_us, [case.tokens for case in here], written)
            begin, first = len(rows), len(spreads)
            for case, found in zip(here, every, strict=False):  # fewer where hosts failed
                rows.append(row_of(case, found, str(written or asked.of(PROFILE))))
                spreads += found.spread.values()
                yield rows[-1]
            if begin < len(rows):
                place.say(judged(rows[begin:], spreads[first:]))
    if rows:
        place.say("all together:\n" + judged(rows, spreads))


def suite_of(name: str, about: str, calibrated: bool) -> Suite[Case]:
    return Suite(
        name, about, Needs(CPU, worlds=(0,), emulated_hosts=True), cases, functools.partial(rows_by, calibrated),
        ours=("every exchange between hosts",), baselines=("gloo",), predicted="the price of the chosen exchange",
        bound="twice log2 of the hosts times the delay, and the bytes that each host has to send by the link",
        settings=(GBIT, HOSTS, RANKS, KIB, DELAY, FOLDER if calibrated else PROFILE),
    )  # fmt: skip


SUITES = (
    suite_of("between_hosts", "every exchange between emulated hosts, against Gloo", False),
    suite_of("between_hosts_calibrated", "the same, priced by a profile of the very hosts", True),
)


if __name__ == "__main__":
    rank_main([int(word) for word in sys.argv[1:]])
