"""Decoder layers of models under tensor parallelism: how they are made, called, and compiled in several ways."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, StaticCache
from transformers.distributed import DistributedConfig

from benchmarks.ranks import Place
from benchmarks.suite import UsageError
from weaveopt.integrations.transformers.cache_argument import with_cache

INDUCTOR, WEAVE = "inductor", "weave"
Forward = Callable[..., object]
Compile = Callable[[fx.GraphModule, list[torch.Tensor]], Forward]


@dataclass(frozen=True)
class Case:
    """Prefill of one sequence without a cache, or decode of one token a sequence over a static cache."""

    phase: str
    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


def parse(word: str) -> Case:
    """`prefill:TOKENS` or `decode:BATCH`. Raises `UsageError`."""
    phase, _, number = word.partition(":")
    count = int(number) if number.isdigit() else 0
    case = {"prefill": Case("prefill", 1, count), "decode": Case("decode", count, 1)}.get(phase)
    if case is None or case.tokens < 1:
        raise UsageError(f"found case {word!r}, expected prefill:TOKENS or decode:BATCH")
    return case


@dataclass(frozen=True)
class Shape:
    """A model's layers by their config, and what is measured of them."""

    config: str
    layers: int
    settings: Mapping[str, int | float | bool]
    cases: tuple[str, ...]
    suites: tuple[str, ...] = ("attention_layers", "moe_layers")
    """Suites that measure it."""
    tensor_parallel: bool = True
    """False: transformers has a plan for its experts alone."""


SHAPES = {
    "llama-70b": Shape(
        "llama", 4,
        {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
        (*(f"prefill:{n}" for n in (512, 1024, 2048, 4096, 8192, 16384)), "decode:1", "decode:8", "decode:64"),
        suites=("attention_layers",),
    ),
    "llama-8b": Shape(
        "llama", 8,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
        (*(f"prefill:{n}" for n in (512, 1024, 2048, 4096, 8192)), "decode:1", "decode:8", "decode:64"),
        suites=(),
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe", 6,
        {
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "norm_topk_prob": True,
        },
        ("prefill:8192", "decode:8", "decode:64"),
    ),
    "mixtral-8x22b": Shape(
        "mixtral", 3,
        {
            "hidden_size": 6144, "intermediate_size": 16384, "num_local_experts": 8, "num_experts_per_tok": 2,
            "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        },
        ("prefill:8192", "decode:8"),
    ),
    "gpt-oss-120b": Shape(
        "gpt_oss", 4,
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        },
        ("prefill:512", "prefill:2048"),
        suites=("moe_layers",), tensor_parallel=False,
    ),
}  # fmt: skip


def make(place: Place, shape: Shape, layers: int, placement: DistributedConfig | None = None) -> PreTrainedModel:
    """The layers, made on the device and then sharded: every rank draws the same weights and keeps its part.

    `placement`: how, if not by tensor parallelism.
    """
    from transformers.initialization import no_init_weights

    config: PretrainedConfig = CONFIG_MAPPING[shape.config](
        **shape.settings, num_hidden_layers=layers, vocab_size=32768, max_position_embeddings=16384
    )
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    plan = placement
    if plan is None and place.world > 1:
        experts = {} if shape.tensor_parallel else {"ep_size": place.world}
        plan = DistributedConfig(tp_size=place.world, **experts)
    distributed, _, mesh = model_class.prepare_distribute_model(plan) if plan else (None, None, None)
    with place.device, no_init_weights():
        model = model_class._from_config(config, dtype=torch.bfloat16).eval()
    generator = torch.Generator(place.device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                deviation = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, deviation, generator=generator)
            else:
                parameter.fill_(1.0)
    if plan:
        model = model_class.maybe_distribute_model(model, distributed, mesh)
    for module in model.modules():
        # transformers 5.17 hangs hooks of the backward pass on norms of queries and keys, at which graphs break.
        module._backward_hooks.clear()
        module._is_full_backward_hook = None
    gc.collect()
    decoder: PreTrainedModel = model.model
    return decoder


def without_all_reduce(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    """Inductor on the graph with every all-reduce replaced by its input."""
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    @functools.wraps(compile_fx_inner)
    def inner(graph_module: fx.GraphModule, *args: object, **options: object) -> object:
        reduce, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default
        num_removed = 0
        for node in list(graph_module.graph.nodes):
            if node.op != "call_function" or node.target != wait:
                continue
            source = node.args[0]
            if source.op == "call_function" and source.target == reduce:
                node.replace_all_uses_with(source.args[0])
                graph_module.graph.erase_node(node)
                graph_module.graph.erase_node(source)
                num_removed += 1
        assert num_removed > 0, "no all-reduce found to remove"
        graph_module.recompile()
        return compile_fx_inner(graph_module, *args, **options)

    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(gm, inputs, inner_compile=inner)


class Variants:
    """One capture by Dynamo, compiled in every way; `forward` runs the one that is `chosen`."""

    def __init__(self, model: PreTrainedModel, ways: Mapping[str, Compile]) -> None:
        self.ways = ways
        self.compiled: dict[str, Forward] = {}
        self._arguments: tuple[object, ...] = ()
        self.chosen = INDUCTOR
        self.forward = torch.compile(model, backend=self._compile, dynamic=False, fullgraph=True)

    def _compile(self, gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Forward:
        assert not self.compiled, "a case was captured a second time"
        for name, way in self.ways.items():
            self.compiled[name] = way(copied(gm), inputs)

        def run(*arguments: object) -> object:
            self._arguments = arguments
            return self.compiled[self.chosen](*arguments)

        return run

    def graph_of(self, name: str) -> Callable[[], object]:
        """The compiled graph of a way, called as in the last call, without Dynamo's guards in front of it."""
        return lambda: self.compiled[name](*self._arguments)

    def running(self, name: str) -> Forward:
        def run(*arguments: object, **named: object) -> object:
            self.chosen = name
            return self.forward(*arguments, **named)

        return run


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A module with its own graph: compiling changes it. What Dynamo noted beside the graph comes along."""
    graph = fx.Graph(tracer_cls=getattr(gm.graph, "_tracer_cls", None))
    nodes: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, nodes))
    for old, new in nodes.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    module = fx.GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        module._param_name_to_source = gm._param_name_to_source
    return module


class Workload:
    """The call of one case; decode starts each time from a cache of `positions`, of which `filled` are filled."""

    def __init__(
        self,
        model: PreTrainedModel,
        case: Case,
        device: torch.device,
        positions: int = 0,
        filled: int = 0,
        gives_positions: bool = True,
    ) -> None:
        self.filled = filled
        generator = torch.Generator(device).manual_seed(case.tokens)

        def random_ids(seq: int) -> torch.Tensor:
            return torch.randint(1, model.config.vocab_size, (case.batch, seq), generator=generator, device=device)

        self.case, self.cache = case, None
        self.ids = random_ids(case.seq)
        # Positions that a caller gives may be those of packed sequences: then the mask is known at run time only.
        own_positions = torch.arange(case.seq, device=device)[None].expand(case.batch, -1).contiguous()
        self.positions = own_positions if gives_positions or case.phase == "decode" else None
        if case.phase == "decode":
            self.cache = StaticCache(config=model.config, max_cache_len=positions)
            model(input_ids=random_ids(filled), use_cache=True, **with_cache(self.cache))
            self.positions = own_positions + filled

    def reset(self) -> None:
        if self.cache is not None:
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.filled)

    def __call__(self, forward: Forward) -> torch.Tensor:
        caching = self.cache is not None
        output = forward(input_ids=self.ids, position_ids=self.positions, use_cache=caching, **with_cache(self.cache))
        return output.last_hidden_state  # type: ignore[attr-defined, no-any-return]


def largest_error(found: torch.Tensor, eager: torch.Tensor) -> float:
    """Largest `norm(found - eager) / norm(eager)` of all tokens: one wrong row among thousands shows."""
    return float(((found - eager).norm(dim=-1) / eager.norm(dim=-1)).max())
