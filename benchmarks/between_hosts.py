"""All-reduce + addition + RMSNorm among CPU ranks of emulated hosts: weave over TCP against Gloo on the same links.

    python -m benchmarks.between_hosts [--hosts 2 4 8] [--ranks 1] [--gbit 10 25] [--delay-us 0] [--kib 16 64 512 2048]

Hosts are network namespaces of one machine (tests/emulated_hosts.py). Gloo's all-reduce is followed by Inductor's
addition and norm. Calls take turns; a time is the median, of the ranks the slowest.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks import record

SUITE = "between_hosts"
HIDDEN = 4096
ROUNDS = 15
CALLS = 4


def rank_main(sizes: list[int]) -> None:
    """One rank: prints a line of times a size, from rank 0."""
    import weaveopt.ops  # noqa: F401
    from weaveopt.fabrics import tcp, topology
    from weaveopt.records.candidate import Fabric
    from weaveopt.records.norm import NormKind, NormSpec
    from weaveopt.reductions.buffers import memory_plan
    from weaveopt.reductions.call import ReductionCall

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
        name: ReductionCall(
            site=name, group="0", fabric=Fabric.TCP, world=world, hosts=hosts, hidden=HIDDEN, dtype="bfloat16",
            out_dtype="bfloat16", max_tokens=max(sizes), one_shot_max_tokens=max(sizes) if name == "one_shot" else 0,
            post=None, norm=NormSpec(NormKind.RMS, 1e-5, cast_before_weight=True), timeout_s=60.0,
        )
        for name in ("one_shot", "two_shot")
    }  # fmt: skip
    tcp.reserve(topology.discover("0", 60.0), memory_plan("0", list(calls.values())), 0, 60.0)
    with torch.no_grad():
        for tokens in sizes:
            partial = torch.randn(tokens, HIDDEN).bfloat16()
            residual = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)

            def gloo(partial: torch.Tensor = partial, residual: torch.Tensor = residual) -> None:
                copy = partial.clone()
                dist.all_reduce(copy)
                compiled(copy, residual)

            def ours(call: ReductionCall, partial: torch.Tensor = partial, residual: torch.Tensor = residual) -> None:
                torch.ops.weave.all_reduce_norm(partial, None, None, residual, None, None, weight, None, call.encode())

            ways: dict[str, Callable[[], None]] = {"gloo": gloo}
            ways |= {name: functools.partial(ours, call) for name, call in calls.items()}
            times: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(ROUNDS + 2):
                for name, way in ways.items():
                    dist.barrier()
                    begin = time.perf_counter()
                    for _ in range(CALLS):
                        way()
                    if turn > 1:
                        times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
            us = torch.tensor([statistics.median(times[name]) for name in ways])
            dist.all_reduce(us, dist.ReduceOp.MAX)
            if dist.get_rank() == 0:
                found = dict(zip(ways, us.tolist(), strict=True))
                print("TIMES " + json.dumps({"tokens": tokens, **found}), flush=True)
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="*", type=int, default=[2, 3, 4, 6, 8])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2], help="on each host")
    parser.add_argument("--gbit", nargs="*", type=float, default=[10.0, 25.0])
    parser.add_argument("--delay-us", type=float, default=0.0, help="one way")
    parser.add_argument("--kib", nargs="*", type=int, default=[16, 64, 128, 512, 2048])
    parser.add_argument("--machine", default="cpu")
    parser.add_argument("--no-write", action="store_true")
    asked = parser.parse_args()
    from tests import emulated_hosts

    for gbit in asked.gbit:
        why = emulated_hosts.missing(emulated_hosts.Link(asked.delay_us, gbit))
        if why:
            raise SystemExit(f"no hosts can be emulated: {why}")
    sizes = [kib * 1024 // (2 * HIDDEN) for kib in asked.kib]
    rows = []
    for gbit in asked.gbit:
        for count in asked.hosts:
            for ranks in asked.ranks:
                link = emulated_hosts.Link(asked.delay_us, gbit)
                with emulated_hosts.hosts(count, link) as made:
                    words = ["--rank", *map(str, sizes)]
                    processes = emulated_hosts.start(made, ranks, "benchmarks.between_hosts", *words)
                    found = emulated_hosts.finish(processes, 300.0)
                bad = [out for status, out in found if status]
                if bad:
                    print(f"{count} hosts x {ranks}: failed\n{bad[0][-1500:]}", flush=True)
                for line in found[0][1].splitlines():
                    if line.startswith("TIMES "):
                        us = json.loads(line.removeprefix("TIMES "))
                        tokens = us.pop("tokens")
                        gloo = us.pop("gloo")
                        best = min(us, key=us.__getitem__)
                        kib = tokens * 2 * HIDDEN // 1024
                        others = ", ".join(f"{name} {value:.0f}" for name, value in us.items())
                        print(f"{gbit:g} Gbit/s, {count} hosts x {ranks}, {kib:5d} KiB: gloo {gloo:.0f}, {others} us; "
                              f"{gloo / us[best]:.2f}x", flush=True)  # fmt: skip
                        case = {
                            "hosts": count, "ranks_per_host": ranks, "kib": kib, "gbit": gbit,
                            "delay_us": asked.delay_us,
                        }  # fmt: skip
                        both = {f"{name}_us": round(value, 1) for name, value in us.items()}
                        parameters = {"algorithm": best, **both}
                        row = record.row(case=case, weave_us=us[best], baselines={"gloo": gloo}, parameters=parameters)
                        rows.append(row)
    if rows and not asked.no_write:
        print(record.write(SUITE, asked.machine, rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main([int(word) for word in sys.argv[2:]])
    else:
        main()
