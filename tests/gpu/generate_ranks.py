"""One rank of `test_generate`: a tensor-parallel model's captured steps against transformers' loop. Run by torchrun."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist

import weaveopt
from tests.graphs.generating import assert_same, ours, ragged, theirs
from tests.graphs.models import FAMILIES, load, save

WORLD = 2


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    folders: list[str | None] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    folder = str(folders[0])
    llama = next(family for family in FAMILIES if family.name == "llama")
    if rank == 0:
        save(llama, folder)
    dist.barrier()
    model = load(llama, folder, WORLD)
    inputs = {name: each.cuda() for name, each in ragged().items()}
    wanted = theirs(model, inputs, max_new_tokens=24)
    for _ in range(2):
        assert_same(ours(model, inputs, "weave", max_new_tokens=24), wanted)

    # A stop that the host of each rank sees some steps late, at a time of its own.
    free = wanted.sequences[:, 20:].tolist()  # type: ignore[attr-defined]
    stop = {"eos_token_id": [max(row[:20], key=row.index) for row in free], "pad_token_id": 0, "max_new_tokens": 60}
    stopped = theirs(model, inputs, **stop)
    assert stopped.sequences.shape[1] < 80  # type: ignore[attr-defined]
    for _ in range(4):
        assert_same(ours(model, inputs, "weave", **stop), stopped)

    # Ranks that start from different random states still draw the same; a seed gives the same again.
    found = []
    for seed in (rank, 0, 5):
        torch.manual_seed(seed)
        sampled = ours(model, inputs, "weave", max_new_tokens=24, do_sample=True, top_k=50)
        found.append(sampled.sequences.cpu())  # type: ignore[attr-defined]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    everywhere: list[list[list[int]]] = [[] for _ in range(WORLD)]
    dist.all_gather_object(everywhere, found[0].tolist())
    assert everywhere[0] == everywhere[1]

    report = weaveopt.report(model).generation
    assert not report.left and all(step.captured for step in report.steps), report
    print(f"rank {rank}: tokens as on the other rank", flush=True)
    sys.stdout.flush()
    # NCCL's communicator cannot be destroyed while captured graphs hold it.
    os._exit(0)


if __name__ == "__main__":
    main()
