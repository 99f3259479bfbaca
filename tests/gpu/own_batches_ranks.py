"""One rank of `test_own_batches_gpu`: a compiled mixture whose ranks hold batches of their own, against transformers'
all-to-all, with and without CUDA graphs. Started by torchrun; needs transformers 5.23 or later.

Without a GPU it runs over shared memory, which says whether the program is right.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

import weaveopt
from tests.graphs.models import Family, config_of
from tests.graphs.sharded_models import FAMILY_OF, ids_of, sharded
from weaveopt.config import OptionValue
from weaveopt.errors import WeaveError
from weaveopt.ops.experts.sharded import op
from weaveopt.ops.experts.sharded.op import traffic
from weaveopt.records.candidate import Fabric
from weaveopt.records.report import Decision

RULE, KIND = "moe_sharded", "expert_exchange"
MAX_TOKENS = 600
SIZES = ((40, 90), (50, 90), (60, 90), (50, 100), (700, 100), (50, 90), (90, 700), (3, 100))
"""Tokens of both ranks, call by call: ranks compile anew at other times, and one has more than were planned for."""
RELATIVE = 0.05
"""Bound of the error of a token's bf16 logits against the other implementation, as a share of their norm."""


def mixtral() -> Family:
    family = FAMILY_OF["mixtral"]
    sizes: dict[str, int | float | bool | None] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    # Each token goes to all experts: no rounding sends it to another one.
    sizes |= {"max_position_embeddings": 1024, "num_experts_per_tok": family.settings["num_local_experts"]}
    return replace(family, settings={**family.settings, **sizes})


def save_weighty(family: Family, folder: Path) -> None:
    """Random weights whose experts make half of what a layer adds."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(3.0 if "experts" in name else 1.0)
    model.save_pretrained(folder / family.name)


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    error, norm = (got.float() - want.float()).norm(dim=-1), want.float().norm(dim=-1)
    worst = float((error / norm).max())
    assert worst <= RELATIVE, f"{what}: a token's logits are off by {worst:.3f} of their norm"  # NaN is no less


def exchanges(model: object) -> list[Decision]:
    graphs = weaveopt.report(model).graphs
    return [each for graph in graphs for each in graph.decisions if each.site.kind == KIND]


def expect_refused_capture(compiled: torch.nn.Module, ids: Tensor) -> None:
    torch.cuda.synchronize()
    said = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            compiled(ids, use_cache=False)
    except WeaveError as error:
        said = str(error)
    assert "cannot hold the call: its ranks hold batches of their own" in said, said


def compare(folder: Path, device: str, cuda_graphs: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    theirs, ours = (sharded(folder, mixtral(), each, world, torch.bfloat16, device) for each in ("all_to_all", "weave"))
    fabric = Fabric.PEER if device == "cuda" else Fabric.SHM
    options: dict[str, OptionValue] = {"force": [RULE], "strict": True, "max_tokens": MAX_TOKENS, "timeout_s": 60.0}
    if device == "cuda":
        options.update(machine="h100x2", cuda_graphs=cuda_graphs)
    compiled = torch.compile(ours, backend="weave", fullgraph=True, options=options)
    for at, tokens in enumerate(SIZES):
        # Thrice: a CUDA graph is recorded in the second call and replayed in the third.
        for turn in range(3 if cuda_graphs else 1):
            ids = ids_of(100 * at + 10 * turn + rank, tokens[rank % 2]).to(device)
            want = theirs(ids, use_cache=False).logits
            got = compiled(ids, use_cache=False).logits
            assert_same(got, want, f"call {at} of {tokens}, rank {rank}")
    decisions = exchanges(compiled)
    chosen = {(each.chosen.choice, each.chosen.fabric) for each in decisions}
    assert len(decisions) >= 4 and chosen == {(RULE, fabric)}, decisions
    [text] = {text for text in CALLS if f'"fabric":"{fabric.value}"' in text}
    moved = traffic(text, device)
    assert moved is not None and min(moved) > 0, moved
    if device == "cuda" and not cuda_graphs:
        expect_refused_capture(compiled, ids)
        assert_same(compiled(ids, use_cache=False).logits, want, f"behind a capture, rank {rank}")


CALLS: set[str] = set()
"""Texts of the calls that ranks agreed on."""


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    folders: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0]))
    if dist.get_rank() == 0:
        save_weighty(mixtral(), folder)
    dist.barrier()
    reserve = op.reserve

    def watched(call: op.ExpertExchangeCall, text: str, buffers: tuple[op.Buffer, ...]) -> bool:
        CALLS.add(text)
        return reserve(call, text, buffers)

    op.reserve = watched  # type: ignore[assignment]
    with torch.no_grad():
        for cuda_graphs in (False, True) if device == "cuda" else (False,):
            torch._dynamo.reset()
            compare(folder, device, cuda_graphs)
    print(f"rank {dist.get_rank()}: own batches agree", flush=True)
    dist.barrier()
    sys.stdout.flush()
    # NCCL's communicator cannot be destroyed while captured graphs hold it.
    os._exit(0)


if __name__ == "__main__":
    main()
