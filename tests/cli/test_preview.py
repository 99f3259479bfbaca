"""Capture without peers: every all-reduce of the whole model is accounted for, and nothing remains."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import fx
from torch._inductor.compile_fx import compile_fx

from tests.graphs.nonempty import some
from weaveopt.cli import model_source, preview
from weaveopt.cli.gpu_attention import gpu_kernel_attention
from weaveopt.cli.model_source import CaptureRequest
from weaveopt.errors import CaptureError, OptionError
from weaveopt.reporting import timeline

aten = torch.ops.aten
EMBEDDING = 1
"""All-reduces after the embedding, which is shared by vocabulary."""

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}


def _tiny(tmp_path: Path, model_type: str, **more: int) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **TINY, **more}))
    return str(tmp_path)


def _all_reduces(request: CaptureRequest) -> tuple[int, list[tuple[int, ...]]]:
    """All-reduces of the whole model, from the captured ones and what they stand for, and their shapes."""
    plan, nodes = _captured(request)
    found: list[tuple[int, tuple[int, ...]]] = []
    for node in nodes:
        if "all_reduce" in str(node.target):
            paths = [path for path, _ in node.meta["nn_module_stack"].values()]
            (layer,) = timeline.layers_of(paths[-1:])
            found.append((1 if layer is None else plan.counts[layer], tuple(node.meta["val"].shape)))
    return sum(count for count, _ in found), [shape for _, shape in found]


def _captured(request: CaptureRequest) -> tuple[preview.LayerPlan, list[fx.Node]]:
    """The layers that are captured, and the nodes of their graph."""
    source = model_source.load(request.model)
    model_source.check(source, request)
    plan = preview.plan_layers(source, request)
    found: list[fx.Node] = []

    def inner(module: fx.GraphModule, inputs: list[object], **_: object) -> Callable[..., object]:
        found.extend(module.graph.nodes)
        values = fx.map_arg(module.graph.output_node().args[0], lambda node: node.meta["val"])
        return lambda *_: values

    def backend(gm: fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(gm, inputs, inner_compile=inner)

    preview.capture(source, request, plan, backend)
    return plan, found


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_two_all_reduces_a_layer(phase: str, tmp_path: Path) -> None:
    request = CaptureRequest(_tiny(tmp_path, "llama"), tp=2, batch=3, seq=8, phase=phase)
    total, shapes = _all_reduces(request)
    assert total == 2 * 6 + EMBEDDING
    assert {shape[:2] for shape in shapes} == {(3, 8 if phase == "prefill" else 1)}


def test_more_ranks_than_key_heads_is_captured_and_said(tmp_path: Path) -> None:
    few, many = (CaptureRequest(model=_tiny(tmp_path, "qwen3"), tp=ranks, seq=16, layers=1) for ranks in (2, 4))
    source = model_source.load(many.model)
    assert preview.sharding(source, few) == "tensor parallel over 2 ranks"
    said = "tensor parallel over 4 ranks, each key head on 2 of them (assumes weaveopt.replicated_key_heads)"
    assert preview.sharding(source, many) == said
    for phase, tokens in (("prefill", 16), ("decode", 1)):
        assert _all_reduces(replace(many, phase=phase)) == (2 + EMBEDDING, [(1, tokens, 64)] * (2 + EMBEDDING))


def test_reduced_and_full_capture_agree(tmp_path: Path) -> None:
    request = CaptureRequest(_tiny(tmp_path, "deepseek_v3", **DEEPSEEK, num_hidden_layers=4), tp=2, seq=8)
    reduced, shapes = _all_reduces(request)
    full, all_shapes = _all_reduces(replace(request, full=True))
    assert reduced == full
    assert len(shapes) < len(all_shapes)


DEEPSEEK = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
}


def test_experts_spread_over_ranks(tmp_path: Path) -> None:
    model = _tiny(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    total, _ = _all_reduces(CaptureRequest(model, ep=2, seq=8))
    assert total == 2 * 6 + EMBEDDING


def test_sliding_and_full_attention(tmp_path: Path) -> None:
    windows, full = "sliding_attention", "full_attention"
    types = [windows, windows, full, full, windows, full]  # four stand for all
    config = {"model_type": "gemma3_text", **TINY, "layer_types": types, "sliding_window": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    total, _ = _all_reduces(CaptureRequest(str(tmp_path), tp=2, seq=8))
    assert total == 2 * 6 + 1  # its embedding is tied to the head, which is shared by vocabulary


def test_multimodal_models_are_captured_by_their_text_part(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": TINY}))
    source = model_source.load(str(tmp_path))
    assert source.config.model_type == "gemma3_text"
    assert source.config.num_hidden_layers == 6


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    accelerator = torch._C._get_accelerator
    verbosity = transformers.utils.logging.get_verbosity()
    _all_reduces(CaptureRequest(_tiny(tmp_path, "llama"), tp=2, seq=8, layers=1))
    assert not dist.is_initialized()
    assert (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == ("7", None)
    assert torch._C._get_accelerator is accelerator
    assert transformers.utils.logging.get_verbosity() == verbosity


def test_a_failure_names_the_model_and_cleans_up(tmp_path: Path) -> None:
    source = model_source.load(_tiny(tmp_path, "llama"))
    request = CaptureRequest(source.name, tp=2, seq=8, layers=1)
    plan = preview.plan_layers(source, request)

    def broken(*_: object) -> Callable[..., object]:
        raise ValueError("first line\nsecond line")

    def refusing(*_: object) -> Callable[..., object]:
        raise OptionError("not like this")

    with pytest.raises(CaptureError, match=f"{source.name} cannot be captured: .*first line"):
        preview.capture(source, request, plan, broken)
    with pytest.raises(OptionError, match="not like this"):
        preview.capture(source, request, plan, refusing)
    assert not dist.is_initialized()


def test_a_process_that_has_a_group_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CaptureError, match="already belongs to a process group"), preview.fake_group(2):
            pass
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_many_captures_in_one_process(tmp_path: Path) -> None:
    """Dynamo gives a function up after some recompiles; captures do not count against one another."""
    request = CaptureRequest(_tiny(tmp_path, "llama"), tp=2, layers=1)
    source = model_source.load(request.model)
    lengths: list[int] = []

    def backend(gm: fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        ids = next(value for value in inputs if isinstance(value, torch.Tensor) and value.dtype == torch.int64)
        lengths.append(ids.shape[1])
        return gm.forward

    with torch._dynamo.config.patch(recompile_limit=2):
        for length in range(4, 7):
            preview.capture(source, replace(request, seq=length), preview.plan_layers(source, request), backend)
    assert lengths == list(range(4, 7))


@pytest.mark.parametrize("on_gpus", [False, True])
def test_attention_is_captured_as_it_is_called_on_gpus(tmp_path: Path, on_gpus: bool) -> None:
    """Heads of values that are smaller than those of keys: on CPUs torch writes the scores, on GPUs one kernel runs."""
    model = _tiny(tmp_path, "deepseek_v3", **DEEPSEEK, num_hidden_layers=1)
    request = CaptureRequest(model, tp=2, seq=8, on_gpus=on_gpus)
    _, nodes = _captured(request)
    called = [str(node.target) for node in some(nodes)]
    num_kernels = sum("_scaled_dot_product_efficient_attention" in each for each in called)
    num_softmaxes = sum("aten.amax." in each for each in called)
    assert (num_kernels, num_softmaxes) == (int(on_gpus), int(not on_gpus)), called
    assert gpu_kernel_attention not in aten.scaled_dot_product_attention.default.py_kernels.values()
