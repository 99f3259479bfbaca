"""`weave::masked_attention` on one GPU: decode over what is filled of a cache, and prefill, beside torch's kernels.

    python -m benchmarks.attention_decode_gpu --machine h200 [--only decode|prefill] [--batches 1 8] [--filled 4096]
        [--key-heads 8] [--capacity 1.0] [--without flex] [--seconds 100] [--no-write] [--sweep [--output FILE]]

Each variant's calls run in one CUDA graph, over as many caches in turn as are needed to exceed the L2; a time is the
median of its replays, divided by its calls. bf16, head size 128; decode has 8 query heads for each key head, prefill 32
query and 4 key heads. Filled keys and values over time are compared with the rate of `gpu_limits`.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import attention_sweep, gpu_limits, record
from benchmarks.attention_cases import (
    DECODE_VARIANTS,
    HEAD_SIZE,
    PREFILL_VARIANTS,
    DecodeCase,
    DecodeData,
    PrefillData,
    time_graph,
)
from weaveopt.ops.masked_attention import gpu
from weaveopt.ops.masked_attention.plan import plan

BATCHES, FILLED, KEY_HEADS = (1, 8, 32, 128), (512, 4096, 32768), (1, 4, 8)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
MOST_BYTES = 60e9


class Budget:
    """Cases that would begin after its end are left out, and told."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def allows(self, case: object) -> bool:
        if time.monotonic() < self.end:
            return True
        self.left_out.append(str(case))
        return False


def decode_cases(arguments: argparse.Namespace) -> Iterator[DecodeCase]:
    for batch, filled, key_heads in itertools.product(arguments.batches, arguments.filled, arguments.key_heads):
        case = DecodeCase(batch, filled, key_heads, int(filled * arguments.capacity))
        if case.cache_bytes <= MOST_BYTES:
            yield case


def decode_row(case: DecodeCase, without: list[str]) -> record.Row:
    data = DecodeData(case)
    want = data.expected()
    times: dict[str, float] = {}
    for name, make in DECODE_VARIANTS.items():
        if name in without or not data.fits(name):
            continue
        try:
            call = make(data)
            error = (call(0).float() - want).abs().max().item()
            if not error < 2e-2:
                print(f"  {name}: off by {error}, left out", flush=True)
                continue
            times[name] = time_graph(call, data.num_copies)
        except RuntimeError as refused:
            print(f"  {name}: {str(refused).splitlines()[0][:140]}", flush=True)
    how = plan(data.shape, gpu.num_sms(data.device))
    ours = times.pop("weave")
    bound = case.filled_bytes / gpu_limits.limits(data.device).bytes_per_us
    others = " ".join(f"{name} {us:.1f}" for name, us in times.items())
    best = min(times.values(), default=float("nan"))
    print(
        f"{case.batch:4d} x {case.filled:6d} x {case.key_heads} heads: weave {ours:8.1f} us "
        f"{case.filled_bytes / ours / 1e3:6.0f} GB/s {bound / ours:4.0%} | {others} | {best / ours:.2f}x "
        f"| {how.num_splits} splits, block {how.block_m} x {how.block_n}",
        flush=True,
    )
    shape: dict[str, record.Scalar] = {
        "phase": "decode",
        "batch": case.batch,
        "filled": case.filled,
        "key_heads": case.key_heads,
    }
    return record.row(
        case={**shape, "capacity": case.capacity, "heads": data.shape.heads, "head_size": HEAD_SIZE},
        weave_us=ours, baselines=times, bound_us=bound,
        parameters={
            "splits": how.num_splits, "block_n": how.block_n, "num_warps": how.num_warps, "num_stages": how.num_stages,
            "gb_per_s": round(case.filled_bytes / ours / 1e3),
        },
    )  # fmt: skip


def prefill_row(tokens: int, without: list[str]) -> list[record.Row]:
    data = PrefillData(tokens)
    want: torch.Tensor | None = None
    times: dict[str, float] = {}
    for name, make in PREFILL_VARIANTS.items():
        if name in without:
            continue
        try:
            call = make(data)
            got = call(0).float()
            want = got if want is None else want
            error = (got - want).abs().max().item()
            if not error < 3e-2:
                print(f"  {name}: off by {error}, left out", flush=True)
                continue
            times[name] = time_graph(call, 1, least_calls=4)
        except RuntimeError as refused:
            print(f"  {name}: {str(refused).splitlines()[0][:140]}", flush=True)
    rates = " ".join(f"{name} {us:.1f} us ({data.flops / us / 1e6:.0f})" for name, us in times.items())
    print(f"prefill {tokens:6d}: {rates}  [TFLOP/s causal]", flush=True)
    theirs = {name: us for name, us in times.items() if not name.startswith("weave")}
    return [
        record.row(
            case={"phase": "prefill", "tokens": tokens, "mask": name != "weave_causal", "head_size": HEAD_SIZE},
            weave_us=us, baselines=theirs, parameters={"tflops": round(data.flops / us / 1e6)},
        )
        for name, us in times.items()
        if name.startswith("weave")
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="gpu")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--filled", nargs="*", type=int, default=FILLED)
    parser.add_argument("--key-heads", nargs="*", type=int, default=KEY_HEADS)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument(
        "--capacity", type=float, default=1.0, help="the cache's positions, as a multiple of the filled"
    )
    parser.add_argument("--without", nargs="*", default=[], help="baselines not to run")
    parser.add_argument("--seconds", type=float, default=100.0, help="no case begins after that")
    parser.add_argument("--sweep", action="store_true", help="try launches instead, over shapes of its own")
    parser.add_argument("--output", type=Path, help="of the sweep: all launches and their times")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.sweep:
        attention_sweep.sweep(arguments.output, arguments.seconds, arguments.only)
        return
    budget, rows = Budget(arguments.seconds), []
    for tokens in arguments.tokens if arguments.only != "decode" else ():
        if budget.allows(f"prefill {tokens}"):
            rows += prefill_row(tokens, arguments.without)
            torch.cuda.empty_cache()
    for case in decode_cases(arguments) if arguments.only != "prefill" else ():
        if budget.allows(case):
            rows.append(decode_row(case, arguments.without))
            torch.cuda.empty_cache()
    if budget.left_out:
        print(f"left out for want of time: {'; '.join(budget.left_out)}")
    if rows and not arguments.no_write:
        print(record.write("attention_decode", arguments.machine, rows, beside=True))


if __name__ == "__main__":
    main()
