"""One rank of `test_expert_prefetch_gpu`: compiled mixtures of ranks that promise no common calls, against the whole
model, with and without CUDA graphs. Started by torchrun; needs transformers 5.23 or later.

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
from transformers import AutoModelForCausalLM

import weaveopt
from tests.gpu.own_batches_ranks import assert_same, exchanges, mixtral, save_weighty
from tests.gpu.profiles import with_curves, written_once
from tests.graphs.sharded_models import ids_of
from weaveopt import cost_model
from weaveopt.config import OptionValue
from weaveopt.cost_model.machine import CopyContention, Curve, Point
from weaveopt.cost_model.prefetch import IN_PLACE, READS
from weaveopt.fabrics import exported
from weaveopt.integrations.transformers.expert_exchange import LAYERS
from weaveopt.ops.experts.prefetch.call import PrefetchForm
from weaveopt.records.candidate import Fabric

RULE, AHEAD = "expert_prefetch", PrefetchForm.AHEAD.value
TOKENS = (40, 3, 90, 40, 700)
CALLS_MORE = 4
"""Calls that a rank makes more than the one before it."""
READ_BYTES_PER_US = 320e3
"""Rate of the made-up profile, by which the rule may be forced; the times are not this host's."""


def made_up_profile(form: str) -> str:
    """A profile by which the form is the only one that may be forced."""
    machine = cost_model.load("h100x2")
    if form == AHEAD:
        assert machine.contention is not None
        contention = replace(machine.contention, copies=CopyContention(1.05, 1.0))
        return written_once(replace(machine, name="with_pulls", contention=contention))
    points = tuple(Point(1 << power, 20.0 + (1 << power) / READ_BYTES_PER_US) for power in range(18, 31, 3))
    return written_once(with_curves(machine, "with_reads", [Curve(machine.origins[0][0], READS, IN_PLACE, 2, points)]))


def compare(folder: Path, device: str, cuda_graphs: bool, form: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    name = str(folder / mixtral().name)
    parallel = weaveopt.DataParallelExperts(world, independent=True)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, distributed_config=parallel).eval()
    every = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval().to(device)
    assert next(model.parameters()).device.type == device
    weaveopt.share_experts(model)
    options: dict[str, OptionValue] = {"force": [RULE], "strict": True, "timeout_s": 60.0}
    if device == "cuda":
        options.update(machine=made_up_profile(form), cuda_graphs=cuda_graphs)
    compiled = torch.compile(model, backend="weave", fullgraph=True, options=options)
    for at, tokens in enumerate(TOKENS[: len(TOKENS) if rank else 2]):
        # Thrice: a CUDA graph is recorded in the second call and replayed in the third.
        for turn in range(3 + CALLS_MORE * rank if cuda_graphs else 1 + rank):
            ids = ids_of(100 * at + 10 * turn + rank, tokens).to(device)
            got, want = compiled(ids, use_cache=False).logits, every(ids, use_cache=False).logits
            assert_same(got, want, f"call {at}.{turn} of {tokens} tokens, rank {rank}")
    decisions = exchanges(compiled)
    fabric = Fabric.PEER if device == "cuda" else Fabric.SHM
    chosen = {(each.chosen.choice, each.chosen.fabric, each.chosen.variant) for each in decisions}
    assert decisions and chosen == {(RULE, fabric, form)}, decisions
    if form == AHEAD:
        attached = [each for layer in layers_of(model) for each in layer.attached.values()]
        assert attached and all(attached), "experts were read in place"


def layers_of(model: torch.nn.Module) -> list[exported.SharedLayer]:
    modules = set(model.modules())
    layers = [each for each in LAYERS if each.experts in modules]
    return [exported.shared_layer(each.group, each.exported()[0])[0] for each in layers]


def main() -> None:
    form = sys.argv[1] if sys.argv[1:] else IN_PLACE
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
    with torch.no_grad():
        for cuda_graphs in (False, True) if device == "cuda" else (False,):
            torch._dynamo.reset()
            compare(folder, device, cuda_graphs, form)
            dist.barrier()  # peers may still read this rank's experts
    print(f"rank {dist.get_rank()}: independent ranks agree", flush=True)
    sys.stdout.flush()
    # NCCL's communicator cannot be destroyed while captured graphs hold it.
    os._exit(0)


if __name__ == "__main__":
    main()
