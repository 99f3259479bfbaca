"""A small random Llama under tensor parallelism, and the process group its ranks meet in: what the examples share.

Ranks are started by `accelerate launch` or `torchrun`; a plain `python` is a group of one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device

    def say(self, text: str = "") -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(text, flush=True)


@contextmanager
def ranks() -> Iterator[Ranks]:
    """This process's place among the ranks: NCCL where there are GPUs, else Gloo on CPU ranks."""
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ[name] = os.environ.get(name) or alone  # some launchers leave empty ones
    port = os.environ.get("MASTER_PORT") or ("0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    os.environ["MASTER_PORT"] = port
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def config(hidden: int, layers: int, world: int) -> LlamaConfig:
    """A Llama whose heads, intermediate size and vocabulary divide among `world` ranks.

    `hidden` is rounded down to a whole number of 16 elements a head.
    """
    kv_heads = world * max(1, 8 // world)
    head_dim = max(16, hidden // (2 * kv_heads) // 16 * 16)
    hidden = 2 * kv_heads * head_dim
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=16 * world * max(1, round(2.75 * hidden / (16 * world))),
        num_hidden_layers=layers,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=256 * world,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )


def save(directory: str, llama: LlamaConfig, dtype: torch.dtype) -> None:
    """Random weights, the same on every host; larger than trained ones, so that tokens differ by more than rounding."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.0 if "embed" in name else 2.0 * parameter.shape[1] ** -0.5)
    # The model's own `save_pretrained` writes on rank 0 alone, whose files other hosts do not have.
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    save_file(model.state_dict(), os.path.join(directory, "model.safetensors"), {"format": "pt"})


def load(directory: str, dtype: torch.dtype, world: int) -> PreTrainedModel:
    """`from_pretrained` with the model's own tensor-parallel plan over all ranks."""
    parallel = DistributedConfig(tp_size=world) if world > 1 else None
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, distributed_config=parallel).eval()


def make(llama: LlamaConfig, dtype: torch.dtype, here: Ranks) -> PreTrainedModel:
    """A random Llama, saved by the first rank of each host and loaded by all: what loading a real checkpoint does."""
    with tempfile.TemporaryDirectory() as own:
        host = os.environ.get("GROUP_RANK", "0")
        first = os.environ["LOCAL_RANK"] == "0"
        if first:
            save(own, llama, dtype)
        places: list[tuple[str, str, bool] | None] = [None] * here.world
        dist.all_gather_object(places, (host, own, first))
        directory = next(place[1] for place in places if place is not None and place[0] == host and place[2])
        model = load(directory, dtype, here.world)
        dist.barrier()
    return model.to(here.device) if here.world == 1 else model
