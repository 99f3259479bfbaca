"""Weights loaded into L2 beside an exchange: ranks of one process on one GPU, as in `one_process`.

`python -m tests.gpu.one_process_prefetch`: with any ranges, results have the bits that they have without; what the
kernel loads lies at the end of an allocation, begins at odd addresses and has odd sizes. Also for compute-sanitizer.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
from dataclasses import replace

import torch

from tests.gpu.one_process import Gpu, Ranks, bits, check_all
from tests.gpu.op_cases import (
    BULK,
    CASES,
    DTYPES,
    LL_PACKET_ONE_SHOT,
    LL_PACKET_TWO_SHOT,
    Kernel,
    make_call,
    make_inputs,
    reference_of,
)
from weaveopt import _native
from weaveopt.records.norm import Quant
from weaveopt.reductions.call import SumOut
from weaveopt.reductions.operands import Operands
from weaveopt.reductions.peer import native_kernel, native_site
from weaveopt.reductions.prefetch_ranges import PrefetchRange

SHAPES = ((1024, 37), (4096, 1), (8192, 5), (16384, 23), (8, 3), (5120, 64))
"""Elements of a row, tokens."""
END_BYTES = 6 << 20
"""Of an allocation of its own, a multiple of what the driver maps at once: behind it there may be nothing."""
REPLAYS = 300
FORMS = [case for case in CASES if not case.product and case.sum_out is SumOut.WHOLE and case.quant is Quant.NONE]


def kinds_of_ranges(begin: int, num_bytes: int) -> list[list[PrefetchRange]]:
    """Lists of ranges in the allocation [begin, begin + num_bytes); most end with it."""
    end, odd = begin + num_bytes, 1001
    rows = (num_bytes - 14) // 4098
    return [
        [(begin, num_bytes, 1, num_bytes)],
        [(end - 4099, 0, 1, 4099)],
        [(end - 15, 0, 1, 15), (end - 1, 0, 1, 1), (begin + 1, 0, 1, 30), (begin + 2, 0, 1, 4097)],
        [(begin + 14, 4098, rows, odd), (end - odd, 0, 1, odd)],  # rows that begin at multiples of 2 alone
        [(begin, 16384, num_bytes // 16384, 2048)],
        [(begin, 16384, num_bytes // 16384, 16384)],
        [(begin, 128, 0, 128), (begin, 0, 1, 0), (end, 0, 1, 0)],
        [(begin + part * num_bytes // 4, 0, 1, num_bytes // 4) for part in range(4)],
    ]


def run_case(gpu: Gpu, kernel: Kernel, index: int, world: int, hidden: int, tokens: int, begin: int) -> int:
    """A call without ranges, and one with each kind of them. How many were made."""
    case, dtype = FORMS[index % len(FORMS)], DTYPES[index % len(DTYPES)]
    if _native.unsupported(native_kernel(kernel.row()), getattr(_native.DType, dtype), hidden, 2, False, 0):
        return 0
    # Buffers of two ranks have room for those of one.
    call = make_call(case, hidden, dtype, max(world, 2), (kernel.row(tokens),))
    inputs = make_inputs(case, tokens, hidden, getattr(torch, dtype), world, seed=tokens, device="cpu")
    want = reference_of(inputs, call)
    owned = gpu.num_owned
    ranks = Ranks(gpu, world, [call])
    what = f"{kernel.name}, {world} ranks, {tokens} tokens of {hidden} {dtype}, {case}"
    first = None
    kinds = [[], *kinds_of_ranges(begin, END_BYTES)]
    for ranges in kinds:
        launched = ranks.launch(0, kernel, call, inputs, tokens, want, ranges)
        gpu.replay(launched.graphs, launched.streams)
        got = ranks.results(launched)
        check_all(got, want, call, inputs, tokens, f"{what}, ranges {ranges}")
        first = first or got
        for results, expected in zip(got, first, strict=True):
            same = [torch.equal(bits(a), bits(b)) for a, b in zip(results, expected, strict=True)]
            assert all(same), f"other bits with {ranges}: {what}"
    gpu.free(owned)
    return len(kinds)


def run_replays(gpu: Gpu, kernel: Kernel, world: int, begin: int) -> int:
    """One graph again and again, calls with ranges and without in turns: the bits of the first time."""
    hidden, tokens, dtype = 8192, 8, "bfloat16"
    call = make_call(CASES[0], hidden, dtype, max(world, 2), (kernel.row(tokens),))
    inputs = make_inputs(CASES[0], tokens, hidden, torch.bfloat16, world, seed=3, device="cpu")
    want = reference_of(inputs, call)
    owned = gpu.num_owned
    ranks = Ranks(gpu, world, [call])
    kinds = kinds_of_ranges(begin, END_BYTES)
    made = [ranks.launch(0, kernel, call, inputs, tokens, want, ranges) for ranges in (kinds[0], [], kinds[4])]
    found = []
    for rounds in (1, REPLAYS):
        for _ in range(rounds):
            for rank, stream in enumerate(ranks.streams[0]):
                for launched in made:
                    gpu.call("cudaGraphLaunch", launched.graphs[rank], ctypes.c_void_p(stream))
        gpu.finish()
        found.append([results for launched in made for results in ranks.results(launched)])
    check_all(found[0][:world], want, call, inputs, tokens, f"replays of {kernel.name}, {world} ranks")
    for results, expected in zip(found[1], [*found[0][:world]] * len(made), strict=True):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results, expected, strict=True)), "a replay differs"
    for launched in made:
        for graph in launched.graphs:
            gpu.call("cudaGraphExecDestroy", graph)
    gpu.free(owned)
    return len(made) * (REPLAYS + 1)


def run_refusals(gpu: Gpu, begin: int) -> None:
    """Calls that load what no kernel does, and calls of no tokens."""
    call = make_call(CASES[0], 1024, "bfloat16", 2, (BULK.row(64), LL_PACKET_ONE_SHOT.row(65)))
    call = replace(call, max_tokens=65)
    inputs = make_inputs(CASES[0], 64, 1024, torch.bfloat16, 1, seed=1, device="cpu")
    owned = gpu.num_owned
    ranks = Ranks(gpu, 1, [call])
    site = _native.GpuAllReduceNorm(ranks.groups[0], native_site(call, tag=7, layout=ranks.layouts[0]))
    operands: Operands = inputs.operands
    x, weight = gpu.copy(inputs.partials[0]), gpu.copy(operands.weight)

    def code(tokens: int, kernel: Kernel, ranges: list[PrefetchRange]) -> int:
        native = int(native_kernel(kernel.row()))
        return site.run_prefetching(
            tokens, native, 4, ranks.streams[0][0], x, 0, 0, 0, 0, 0, weight, 0, 0, 0, 0, x, x, 0, ranges, 0
        )

    one: list[PrefetchRange] = [(begin, 0, 1, 4096)]
    assert code(64, BULK, one) != 0, "bulk copies load nothing"
    assert code(0, LL_PACKET_ONE_SHOT, one) == 0
    for wrong in (one * (_native.MAX_PREFETCH_RANGES + 1), [(begin, 16, 2, 32)], [(begin, 0, -1, 32)]):
        try:
            code(64, LL_PACKET_ONE_SHOT, wrong)
        except ValueError:
            continue
        raise AssertionError(f"took {wrong}")
    gpu.finish()
    gpu.free(owned)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", nargs="*", type=int, default=[1, 2, 4])
    arguments = parser.parse_args()
    gpu, count = Gpu(), 0
    begin = gpu.poisoned(END_BYTES)
    run_refusals(gpu, begin)
    kernels = (LL_PACKET_ONE_SHOT, LL_PACKET_TWO_SHOT)
    cases = itertools.product(arguments.worlds, kernels, SHAPES)
    for index, (world, kernel, (hidden, tokens)) in enumerate(cases):
        count += run_case(gpu, kernel, index, world, hidden, tokens, begin)
    for world, kernel in itertools.product(arguments.worlds, kernels):
        count += run_replays(gpu, kernel, world, begin)
    print(f"{count} calls give the bits that they give without a prefetch, and agree with the reference")


if __name__ == "__main__":
    main()
