"""A decode step of a small Llama whose tensor-parallel ranks are on several emulated hosts: weave against Inductor.

    python -m benchmarks.llama_hosts [--hosts 2 4] [--gbit 10] [--delay-us 50] [--dtypes bfloat16 float32]

Layers, variants and how they take turns are those of benchmarks/llama_layers.py; Inductor's all-reduces are Gloo's. The
same step without any all-reduce bounds what can be gained, and is printed beside. Where torch has no kernel for GEMMs
of bf16 on the processor it multiplies row by row, and a step of many sequences is nearly all GEMMs; fp32 has one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from benchmarks import llama_layers, record

SUITE = "llama_hosts"
ROW = "ROW "


def rank_main(dtypes: list[str]) -> None:
    from examples import tiny_llama

    torch.set_num_threads(1)
    with tiny_llama.ranks() as here, torch.no_grad():
        cases = [case for case in llama_layers.CASES if case.phase == "decode"]
        for row in llama_layers.run(here, dtypes, cases, quick=True):
            here.say(ROW + json.dumps(asdict(row)))
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--gbit", type=float, default=10.0)
    parser.add_argument("--delay-us", type=float, default=50.0, help="one way")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"], choices=("bfloat16", "float32"))
    parser.add_argument("--machine", default="cpu")
    parser.add_argument("--no-write", action="store_true")
    asked = parser.parse_args()
    from tests import emulated_hosts

    link = emulated_hosts.Link(asked.delay_us, asked.gbit)
    why = emulated_hosts.missing(link)
    if why:
        raise SystemExit(f"no hosts can be emulated: {why}")
    rows = []
    for count in asked.hosts:
        with emulated_hosts.hosts(count, link) as made:
            processes = emulated_hosts.start(made, 1, "benchmarks.llama_hosts", "--rank", *asked.dtypes)
            found = emulated_hosts.finish(processes, 900.0)
        bad = [out for status, out in found if status]
        if bad:
            raise SystemExit(f"{count} hosts: failed\n{bad[0][-2000:]}")
        for line in found[0][1].splitlines():
            if line.startswith(ROW):
                row = record.Row(**json.loads(line.removeprefix(ROW)))
                row.case.update(hosts=count, gbit=asked.gbit, delay_us=asked.delay_us)
                rows.append(row)
                inductor, bound = row.baselines["inductor"], row.bound_us
                assert bound is not None, "the layers' benchmark times the step without all-reduces"
                print(f"{count} hosts, {row.case['dtype']}, {row.case['batch']} sequences: inductor {inductor:.0f}, "
                      f"weave {row.weave_us:.0f}, without all-reduces {bound:.0f} us; {inductor / row.weave_us:.2f}x, "
                      f"at most {inductor / bound:.2f}x", flush=True)  # fmt: skip
    if rows and not asked.no_write:
        print(record.write(SUITE, asked.machine, rows, beside=True))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2:])
    else:
        main()
