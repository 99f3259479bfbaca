"""Scores of a ragged data set on data-parallel ranks that share one mixture's experts: no dummy call, no padding.

    torchrun --nproc-per-node 2 examples/score.py

The documents do not divide among the ranks, and have different lengths. Each rank scores its own, one document a call,
and waits for nobody: a rank reads the experts that it lacks in the memory of the others. Exits with 1 if a score
differs from that of the whole model on one rank.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

import tiny_llama
import weaveopt

TOLERANCE = 1e-4


def config(hidden: int, layers: int, experts: int) -> MixtralConfig:
    return MixtralConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        vocab_size=1024,
        max_position_embeddings=4096,
    )


def documents(count: int, median: int) -> list[torch.Tensor]:
    """Random tokens; lengths are log-normal, the same on every rank."""
    random = torch.Generator().manual_seed(0)
    lengths = (median * torch.exp(0.6 * torch.randn(count, generator=random))).long().clamp(2, 4096)
    return [torch.randint(0, 1024, (1, int(length)), generator=random) for length in lengths]


def score(model: PreTrainedModel, document: torch.Tensor) -> float:
    """Mean negative log-likelihood of a document's tokens."""
    logits = model(document, use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, document[0, 1:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=401)
    parser.add_argument("--median", type=int, default=48, help="tokens of a document")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--checked", type=int, default=9, help="documents that rank 0 scores by the whole model too")
    parser.add_argument("--backend", default="weave", help="eager: not compiled")
    args = parser.parse_args()

    with tiny_llama.ranks() as here, tempfile.TemporaryDirectory() as own:
        places = [own] * here.world
        if here.rank == 0:
            torch.manual_seed(0)
            MixtralForCausalLM(config(args.hidden, args.layers, args.experts)).save_pretrained(own)
        dist.broadcast_object_list(places, src=0)
        folder = places[0]
        parallel = weaveopt.DataParallelExperts(here.world, independent=True) if here.world > 1 else None
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=parallel).eval()
        every = documents(args.documents, args.median)
        mine = every[here.rank :: here.world]
        scores: dict[int, float] = {}
        run = model if args.backend == "eager" else torch.compile(model, backend=args.backend, dynamic=True)
        with torch.no_grad():
            if parallel is not None:
                weaveopt.share_experts(model)
            if mine:
                score(run, mine[0])  # compiles
            begin = time.perf_counter()
            for number, document in enumerate(mine):
                scores[here.rank + number * here.world] = score(run, document)
            own_s = time.perf_counter() - begin
            gathered: list[tuple[dict[int, float], float]] = [({}, 0.0)] * here.world
            dist.all_gather_object(gathered, (scores, own_s))
            found = {number: each for some, _ in gathered for number, each in some.items()}
            worst = 0.0
            if here.rank == 0:
                whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
                step = max(1, len(every) // max(args.checked, 1))
                worst = max(abs(found[at] - score(whole, every[at])) for at in range(0, len(every), step))
        calls = ", ".join(f"rank {rank}: {len(some)} in {s:.1f} s" for rank, (some, s) in enumerate(gathered))
        here.say(f"{len(found)} of {args.documents} documents scored ({calls})")
        here.say(f"mean score {sum(found.values()) / len(found):.4f}, largest difference from one rank {worst:.1e}")
        here.say(str(weaveopt.report(run)))
        return 0 if worst <= TOLERANCE and len(found) == args.documents else 1


if __name__ == "__main__":
    sys.exit(main())
