"""Resolution of a user's argument (preset, file, directory, hub id) to a checked text-model configuration."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from weaveopt import presets
from weaveopt.cli import model_file
from weaveopt.cli.model_file import PLANS, ModelFile, first_line
from weaveopt.errors import CaptureError, closest
from weaveopt.integrations.transformers.layer_settings import values_of
from weaveopt.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DTYPES = ("bfloat16", "float16", "float32")
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class CaptureRequest:
    """Request for a capture. `tp` and `ep` are ranks; 0 stands for "not asked for"."""

    model: str
    tp: int = 0
    ep: int = 0
    nodes: int = 1
    batch: int = 1
    seq: int = 2048
    phase: str = "prefill"
    layers: int | None = None
    full: bool = False
    """Every layer is captured."""
    all_logits: bool = False
    """Prefill computes the logits of every position, not of the last alone, as `generate` asks for."""
    dtype: str = "bfloat16"
    own_batches: bool = False
    """Every rank has its own batch; only experts are sharded."""
    independent: bool = False
    on_gpus: bool = False
    """Attention is captured as it is called on GPUs."""

    @property
    def world(self) -> int:
        return max(self.tp, self.ep, 1)

    @property
    def tokens(self) -> int:
        """Tokens that one forward pass computes."""
        return self.batch * (self.seq if self.phase == "prefill" else 1)


@dataclass(frozen=True)
class Source:
    """A model by name and its text configuration. Holds no weights."""

    name: str
    config: PreTrainedConfig | SimpleNamespace
    """A namespace of what JSON says where transformers has not been imported; fields may be missing there."""

    @property
    def built(self) -> bool:
        return not isinstance(self.config, SimpleNamespace)


def sketch(model: str) -> Source | None:
    """The configuration as its JSON says it, without torch or transformers; None for a hub id.

    Raises `CaptureError` for what is no preset, file or directory, or cannot be read.
    """
    file = model_file.find(model)
    return None if file is None else Source(file.name, file.sketch())


def load(model: str) -> Source:
    """Load the configuration of a preset, a `config.json`, a directory that holds one, or a hub id.

    Raises `CaptureError` for what is neither, cannot be read, or is no text model that transformers supports. Code that
    comes with a configuration is never run.
    """
    file = model_file.find(model)
    return Source(model, _from_hub(model)) if file is None else Source(file.name, _built(file))


def _built(file: ModelFile) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    data, where, model_type = file.fields, file.where, file.model_type
    known = tuple(CONFIG_MAPPING.keys())
    if model_type not in known and "auto_map" in data:
        raise CaptureError(
            f"{where}: model_type {model_type!r} comes with its own code (auto_map), which is never run: "
            "expected a model that transformers itself has"
        )
    if model_type not in known:
        raise CaptureError(f"{where}: model_type {model_type!r} is unknown to transformers: {_near(model_type, known)}")
    for part in (data, data.get("text_config")):
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise CaptureError(f"{where}: num_hidden_layers {layers}; expected at most {MOST_LAYERS}")
    try:
        with quiet():
            return CONFIG_MAPPING[model_type].from_dict(data).get_text_config()
    except Exception as error:  # transformers validates fields with errors of many types
        raise CaptureError(f"{where}: not a valid {model_type} configuration: {first_line(error)}") from error


def _from_hub(model: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    except Exception as error:  # network, authorization, unknown repository, unknown model type
        preset = closest(model.split("/")[-1].lower(), presets.names())
        raise CaptureError(
            f"cannot get the configuration of {model!r} from the hub ({first_line(error)}); "
            f"download its config.json and pass that file, or use a preset: {preset}"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence logging: transformers warns of what it then refuses, torch logs tracebacks of errors that it raises.

    A fault of a model is reported in one line by this command.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _near(word: str, known: tuple[str, ...]) -> str:
    hint = closest(word, known)
    return hint if hint.startswith("did you mean") else f"{counted(len(known), 'type')} are known, none of them similar"


def check(source: Source, request: CaptureRequest) -> None:
    """Reject impossible requests before any time is spent. Raises `CaptureError`.

    For a sketch the values in its JSON are checked, and those that it leaves to transformers are not.
    """
    world, name = request.world, source.name
    for option in ("batch", "seq", "nodes"):
        if getattr(request, option) < 1:
            raise CaptureError(f"--{option} {getattr(request, option)}: expected at least 1")
    if request.tp and request.ep and request.tp != request.ep:
        raise CaptureError(
            f"--tp {request.tp} --ep {request.ep}: in transformers the experts' ranks are those that share a batch; "
            "give the same number twice, or only one of them"
        )
    if world % request.nodes:
        raise CaptureError(f"{counted(world, 'rank')} cannot be spread evenly over --nodes {request.nodes}")
    for size in SIZES:
        for value in values_of(source.config, size):
            if isinstance(value, int) and value < 1:
                raise CaptureError(f"{name}: its configuration has {size} {value}; expected at least 1")
    total = getattr(source.config, "num_hidden_layers", None)
    if total is None and not source.built:
        return
    if not isinstance(total, int) or total < 1:
        raise CaptureError(f"{name}: its configuration has no num_hidden_layers; expected a decoder-only text model")
    if request.layers is not None and not 1 <= request.layers <= total:
        raise CaptureError(f"--layers {request.layers}: {name} has {total}")
    if world > 1 and (source.built or hasattr(source.config, PLANS[0])):
        _check_plan(source, request)


def _check_plan(source: Source, request: CaptureRequest) -> None:
    config, world = source.config, request.world
    option = f"--ep {world}" if request.ep else f"--tp {world}"
    ep_plan = getattr(config, "base_model_ep_plan", None) or {}
    if request.ep:
        if not ep_plan:
            raise CaptureError(
                f"{source.name}: transformers has no expert-parallel plan for {config.model_type}: use --tp"
            )
        experts = _num_experts(source)
        if experts and experts % world:
            divisors = _divisors(experts)
            raise CaptureError(
                f"{option} does not divide the {counted(experts, 'expert')} of {source.name}; {divisors}"
            )
    elif not _shards_layers(source):
        hint = "; it has an expert-parallel plan: use --ep" if ep_plan else ": use --tp 1"
        raise CaptureError(f"{source.name}: transformers has no tensor-parallel plan for {config.model_type}{hint}")
    heads, kv_heads = _heads(source)
    if not _heads_fit(source, world):
        fitting = [n for n in range(2, min(heads, MOST_RANKS) + 1) if _heads_fit(source, n)]
        raise CaptureError(
            f"{option} does not divide the attention heads of {source.name} ({heads} query, {kv_heads} key-value); "
            f"{_which_do(fitting)}"
        )


def _shards_layers(source: Source) -> bool:
    """True if the tensor-parallel plan is one: GPT-OSS's, from transformers 5.24 on, has the embedding alone."""
    plan = getattr(source.config, PLANS[0], None) or {}
    return any(not key.startswith("embed") for key in plan)


def _heads(source: Source) -> tuple[int, int]:
    """Query heads and key heads; zeros where the configuration names none. Where layers differ, what divides all."""
    heads, kv_heads = (_shared(source, name) for name in ("num_attention_heads", "num_key_value_heads"))
    return heads, kv_heads or heads


def _shared(source: Source, name: str) -> int:
    """The greatest common divisor of a field's values in the layers; 0 where it has none."""
    return math.gcd(*(value for value in values_of(source.config, name) if isinstance(value, int)))


def _shards_heads(source: Source, projection: str) -> bool:
    plan = getattr(source.config, PLANS[0], None) or {}
    return any(style == "colwise" and f"_attn.{projection}" in key for key, style in plan.items())


def _heads_fit(source: Source, world: int) -> bool:
    heads, kv_heads = _heads(source)
    if _shards_heads(source, "qkv"):
        return not (heads % world or kv_heads % world)
    return not _shards_heads(source, "q_proj") or not (heads % world or (kv_heads % world and world % kv_heads))


def ranks_per_key_head(source: Source, world: int) -> int:
    """Tensor-parallel ranks that hold the same key head: more than one where there are fewer key heads than ranks."""
    kv_heads = _heads(source)[1]
    replicated = world > 1 and _shards_heads(source, "k_proj") and kv_heads % world
    return world // kv_heads if replicated else 1


def default_ranks(source: Source, limit: int, nodes: int) -> tuple[int, int]:
    """Tensor- and expert-parallel ranks where neither was asked for: as many as the model's plan takes, up to `limit`.

    (n, 0), or (0, n) of a model that has an expert-parallel plan only; (1, 0) of one without any.
    """
    if not _shards_layers(source):
        if getattr(source.config, PLANS[1], None):
            return 0, _largest(experts, limit, nodes) if (experts := _num_experts(source)) else limit
        if nodes == 1:
            return 1, 0
    return _largest(math.gcd(*_heads(source)), limit, nodes), 0


def _largest(shared: int, limit: int, nodes: int) -> int:
    """The largest number of ranks up to `limit` that divides `shared` and that `nodes` divides; else `limit`."""
    return next((n for n in range(limit, 1, -1) if n % nodes == 0 and shared % n == 0), limit)


def _num_experts(source: Source) -> int | None:
    """Routed experts; None where the configuration names none."""
    return next((number for name in EXPERT_COUNTS if (number := _shared(source, name))), None)


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
MOST_RANKS = 1024
"""Numbers of ranks beyond this one are not listed."""
MOST_LAYERS = 10_000
"""Configurations list their layers, and all are built, without weights, to see which are alike: 10⁹ fill any memory."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names that families give to the number of routed experts."""


def _divisors(number: int) -> str:
    return _which_do([n for n in range(2, number + 1) if number % n == 0])


def _which_do(found: list[int]) -> str:
    """`2, 4, 8 do`, or that none does."""
    if len(found) > 1:
        return f"{', '.join(map(str, found))} do"
    return f"only {found[0]} does" if found else "no number of ranks does"
