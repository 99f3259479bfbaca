"""Llama layers under tensor parallelism: weave, Inductor, eager, and Inductor with its all-reduces removed.

    python -m benchmarks.llama_layers [--ranks 2] [--dtypes bfloat16 float32] [--quick]      CPU ranks
    python -m benchmarks.llama_layers --device cuda --machine h200x4 [--cases prefill:1024 decode:8] [--eager]
    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.llama_layers --device cuda ...    the same

On CPU ranks: times the decoder stack (embedding, layers, last norm; no output projection) for decode, one token a
sequence with a static cache, and prefill. All variants run in one process per rank and take turns, so that drift of
the machine meets all of them. A time is the median over iterations, and of the ranks the slowest.
`without_all_reduce` computes wrong values and bounds what any treatment of communication can reach.

On GPUs (all there are, or `--ranks`): benchmarks/llama_layers_gpu.py.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx
from transformers import LlamaConfig, PreTrainedModel, StaticCache

from benchmarks import record
from examples import tiny_llama
from weaveopt.integrations.cache_argument import with_cache
from weaveopt.wording import counted

CACHE_POSITIONS = 256
FILLED_POSITIONS = 128


@dataclass(frozen=True)
class Case:
    phase: str
    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


CASES = (Case("decode", 1, 1), Case("decode", 8, 1), Case("prefill", 1, 512), Case("prefill", 1, 2048))


def without_all_reduce(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    """Inductor on the graph with every all-reduce replaced by its input."""
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    @functools.wraps(compile_fx_inner)
    def inner(graph_module: fx.GraphModule, *args: object, **options: object) -> object:
        reduce, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default
        num_removed = 0
        for node in list(graph_module.graph.nodes):
            if node.op != "call_function" or node.target != wait:
                continue
            source = node.args[0]
            if source.op == "call_function" and source.target == reduce:
                node.replace_all_uses_with(source.args[0])
                graph_module.graph.erase_node(node)
                graph_module.graph.erase_node(source)
                num_removed += 1
        assert num_removed > 0, "no all-reduce found to remove"
        graph_module.recompile()
        return compile_fx_inner(graph_module, *args, **options)

    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(gm, inputs, inner_compile=inner)


def variants(model: PreTrainedModel) -> dict[str, Callable[..., object]]:
    compiled = functools.partial(torch.compile, model, dynamic=False, fullgraph=True)
    return {
        "eager": model,
        "inductor": compiled(backend="inductor"),
        "weave": compiled(backend="weave"),
        "without_all_reduce": compiled(backend=without_all_reduce),
    }


class Workload:
    """The call of one case, and the cache that it starts from each time."""

    def __init__(self, model: PreTrainedModel, case: Case, device: torch.device) -> None:
        torch.manual_seed(case.tokens)
        self.case, self.cache = case, None
        self.ids = torch.randint(1, model.config.vocab_size, (case.batch, case.seq)).to(device)
        self.positions = torch.arange(case.seq, device=device)[None].expand(case.batch, -1).contiguous()
        if case.phase == "decode":
            self.cache = StaticCache(model.config, max_cache_len=CACHE_POSITIONS)
            prompt = torch.randint(1, model.config.vocab_size, (case.batch, FILLED_POSITIONS)).to(device)
            model(input_ids=prompt, use_cache=True, **with_cache(self.cache))
            self.positions = self.positions + FILLED_POSITIONS

    def reset(self) -> None:
        if self.cache is not None:
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(FILLED_POSITIONS)

    def __call__(self, forward: Callable[..., object]) -> torch.Tensor:
        caching = self.cache is not None
        output = forward(input_ids=self.ids, position_ids=self.positions, use_cache=caching, **with_cache(self.cache))
        return output.last_hidden_state  # type: ignore[attr-defined]

    def time_us(self, forward: Callable[..., object], num_iterations: int) -> list[float]:
        times = []
        for _ in range(num_iterations):
            self.reset()
            dist.barrier()
            begin = time.perf_counter()
            self(forward)
            times.append((time.perf_counter() - begin) * 1e6)
        return times


def measure(workload: Workload, forwards: dict[str, Callable[..., object]], quick: bool) -> dict[str, float]:
    """Microseconds by variant: rounds in turns, median on each rank, and of the ranks the slowest."""
    num_rounds = 2 if quick else 8
    num_iterations = 20 if workload.case.phase == "decode" else 1
    times: dict[str, list[float]] = {name: [] for name in forwards}
    for turn in range(num_rounds + 1):
        # Every second round goes backwards, so that no variant always follows the same one.
        for name in list(forwards) if turn % 2 else reversed(forwards):
            found = workload.time_us(forwards[name], num_iterations)
            if turn > 0:
                times[name].extend(found)
    medians = torch.tensor([statistics.median(found) for found in times.values()], dtype=torch.float64)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def largest_error(found: torch.Tensor, eager: torch.Tensor) -> float:
    """Of all tokens, the largest `norm(found - eager) / norm(eager)`: one wrong row among thousands shows."""
    return float(((found - eager).norm(dim=-1) / eager.norm(dim=-1)).max())


def check(workload: Workload, forwards: dict[str, Callable[..., object]]) -> tuple[float, float]:
    """Errors of weave and of Inductor against eager; weave's may be rounding, of which Inductor's is the measure."""
    found = {}
    for name, forward in forwards.items():  # compiles
        workload.reset()
        found[name] = workload(forward).float().clone()
    weave, inductor = (largest_error(found[name], found["eager"]) for name in ("weave", "inductor"))
    assert weave <= 2 * inductor + 1e-5, f"{workload.case}: weave is {weave:.1e} from eager, Inductor {inductor:.1e}"
    return weave, inductor


def run(here: tiny_llama.Ranks, dtypes: list[str], cases: list[Case], quick: bool) -> tuple[record.Row, ...]:
    torch._dynamo.config.recompile_limit = 64  # one graph for each variant and case
    rows = []
    for dtype in dtypes:
        llama = LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
            num_key_value_heads=8, vocab_size=4096, max_position_embeddings=4096, tie_word_embeddings=False,
        )  # fmt: skip
        model = tiny_llama.make(llama, getattr(torch, dtype), here).model
        for case in cases:
            torch._dynamo.reset()
            forwards = variants(model)
            workload = Workload(model, case, here.device)
            weave_error, inductor_error = check(workload, forwards)
            us = measure(workload, forwards, quick)
            row = record.row(
                case={"phase": case.phase, "batch": case.batch, "seq": case.seq, "dtype": dtype, "ranks": here.world},
                weave_us=us["weave"],
                baselines={"inductor": us["inductor"], "eager": us["eager"]},
                bound_us=us["without_all_reduce"],
                parameters={"weave_error": weave_error, "inductor_error": inductor_error},
            )
            rows.append(row)
            here.say(
                f"{dtype:8} {case.phase:7} {case.tokens:5} tokens: eager {us['eager']:9.0f}  inductor "
                f"{us['inductor']:9.0f}  weave {us['weave']:9.0f}  without all-reduce {us['without_all_reduce']:9.0f}"
                f" us   weave {us['inductor'] / us['weave']:.2f}x inductor"
            )
    return tuple(rows)


def main_gpu(args: argparse.Namespace) -> int:
    from benchmarks import gpu_ranks

    if not dist.is_torchelastic_launched():
        num_ranks = args.ranks or torch.cuda.device_count()
        if num_ranks < 2:
            raise SystemExit(f"found {counted(num_ranks, 'CUDA device')}, the benchmark needs at least 2")
        return gpu_ranks.start("benchmarks.llama_layers", num_ranks, sys.argv[1:])
    from benchmarks import llama_layers_gpu as gpu

    cases = tuple(gpu.parse(word) for word in args.cases) or gpu.CASES
    cases = tuple(case for case in cases if args.phase in (None, case.phase))
    asked = gpu.Asked(cases, args.profile, args.eager, args.quick)

    def program(place: gpu_ranks.Place) -> None:
        def keep(rows: list[record.Row]) -> None:
            if place.rank == 0 and not args.quick:
                record.write("llama_layers", args.machine, rows, beside=True)

        rows, wrong = gpu.run(place, asked, keep)
        place.say(gpu.summary(rows))
        assert not wrong, "; ".join(wrong)

    gpu_ranks.run_and_exit(program)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="default: 2 on CPUs, as many as there are GPUs")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--machine", help="folder of benchmarks/results that the figures go to (default: the device)")
    parser.add_argument("--phase", choices=["decode", "prefill"], help="only these cases; CPUs: nothing is written")
    parser.add_argument("--quick", action="store_true", help="few rounds, and nothing is written")
    gpus = parser.add_argument_group("GPUs")
    gpus.add_argument(
        "--cases", nargs="+", default=[], help="prefill:TOKENS, decode:BATCH; other rows of the file stay"
    )
    gpus.add_argument("--profile", help="machine profile for weave (default: the one that fits the GPUs)")
    gpus.add_argument("--eager", action="store_true", help="time eager as well")
    args = parser.parse_args()
    args.machine = args.machine or args.device
    if args.device == "cuda":
        return main_gpu(args)
    if not dist.is_torchelastic_launched():
        launch = ["torch.distributed.run", "--nproc-per-node", str(args.ranks or 2), "-m", "benchmarks.llama_layers"]
        return subprocess.call([sys.executable, "-m", *launch, *sys.argv[1:]])
    with tiny_llama.ranks() as here:
        assert here.device.type == args.device, f"asked for {args.device}, found {here.device.type}"
        with torch.no_grad():
            cases = [case for case in CASES if args.phase in (None, case.phase)]
            rows = run(here, args.dtypes, cases, args.quick)
        if here.rank == 0 and not args.quick and args.phase is None:
            print(record.write("llama_layers", args.machine, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
