"""Selection of the decoder layers to capture, and how many layers of the whole model each of them stands for.

A model of 80 equal layers gives 80 equal pieces of graph. Capturing a prefix that has every kind of layer, and a
separate last layer (the norm after it is the model's final norm), gives the same sites in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weaveopt.records.report import GraphReport, OutsideWork
from weaveopt.reporting.timeline import Block, blocks, layers_of, module_of
from weaveopt.wording import counted

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class LayerPlan:
    """`counts[i]` layers of the whole model are represented by captured layer `i`."""

    total: int
    counts: tuple[int, ...]

    @property
    def captured(self) -> int:
        return len(self.counts)

    @property
    def whole(self) -> bool:
        return self.captured == self.total

    def describe(self) -> str:
        if self.whole:
            return "its only layer captured" if self.total == 1 else f"all {self.total} layers captured"
        if sum(self.counts) == self.total:
            stands_for = ", ".join(map(str, self.counts))
            return f"{self.captured} of {counted(self.total, 'layer')} captured, standing for {stands_for}"
        return f"only the first {self.captured} of {counted(self.total, 'layer')} captured and counted"


def every_layer(total: int, first: int | None = None) -> LayerPlan:
    """The first layers (all of them by default), each standing for itself."""
    return LayerPlan(total, (1,) * (total if first is None else first))


def reduce(kinds: Sequence[Hashable]) -> LayerPlan:
    """The shortest prefix that holds every kind inside, and whose last layer is of the real last layer's kind.

    The captured last layer stands for the real last. A layer that was cut is represented by the last captured
    layer of its kind that is not the last of all; the first layer represents others only if it must, because
    what it reads comes from the embedding.
    """
    total = len(kinds)
    for captured in range(2, total):
        inner = kinds[: captured - 1]
        if kinds[captured - 1] != kinds[-1] or not set(kinds[:-1]) <= set(inner):
            continue
        stand_ins = {kind: i for i, kind in enumerate(inner)}
        cut = kinds[captured - 1 : -1]
        if any(stand_ins[kind] == 0 for kind in cut):
            continue
        counts = [1] * captured
        for kind in cut:
            counts[stand_ins[kind]] += 1
        return LayerPlan(total, tuple(counts))
    return every_layer(total)


def kinds_of(model: nn.Module, config: PreTrainedConfig) -> tuple[Hashable, ...]:
    """Key of each decoder layer of a model (on the meta device), equal for equal modules, shapes and plain
    attributes."""
    layer_types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    return tuple((_kind(layer), kind) for layer, kind in zip(decoder_layers(model, config), layer_types, strict=True))


def decoder_layers(model: nn.Module, config: PreTrainedConfig) -> list[nn.Module]:
    """The decoder layers in order; empty if the model does not keep them in one list."""
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.endswith("layers") and len(module) == config.num_hidden_layers:
            return list(module)
    return []


def structures_of(kinds: Iterable[Hashable]) -> tuple[Hashable, ...]:
    """The same without numbers such as a residual's scale, which may follow from how many layers a model has."""

    def whole(part: Hashable) -> Hashable:
        if isinstance(part, tuple):
            return tuple(map(whole, part))
        return float if isinstance(part, float) and part not in (0.0, 1.0) else part

    return tuple(map(whole, kinds))


def _kind(layer: nn.Module) -> Hashable:
    parts: list[Hashable] = []
    for name, module in layer.named_modules():
        plain = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key != "layer_idx" and isinstance(value, bool | int | float | str | None)
        )
        shapes = tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False))
        parts.append((name, type(module).__qualname__, plain, shapes))
    return tuple(parts)


def shortened(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy of the configuration with `num_layers` layers; what has one entry a layer is cut too."""
    total = config.num_hidden_layers
    data = config.to_dict()
    for key, value in data.items():
        if isinstance(value, list) and len(value) == total:
            data[key] = value[:num_layers]
    if isinstance(own := data.get("per_layer_config"), dict):  # by the layer's number: what it has of its own
        data["per_layer_config"] = {at: value for at, value in own.items() if int(at) < num_layers}
    data["num_hidden_layers"] = num_layers
    return type(config).from_dict(data)


def scale(graph: GraphReport, plan: LayerPlan) -> GraphReport:
    """The graph with each site and each kernel outside the sites counted for all the layers that it stands for."""
    sequence = blocks(graph)
    layers = layers_of([module_of(block) for block in sequence])

    def scaled(block: Block, layer: int | None) -> Block:
        if layer is None or layer >= plan.captured:
            return block
        if isinstance(block, OutsideWork):
            return replace(block, count=block.count * plan.counts[layer])
        return replace(block, site=replace(block.site, count=block.site.count * plan.counts[layer]))

    counted = [scaled(block, layer) for block, layer in zip(sequence, layers, strict=True)]
    return replace(
        graph,
        decisions=tuple(block for block in counted if not isinstance(block, OutsideWork)),
        work=tuple(block for block in counted if isinstance(block, OutsideWork)),
    )
