"""Names of modules in reports, however Dynamo reached the outermost one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from tests.graphs.models import Family, config_of
from weaveopt.graph.facts import module_of
from weaveopt.integrations.transformers.cache_argument import cache_argument


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.by_name = nn.ModuleDict({"first": nn.Sequential(nn.Linear(4, 4))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.by_name["first"](self.layers[0](x))  # type: ignore[no-any-return]


def wrapped(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As decorators of transformers 5.24 and hooks of accelerate do it."""

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
        return function(*args, **kwargs)

    return wrapper


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)  # type: ignore[no-any-return]


class Decorated(Model):
    @wrapped
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)  # type: ignore[no-any-return]


def hooked() -> Model:
    model = Model()
    model.forward = wrapped(model.forward)  # type: ignore[method-assign]
    return model


GLOBAL = Model()


def calls_a_global(x: torch.Tensor) -> torch.Tensor:
    return GLOBAL(x)  # type: ignore[no-any-return]


def calls_what_it_closes_over() -> Callable[[torch.Tensor], torch.Tensor]:
    model = Model()
    return lambda x: model(x)


def names_in(function: Callable[..., object], *inputs: object, **named: object) -> list[str]:
    found: dict[str, None] = {}

    def backend(gm: fx.GraphModule, _: list[torch.Tensor]) -> fx.GraphModule:
        nodes = [node for node in gm.graph.nodes if node.op == "call_function" and "nn_module_stack" in node.meta]
        found.update(dict.fromkeys(map(module_of, nodes)))
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend)(*inputs, **named)
    return list(found)


@pytest.mark.parametrize(
    "make", [Model, Decorated, hooked, lambda: calls_a_global, calls_what_it_closes_over],
    ids=["method", "decorated", "hooked", "global", "closure"],
)  # fmt: skip
def test_a_name_is_the_path_from_the_outermost_module(make: Callable[[], Callable[..., object]]) -> None:
    assert names_in(make(), torch.ones(2, 4)) == ["block.layers.0", "block.by_name.first.0"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_names_in_models_of_transformers(family: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(Family(family, {"num_hidden_layers": 1}))).eval()
    names = names_in(model, torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    assert "model.layers.0.self_attn.q_proj" in names and "lm_head" in names
    assert all(name.split(".")[0] in ("model", "lm_head") for name in names), names


def test_a_name_goes_through_a_wrapped_forward() -> None:
    node = fx.Graph().create_node("call_function", torch.relu, (), {})
    path = "L['self'].model.layers.0.self_attn.forward.__closure__[2].cell_contents.__self__.o_proj"
    node.meta["nn_module_stack"] = {"o_proj": (path, nn.Linear)}
    assert module_of(node) == "model.layers.0.self_attn.o_proj"


def test_the_cache_has_the_name_that_the_models_forward_takes() -> None:
    import inspect

    from transformers import LlamaForCausalLM

    assert cache_argument() in inspect.signature(LlamaForCausalLM.forward).parameters
