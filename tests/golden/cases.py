"""Golden cases of `weaveopt explain`: one command line each, which is also the case's name in the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.graphs.models import FAMILIES, config_of

AS_GENERATE = "as generate: "
"""Begins a case whose prefill computes the logits of the last position alone; the others compute those of all."""
FAMILY = "family:"
"""Begins the model word of a tiny random model of `tests.graphs.models`; the rest is the family's id."""
LLAMA = "llama-3.3-70b"
DENSE = ("gemma-3-27b", "llama-3.1-405b", LLAMA, "qwen2.5-72b")
MIXTURES = ("deepseek-v3", "mixtral-8x22b", "qwen3-235b-a22b")
EXPERTS_ONLY = "gpt-oss-120b"
"""transformers has no tensor-parallel plan for it."""
ON_CPU = ("llama", "gemma2", "cohere", "mixtral", "deepseek_v3", "gpt_oss-ep")
"""Families that are asked on CPU ranks too."""

QUICK = (
    f"{LLAMA} --tp 4 --tokens 64 --machine h200x4",
    f"{LLAMA} --tp 2 --phase decode --batch 8 --machine h200x4",
    f"{LLAMA} --tp 8 --tokens 4096 --machine h100x8",
    f"{LLAMA} --tp 3 --machine h200x4",
    f"{FAMILY}llama --tp 2 --tokens 512 --machine cpu",
    f"{FAMILY}gemma3_text --tp 2 --tokens 512 --machine h200x4",
    f"{FAMILY}deepseek_v3 --tp 2 --tokens 512 --machine h200x4",
    f"{FAMILY}gpt_oss-ep --ep 2 --tokens 512 --machine cpu",
    f"{AS_GENERATE}{LLAMA} --tp 4 --tokens 64 --machine h200x4",
    f"{AS_GENERATE}{FAMILY}llama --tp 2 --tokens 512 --machine cpu",
)
"""Few of `command_lines`, for the test suite."""


def command_lines() -> tuple[str, ...]:
    """Every case, in the order in which it is recorded."""
    return tuple(dict.fromkeys([*_llama(), *_presets(), *_machines(), *_families(), *_options()]))


def _llama() -> Iterator[str]:
    for tp in (2, 4):
        for tokens in (1, 7, 64, 333, 1024, 4096, 16384):
            yield f"{LLAMA} --tp {tp} --tokens {tokens} --machine h200x4"
        for batch in (1, 8, 64):
            yield f"{LLAMA} --tp {tp} --phase decode --batch {batch} --machine h200x4"


def _presets() -> Iterator[str]:
    for tp, machine in ((2, "h200x4"), (8, "h200x8")):
        for name in (*DENSE, *MIXTURES, EXPERTS_ONLY):
            yield f"{name} --tp {tp} --tokens 1024 --machine {machine}"
        yield f"{EXPERTS_ONLY} --ep {tp} --tokens 1024 --machine {machine}"
    for name in MIXTURES:
        yield f"{name} --ep 8 --tokens 1024 --machine h200x8"
    for name in (*DENSE, *MIXTURES):
        yield f"{name} --tp 4 --phase decode --batch 8 --machine h100x8"
    yield f"{EXPERTS_ONLY} --ep 4 --phase decode --batch 8 --machine h100x8"


def _machines() -> Iterator[str]:
    eight = ("h100x8", "h200x8", "b200x8", "gb200-nvl72", "a100x4-slingshot --nodes 2", "gh200-infiniband --nodes 8")
    for machine in eight:
        for tokens in (64, 4096) if machine != "h200x8" else (64,):
            yield f"{LLAMA} --tp 8 --tokens {tokens} --machine {machine}"
    yield f"{LLAMA} --tp 8 --phase decode --batch 64 --machine b200x8"
    yield f"{LLAMA} --tp 8 --phase decode --batch 8 --machine a100x4-slingshot --nodes 2"
    for machine in ("a100x4-slingshot", "a800x4"):
        yield f"qwen2.5-72b --tp 4 --tokens 512 --machine {machine}"
    for tp, tokens in ((2, 64), (2, 1024), (4, 333)):
        yield f"{LLAMA} --tp {tp} --tokens {tokens} --machine cpu"
    yield f"{LLAMA} --tp 2 --phase decode --batch 8 --machine cpu"
    yield "mixtral-8x22b --tp 2 --tokens 64 --machine cpu"


def _families() -> Iterator[str]:
    for family in FAMILIES:
        option = "--ep" if family.expert_parallel else "--tp"
        for machine in ("h200x4", "cpu") if family.id in ON_CPU else ("h200x4",):
            yield f"{FAMILY}{family.id} {option} 2 --tokens 512 --machine {machine}"
    for name in ("llama", "gemma2", "mixtral"):
        yield f"{FAMILY}{name} --tp 2 --phase decode --batch 4 --seq 64 --machine h200x4"


def _options() -> Iterator[str]:
    yield f"{LLAMA} --tp 4 --tokens 512 --machine h200x4 --disable all_reduce_rms_norm"
    yield f"{LLAMA} --tp 4 --tokens 512 --machine h200x4 --dtype float32"
    yield f"{LLAMA} --tp 4 --tokens 512 --machine h200x4 --layers 2"
    yield f"{LLAMA} --tp 4 --batch 4 --seq 96 --machine h200x4"
    yield f"{LLAMA} --tp 8 --tokens 512 --machine h100x8 --nodes 2"
    yield f"{LLAMA} --tp 3 --machine h200x4"
    yield f"{LLAMA} --tp 8 --tokens 512 --machine h200x4 --nodes 1"
    yield f"{FAMILY}gemma2 --tp 2 --tokens 512 --machine h200x4 --layers all"
    yield f"{AS_GENERATE}{LLAMA} --tp 4 --tokens 64 --machine h200x4"
    yield f"{AS_GENERATE}{FAMILY}llama --tp 2 --tokens 512 --machine cpu"


def write_configs(folder: Path) -> None:
    """A `config.json` for each family, in a folder of its name."""
    for family in FAMILIES:
        config_of(family).save_pretrained(folder / family.id)


def words_of(command_line: str, folder: Path) -> list[str]:
    """The arguments of `weaveopt`, with families as the files that `write_configs` made."""
    model, *rest = command_line.removeprefix(AS_GENERATE).split()
    if model.startswith(FAMILY):
        model = str(folder / model.removeprefix(FAMILY) / "config.json")
    if "decode" not in rest and not command_line.startswith(AS_GENERATE):
        rest.append("--all-logits")
    return ["explain", model, *rest]
