"""A stage of `op_ranks`: calls between which ranks exchange so little data that only tags keep them in step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.gpu.op_cases import (
    LL_PACKET_TWO_SHOT,
    TIMEOUT_S,
    Case,
    check,
    make_call,
    make_inputs,
    own_rows,
    plan_of,
    reference_of,
    run_op,
)
from tests.gpu.op_stages import keep
from weaveopt.fabrics import peer, topology
from weaveopt.fabrics.peer import PeerArena
from weaveopt.ops.reduction.call import SumOut
from weaveopt.records.memory import MemoryPlan

WORLD_GROUP = "0"
HIDDEN = 4096


def reserve(plan: MemoryPlan, group: str = WORLD_GROUP) -> PeerArena:
    return peer.reserve(topology.discover(group, TIMEOUT_S), plan, 0, TIMEOUT_S)


def one_token(quick: bool) -> str:
    """One token, no norm, a sum that stays sharded: the token's owner gets data from all, the others none from anybody.

    A rank that put into a mailbox before its owner had emptied it would lose a packet: a wrong sum, or a wait that
    never ends.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    case = Case(sum_out=SumOut.SHARDED, norm=None)
    call = make_call(case, HIDDEN, "bfloat16", world, (LL_PACKET_TWO_SHOT.row(1),))
    reserve(plan_of([call]))
    steps = [make_inputs(case, 1, HIDDEN, torch.bfloat16, world, seed) for seed in range(64)]
    rows = own_rows(call, 1, rank)
    wanted = []
    for seed, inputs in enumerate(steps):
        got = run_op(inputs, rank, call)
        check(got, reference_of(inputs, call), call, 1, rank, f"call {seed} of one token")
        wanted.append(got[1].view(1, -1)[rows].clone())

    def run() -> torch.Tensor:
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for index, (inputs, expected) in enumerate(zip(steps, wanted, strict=True)):
            if index % 7 == rank:
                torch.cuda._sleep(30_000)  # peers are ahead, as far as they may be
            differing += (run_op(inputs, rank, call)[1].view(1, -1)[rows] != expected).sum()
        return differing

    assert int(run()) == 0, "a sum differs"
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        differing = run()
    kept = []
    for _ in range(20 if quick else 500):
        graph.replay()
        kept.append(differing.clone())
    assert int(torch.stack(kept).sum()) == 0, "a sum differs in a replay"
    keep(graph)
    return f"{len(steps)} calls, {len(kept)} replays"
