"""One rank of `test_op`: the fused op on GPUs against the reference. Started by torchrun; `--quick` runs a few cases.

Uninitialized memory is filled with NaN while kernels are compared with the reference, so that a row that was never
written shows; the other stages run back to back, without anything between that would hide a race.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from tests.gpu.op_cases import (
    BULK,
    CASES,
    DIRECT,
    DTYPES,
    HIDDENS,
    KERNELS,
    LAYER,
    LL_PACKET_ONE_SHOT,
    LL_PACKET_TWO_SHOT,
    Case,
    Inputs,
    Kernel,
    Results,
    check,
    checksum,
    make_call,
    make_inputs,
    plan_of,
    reference_of,
    run_op,
    unsupported,
)  # fmt: skip
from tests.gpu.op_stages import in_one_graph, join, keep, parser_of, run_and_exit
from tests.gpu.tag_ranks import WORLD_GROUP, one_token, reserve
from weaveopt.fabrics import peer
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.peer import PeerArena
from weaveopt.ops.reduction.buffers import MAILBOXES, OUTPUT
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, Lifetime, MemoryPlan
from weaveopt.records.norm import Quant
from weaveopt.solver.placement import PlacementRequest, place


def output_plan(num_bytes: int) -> MemoryPlan:
    """For an output buffer alone."""
    return MemoryPlan(
        "", Fabric.PEER, 0, place([PlacementRequest("", Buffer(OUTPUT, num_bytes, Lifetime.ARENA), 0, 0)])
    )


def fill_buffers(memory: PeerArena) -> None:
    """NaN in all that kernels write before they read it. Mailboxes are not touched: they hold what is to come."""
    torch.cuda.synchronize()
    dist.barrier()
    for buffer in memory.layout.buffers:
        if buffer.name != MAILBOXES:
            memory.tensor(buffer.offset, (buffer.num_bytes,), torch.uint8).fill_(0xFF)
    transient = memory.layout.num_bytes - memory.transient_begin
    if transient > 0:
        memory.tensor(memory.transient_begin, (transient,), torch.uint8).fill_(0xFF)
    torch.cuda.synchronize()
    dist.barrier()


class Alike:
    """Checksums of results, compared over the ranks in one go."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sums: list[torch.Tensor] = []

    def add(self, what: str, call: ReductionCall, results: Results) -> None:
        self.names.append(what)
        self.sums.append(checksum(call, results))

    def compare(self) -> None:
        """Raises `AssertionError` naming the first result that is not bitwise the same on all ranks."""
        if not self.sums:
            return
        own = torch.stack(self.sums)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        for rank, other in enumerate(everyone):
            differing = (other != everyone[0]).nonzero()
            assert not len(differing), f"rank {rank} differs from rank 0 bitwise: {self.names[int(differing[0])]}"
        self.names.clear()
        self.sums.clear()


def grid(quick: bool) -> str:
    """Every kernel, dtype, hidden size and token count, each with two cases in turn."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.use_deterministic_algorithms(True, warn_only=True)  # new tensors start as NaN
    alike, counts = Alike(), Counter[str]()
    hiddens = (8, 4096, 8192) if quick else HIDDENS
    for index, (kernel, dtype, hidden) in enumerate(itertools.product(KERNELS, DTYPES, hiddens)):
        memory = reserve(plan_of([make_call(Case(wide_out=True), hidden, dtype, world, (kernel.row(),))]))
        fill_buffers(memory)
        for step, tokens in enumerate(kernel.tokens[::3] if quick else kernel.tokens):
            for case in (CASES[(5 * index + step) % len(CASES)], CASES[(7 * index + 3 * step + 1) % len(CASES)]):
                counts[run_case(kernel, case, dtype, hidden, tokens, seed=index, alike=alike)] += 1
        alike.compare()
    # Every case with every kernel and dtype, at sizes with rows that no CTA count divides.
    for kernel, dtype, case in itertools.product(KERNELS, DTYPES, CASES[::4] if quick else CASES):
        counts[run_case(kernel, case, dtype, 1024, 37, seed=5, alike=alike)] += 1
    alike.compare()
    torch.use_deterministic_algorithms(False)
    return f"rank {rank}: {dict(sorted(counts.items()))}"


def run_case(kernel: Kernel, case: Case, dtype: str, hidden: int, tokens: int, seed: int, alike: Alike) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    if unsupported(kernel, case, hidden, dtype, world):
        return f"{kernel.name} unsupported"
    inputs = make_inputs(case, tokens, hidden, getattr(torch, dtype), world, seed)
    call = make_call(case, hidden, dtype, world, (kernel.row(),))
    what = f"{kernel.name}, {tokens} tokens of {hidden} {dtype}, {case}"
    got = run_op(inputs, rank, call)
    again = run_op(inputs, rank, call)
    alike.add(what, call, got)
    assert torch.equal(checksum(call, got), checksum(call, again)), f"two runs differ: {what}"
    check(got, reference_of(inputs, call), call, tokens, rank, what, quant_scale=inputs.operands.quant_scale)
    return kernel.name


def chain(quick: bool) -> str:
    """Kernels and sizes mixed back to back: mailboxes rotate and regions change their layout. Checked at the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = list(itertools.product((0, 1, 5, 64, 200), (1024, 4096)))
    calls = {
        (kernel, hidden): make_call(Case(), hidden, "bfloat16", world, (kernel.row(256),))
        for kernel in KERNELS
        for hidden in (1024, 4096)
        if not unsupported(kernel, Case(), hidden, "bfloat16", world)
    }
    reserve(plan_of(list(calls.values())))
    inputs = {shape: make_inputs(Case(), *shape, torch.bfloat16, world, seed=i) for i, shape in enumerate(shapes)}
    numbers = torch.Generator().manual_seed(3)
    steps = []
    for _ in range(60 if quick else 400):
        kernel = KERNELS[int(torch.randint(len(KERNELS), (), generator=numbers))]
        shape = shapes[int(torch.randint(len(shapes), (), generator=numbers))]
        if (kernel, shape[1]) in calls:
            steps.append((kernel, shape))
    alike = Alike()
    for _ in range(2):  # the first round binds, and so meets in the store
        results = [run_op(inputs[shape], rank, calls[kernel, shape[1]]) for kernel, shape in steps]
    for index, ((kernel, shape), got) in enumerate(zip(steps, results, strict=True)):
        call = calls[kernel, shape[1]]
        check(got, reference_of(inputs[shape], call), call, shape[0], rank, f"step {index}, {kernel.name}, {shape}")
        alike.add(f"step {index}", call, got)
    alike.compare()
    return f"{len(steps)} steps"


def sharded(quick: bool) -> str:
    """Three sites: the residual between them stays sharded; the last sum is whole, by a kernel or by the library."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.use_deterministic_algorithms(True, warn_only=True)
    count = 0
    for kernel, dtype, tokens, library in itertools.product(
        (LL_PACKET_TWO_SHOT, BULK, DIRECT), DTYPES, (1, 2, 65, 200), (False, True)
    ):
        if unsupported(kernel, Case(), 1024, dtype, world):
            continue
        first = make_call(Case(sum_out=SumOut.SHARDED), 1024, dtype, world, (kernel.row(256),))
        middle = replace(first, residual_sharded=True)
        last = replace(middle, sum_out=SumOut.WHOLE)
        reserve(plan_of([first]))
        steps = [make_inputs(Case(), tokens, 1024, getattr(torch, dtype), world, seed) for seed in (1, 2, 3)]
        residual = want_residual = None
        for call, inputs in zip((first, middle, last), steps, strict=True):
            at_end = library and call is last
            if at_end:
                call = replace(call, max_tokens=1, table=(kernel.row(1),), site="more tokens than planned")
            got = run_op(inputs, rank, call, residual)
            want = reference_of(inputs, call, want_residual)
            by_library = at_end and tokens > 1
            check(got, want, call, tokens, rank, f"{kernel.name}, {tokens} tokens, {call}", library=by_library)
            residual = got[1]
            # The chain goes on from the same rounding on both sides, all ranks' rows put together.
            begin, end = call.share(tokens, rank) if call.sum_out is SumOut.SHARDED else (0, tokens)
            whole = torch.zeros_like(residual)
            whole[begin:end] = residual[begin:end]
            if call.sum_out is SumOut.SHARDED:
                dist.all_reduce(whole)
            want_residual = whole
            count += 1
    torch.use_deterministic_algorithms(False)
    return f"{count} calls"


def table(quick: bool) -> str:
    """One call whose kernel goes by token count, the library above the last row."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = (LL_PACKET_ONE_SHOT.row(7), LL_PACKET_TWO_SHOT.row(64), BULK.row(200))
    call = make_call(Case(), 4096, "bfloat16", world, rows)
    reserve(plan_of([call]))
    for tokens in (0, 1, 7, 8, 64, 65, 200, 201, 500):
        inputs = make_inputs(Case(), tokens, 4096, torch.bfloat16, world, seed=tokens)
        got = run_op(inputs, rank, call)
        check(got, reference_of(inputs, call), call, tokens, rank, f"{tokens} tokens", library=tokens > 200)
    return "all rows"


def growing(quick: bool) -> str:
    """A larger need makes a new arena, with room to spare; differing needs are an error on all ranks."""
    from weaveopt.errors import ArenaError

    rank = dist.get_rank()
    before = reserve(output_plan(256))
    assert reserve(output_plan(0)) is before
    most = before.buffer(OUTPUT).num_bytes + 4096
    after = reserve(output_plan(most))
    assert after is not before and after.layout.holds(before.layout.union(Layout.of(output_plan(most))))
    assert before.closed and reserve(output_plan(256)) is after, "buffers never shrink"
    try:
        reserve(output_plan(4 * most + 256 * (1 + rank)))
    except ArenaError as error:
        assert "different buffers" in str(error)
    else:
        raise AssertionError("ranks that differ were not refused")
    torch.cuda.synchronize()
    dist.barrier()
    return f"{after.num_bytes} bytes"


def graphs(quick: bool) -> str:
    return in_one_graph(quick, KERNELS, make_call, reserve)


def aliasing(quick: bool) -> str:
    """Normalized rows that alias the arena have the bits of those that do not, and stay until slow readers are done."""
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = torch.Generator().manual_seed(11)
    wide = Case(wide_out=True, norm=LAYER, biases=True)
    cases = (Case(), Case(sum_out=SumOut.SHARDED), wide, Case(sum_out=SumOut.NONE), Case(quant=Quant.STATIC))
    rows = (LL_PACKET_TWO_SHOT.row(5), BULK.row(300))
    steps, kept = [], []
    for index, (hidden, case) in enumerate(itertools.product((1024, 8192), cases)):
        for tokens in (1, 6, 64, 201, 300, 301):  # by LL packets, in bulk, through the library
            call = make_call(case, hidden, "bfloat16", world, rows)
            steps.append((call, make_inputs(case, tokens, hidden, torch.bfloat16, world, seed=index * 1000 + tokens)))
    steps = [steps[index] for index in torch.randperm(len(steps), generator=numbers)]
    memory = reserve(plan_of([call for call, _ in steps]))
    region = memory.tensor(memory.buffer(OUTPUT).offset, (1,), torch.uint8).data_ptr()
    wanted = [checksum(call, run_op(inputs, rank, call)) for call, inputs in steps]

    def run(steps: list[tuple[ReductionCall, Inputs]]) -> list[torch.Tensor]:
        found = []
        for index, (call, inputs) in enumerate(steps):
            results = run_op(inputs, rank, replace(call, normalized_aliases_arena=True))
            in_bulk = 5 < inputs.partials[rank].shape[0] <= 300
            assert (results[0].data_ptr() == region) is in_bulk, "rows lie elsewhere"
            if index % world == rank:
                torch.cuda._sleep(100_000)  # peers are ahead, as far as they may be
            found.append(checksum(call, results))
        return found

    for _ in range(2 if quick else 20):
        assert torch.equal(torch.stack(run(steps)), torch.stack(wanted)), "rows that lie in the arena differ"
    torch.cuda.synchronize()
    dist.barrier()
    library = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).name()
    if library != "nccl":  # as where ranks share a GPU: what takes NCCL's place cannot be captured
        own = [index for index, (_, inputs) in enumerate(steps) if inputs.partials[rank].shape[0] <= 300]
        steps, wanted = [steps[index] for index in own], [wanted[index] for index in own]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        differing = (torch.stack(run(steps)) != torch.stack(wanted)).sum()
    for _ in range(20 if quick else 200):
        graph.replay()
        kept.append(differing.clone())
    assert int(torch.stack(kept).sum()) == 0, "a replay differs"
    keep(graph)
    return f"{len(steps)} calls, {len(kept)} replays"


def subgroups(quick: bool) -> str:
    """Rows and columns of a 2x2 mesh in turn, then three of the four ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != 4:
        return "needs 4 ranks"
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2, 2))
    groups = [mesh.get_group(0), mesh.get_group(1)]
    three = dist.new_group([0, 1, 2])
    if rank < 3:
        groups.append(three)
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        own = ranks.index(rank)
        for kernel, tokens in itertools.product(KERNELS, (1, 7, 64, 200)):
            if unsupported(kernel, Case(), 1024, "bfloat16", len(ranks)):
                continue
            name = group.group_name
            call = make_call(Case(), 1024, "bfloat16", len(ranks), (kernel.row(256),), name)
            reserve(plan_of([call]), name)
            inputs = make_inputs(Case(), tokens, 1024, torch.bfloat16, len(ranks), seed=ranks[0] * 10 + tokens)
            for _ in range(3):
                got = run_op(inputs, own, call)
            check(got, reference_of(inputs, call), call, tokens, own, f"{kernel.name} in group {ranks}")
    # Rank 3 has met others for symmetric memory less often than the rest: torch alone would wait without end.
    reserve(output_plan(peer.of(WORLD_GROUP).buffer(OUTPUT).num_bytes + 4096))
    return f"{len(groups)} groups, and all ranks again"


STAGES: dict[str, Callable[[bool], str]] = {
    "growing": growing, "grid": grid, "chain": chain, "sharded": sharded, "table": table, "graphs": graphs,
    "aliasing": aliasing, "one_token": one_token, "subgroups": subgroups,
}  # fmt: skip


def main() -> None:
    arguments = parser_of(STAGES).parse_args()
    join()
    world = dist.get_world_size()
    # Once, and for all of the grid: growing buffer by buffer would keep every smaller arena.
    if "grid" in arguments.only and not arguments.quick:
        widest = Case(wide_out=True)
        reserve(plan_of([make_call(widest, h, d, world, (k.row(),)) for k in KERNELS for h in HIDDENS for d in DTYPES]))
    run_and_exit(arguments.only, {name: partial(stage, arguments.quick) for name, stage in STAGES.items()})


if __name__ == "__main__":
    main()
