"""Prefill of many lengths through one compiled model of symbolic sizes: is weave anywhere slower than Inductor?

    python -m benchmarks.attention_tokens_gpu --machine h200x4 [--ranks 2] [--model llama-70b] [--layers 2] [--count 40]

Token counts between 100 and 16000, evenly apart in the logarithm and odd wherever that is possible. Each backend
compiles the model with `dynamic=True`, weave for as many regimes of token counts as it takes; each count's forward is
captured in CUDA graphs, which take turns (benchmarks/llama_layers_gpu.py).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys

import torch
import torch.distributed as dist

import weaveopt
from benchmarks import gpu_ranks, record
from benchmarks.attention_layers_gpu import SHAPES, make
from benchmarks.gpu_ranks import Place
from benchmarks.llama_layers import Case
from benchmarks.llama_layers_gpu import INDUCTOR, WEAVE, Forward, Workload

SUITE = "attention_tokens"
LEAST, MOST = 100, 16000


def counts(number: int) -> list[int]:
    """`number` token counts from `LEAST` to `MOST`, each next to a power of one ratio."""
    ratio = (MOST / LEAST) ** (1 / max(number - 1, 1))
    found = [round(LEAST * ratio**index) for index in range(number)]
    return [min(max(each | 1, LEAST), MOST) for each in found]


def run(place: Place, asked: argparse.Namespace) -> None:
    dist.all_reduce(torch.zeros(1, device=place.device))
    shape = SHAPES[asked.model]
    rows: list[record.Row] = []
    torch._dynamo.config.recompile_limit = 64
    with torch.no_grad():
        model = make(place, shape, asked.layers)
        forwards = {
            INDUCTOR: torch.compile(model, dynamic=True, fullgraph=True),
            WEAVE: torch.compile(model, backend="weave", dynamic=True, fullgraph=True),
        }
        settle = torch.zeros(1, device=place.device)
        for tokens in counts(asked.count):
            workload = Workload(model, Case("prefill", 1, tokens), place.device, gives_positions=False)
            pool = torch.cuda.graph_pool_handle()
            graphs = {}
            for name, forward in forwards.items():

                def step(forward: Forward = forward, workload: Workload = workload) -> None:
                    workload(forward)

                step()
                graphs[name] = gpu_ranks.capture(step, pool)
            steps = {name: graph.replay for name, graph in graphs.items()}
            us = gpu_ranks.median_us(steps, workload.reset, 6, 6 if tokens < 4000 else 3, settle)
            gpu_ranks.barrier()
            for graph in graphs.values():
                graph.reset()
            ratio = us[INDUCTOR] / us[WEAVE]
            place.say(f"{tokens:6d} tokens: inductor {us[INDUCTOR]:.0f}, weave {us[WEAVE]:.0f} us, {ratio:.3f}")
            case: dict[str, record.Scalar] = {
                "model": asked.model, "seq": tokens, "dtype": "bfloat16", "ranks": place.world, "layers": asked.layers,
            }  # fmt: skip
            rows.append(record.row(case=case, weave_us=us[WEAVE], baselines={INDUCTOR: us[INDUCTOR]}))
            gc.collect()
            torch.cuda.empty_cache()
    if place.rank == 0:
        record.write(SUITE, asked.machine, rows)
    regimes = [str(graph.regime) for graph in weaveopt.report().graphs]
    worst = min(rows, key=lambda row: row.ratio)
    place.say(f"worst of {len(rows)}: {worst.ratio} at {worst.case['seq']} tokens; regimes {regimes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="gpu")
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    parser.add_argument("--model", choices=list(SHAPES), default="llama-70b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--count", type=int, default=40)
    asked = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        ranks = asked.ranks or torch.cuda.device_count()
        raise SystemExit(gpu_ranks.start(__spec__.name, ranks, sys.argv[1:]))
    gpu_ranks.run_and_exit(lambda place: run(place, asked))


if __name__ == "__main__":
    main()
