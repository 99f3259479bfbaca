"""Capture of one rank's graph of any world size: one process, no weights, no GPU, no peers.

A fake process group stands in for the peers and fake tensors for the weights; sharding is done by transformers
itself, so the graph is the one that rank 0 of a real run would compile.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import TYPE_CHECKING
from unittest import mock

from weaveopt.cli.layers import LayerPlan, decoder_layers, every_layer, kinds_of, reduce, shortened, structures_of
from weaveopt.cli.model_file import first_line
from weaveopt.cli.model_source import CaptureRequest, Source, quiet, ranks_per_key_head
from weaveopt.errors import CaptureError, WeaveError
from weaveopt.integrations.transformers.cache_argument import with_cache
from weaveopt.wording import counted

if TYPE_CHECKING:
    import torch
    from torch import fx
    from transformers import Cache, PreTrainedConfig, PreTrainedModel
    from transformers.distributed import DistributedConfig

    Backend = Callable[..., object]

RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """A process group of `world` ranks in which only this process exists; collectives return at once.

    Raises `CaptureError` where the process already belongs to a group. Leaves group and environment as found.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise CaptureError("this torch was built without torch.distributed; install a build that has it")
    if dist.is_initialized():
        raise CaptureError("this process already belongs to a process group; run `weaveopt explain` on its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    os.environ.update(WORLD_SIZE=str(world), RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(world))
    try:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        # transformers makes its mesh on the accelerator it finds; here the graph must not depend on the host.
        with mock.patch.object(torch._C, "_get_accelerator", lambda *_: torch.device("cpu")):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def plan_layers(source: Source, request: CaptureRequest) -> LayerPlan:
    """Select the layers that `capture` takes: a prefix with every kind, or what `--layers` asks for."""
    total: int = source.config.num_hidden_layers
    if request.layers is not None:
        return every_layer(total, request.layers)
    if request.full:
        return every_layer(total)
    kinds = _kinds(source.config)
    plan = reduce(kinds) if len(kinds) == total else every_layer(total)
    # A family may build layers by counting from the end; then the prefix of a shorter model is another model.
    if not plan.whole:
        short = _kinds(shortened(source.config, plan.captured))
        if structures_of(short) != structures_of(kinds[: plan.captured]):
            return every_layer(total)
    return plan


def _kinds(config: PreTrainedConfig) -> tuple[object, ...]:
    import torch

    model = build(config, torch.device("meta"), "bfloat16")
    return kinds_of(model, config) if decoder_layers(model, config) else ()


def build(config: PreTrainedConfig, device: torch.device, dtype: str) -> PreTrainedModel:
    """The model of `AutoModelForCausalLM` for a configuration, weights not initialized. Raises `CaptureError` if there
    is none."""
    import torch
    from transformers.initialization import no_init_weights

    model_class = _model_class(config)
    try:
        with quiet(), device, no_init_weights(), _parameters_are_replaced():
            return model_class._from_config(config, dtype=getattr(torch, dtype)).eval()
    except Exception as error:  # transformers and torch refuse a field with errors of many types
        words = first_line(error)
        raise CaptureError(f"transformers cannot build a {config.model_type} of this configuration: {words}") from error


@contextmanager
def _parameters_are_replaced() -> Iterator[None]:
    """Converted modules (`module.to(dtype)`) get new parameters: torch swaps fake ones in place, and refuses those that
    the fake mode looks after, which are all."""
    from torch import Tensor, nn

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for module in self.modules() if recurse else (self,):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(fn(parameter.detach()), parameter.requires_grad))
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = fn(buffer)
        return self

    with mock.patch.object(nn.Module, "_apply", apply):
        yield


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        found: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise CaptureError(f"AutoModelForCausalLM of transformers has no model for {config.model_type}") from None
    return found


def sharding(source: Source, request: CaptureRequest) -> str:
    """Describe how transformers shards for this request."""
    if request.world == 1:
        return "one rank, nothing sharded"
    if request.own_batches:
        promise = "independent" if request.independent else "called together"
        return f"experts sharded over {request.world} ranks, each with a batch of its own, {promise}"
    what = "experts, and all else that has a plan, sharded" if request.ep else "tensor parallel"
    copies = ranks_per_key_head(source, request.world)
    assumed = f", each key head on {copies} of them (assumes weaveopt.replicated_key_heads)" if copies > 1 else ""
    return f"{what} over {request.world} ranks{assumed}"


def _parallelism(source: Source, config: PreTrainedConfig, request: CaptureRequest) -> DistributedConfig | None:
    """Build the parallel plan for transformers. `config` is the configuration built from `source`."""
    from transformers.distributed import DistributedConfig

    if request.world == 1:
        return None
    parallel = DistributedConfig(tp_size=request.world, tp_plan="auto")
    if request.own_batches:
        from weaveopt.integrations.transformers.data_parallel import DataParallelExperts

        return DataParallelExperts(request.world, request.independent)
    if request.ep:
        parallel = DistributedConfig(tp_size=request.world, ep_size=request.world)
    if ranks_per_key_head(source, request.world) > 1:
        from weaveopt.integrations.transformers.key_heads import replicated_key_heads

        return replicated_key_heads(config, parallel)
    return parallel


def capture(
    source: Source,
    request: CaptureRequest,
    plan: LayerPlan,
    backend: Backend,
    on_step: Callable[[str], None] = lambda _: None,
) -> None:
    """Pass rank 0's graph of one forward pass to `backend`, a TorchDynamo backend.

    Prefill is `model(ids[batch, seq], use_cache=False, logits_to_keep=1)`, with the logits that `generate` asks for;
    decode is one token a sequence against a static cache of `seq` positions. `on_step` is called with the name of each
    next step. Raises `CaptureError`; a `WeaveError` of the backend passes.
    """
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from weaveopt.cli.gpu_attention import attention_of_gpus

    config = shortened(source.config, plan.captured) if not plan.whole else source.config
    model_class = _model_class(config)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(quiet())
        stack.enter_context(fake_group(request.world))
        # The compiled frames of this capture must not count against the recompile limit of the next.
        stack.callback(torch._dynamo.reset)
        try:
            on_step(f"building {plan.captured} of {counted(plan.total, 'layer')}")
            distributed = _parallelism(source, config, request)
            mesh = None
            if distributed is not None:
                distributed, _, mesh = model_class.prepare_distribute_model(distributed)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
            stack.enter_context(torch.no_grad())
            if request.on_gpus:
                stack.enter_context(attention_of_gpus())
            model = build(config, torch.device("cpu"), request.dtype)
            if distributed is not None:
                model = model.maybe_distribute_model(model, distributed, mesh)
            # In the order of from_pretrained: shared weights are joined after they were sharded.
            model.tie_weights()
            cache = _filled_cache(model, config, request) if request.phase == "decode" else None
            on_step("tracing the forward pass")

            def lowered(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> object:
                on_step("matching, deciding and rewriting")
                return backend(gm, inputs)

            compiled = torch.compile(model, backend=lowered, fullgraph=True, dynamic=False)
            if cache is None:
                last = not request.all_logits and "logits_to_keep" in signature(model.forward).parameters
                logits = {"logits_to_keep": 1} if last else {}
                compiled(torch.zeros(request.batch, request.seq, dtype=torch.long), use_cache=False, **logits)
            else:
                compiled(torch.zeros(request.batch, 1, dtype=torch.long), use_cache=True, **with_cache(cache))
        except Exception as error:
            raise _as_weave_error(error, source) from error


def _filled_cache(model: PreTrainedModel, config: PreTrainedConfig, request: CaptureRequest) -> Cache:
    """A static cache with one free position; one eager token makes each layer allocate what it really stores.

    Layers with a window count their tokens in Python too, and the mask of a step depends on that number.
    """
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=request.seq)
    model(torch.zeros(request.batch, 1, dtype=torch.long), use_cache=True, **with_cache(cache))
    for layer in cache.layers:
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = request.seq - 1
    return cache


def _as_weave_error(error: BaseException, source: Source) -> WeaveError:
    """The `WeaveError` inside what Dynamo wraps around a backend's exception, else a `CaptureError` of one line."""
    innermost: BaseException | None = error
    root = error
    while innermost is not None:
        if isinstance(innermost, WeaveError):
            return innermost
        root = innermost
        inner = getattr(innermost, "inner_exception", None)
        innermost = inner if isinstance(inner, BaseException) else innermost.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    # Dynamo's first line is a title; what failed stands in its explanation.
    words = [*lines[:1], *(line for line in lines if line.startswith("Explanation: "))]
    return CaptureError(f"{source.name} cannot be captured: {type(root).__name__}: {' '.join(words)[:300]}")
