"""The whole model in parts: the embedding, each kind of layer, the head; with their times before and after."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from weaveopt.records.report import GraphReport, OutsideWork
from weaveopt.reporting.reasons import collapse
from weaveopt.reporting.timeline import Block, Times, blocks, count_of, layers_of, module_of, times_of

EMBEDDING = "embedding"
HEAD = "head"
BETWEEN = "between layers"
WHOLE = "whole"
"""Name of the only part of a graph in which no module path names a layer."""


@dataclass(frozen=True)
class ReportPart:
    """A stretch of the graph: a layer, or the blocks before, between or after the layers. Equal layers are one part."""

    name: str
    layers: tuple[int, ...]
    """The captured layers that it is, or () where it is none."""
    count: int
    """Places of the whole model that it stands for."""
    blocks: tuple[Block, ...]
    """Blocks of one instance of the part."""
    before: Times
    after: Times


def parts(graph: GraphReport) -> tuple[ReportPart, ...]:
    """Divide a graph into parts, in graph order. Their times, each multiplied by its count, add up to the whole."""
    folded: dict[Hashable, list[tuple[str, int | None, int, tuple[Block, ...]]]] = {}
    for name, layer, count, members in _stretches(graph):
        key = name if layer is None else tuple(map(_kind, members))
        folded.setdefault((key, layer is None and count), []).append((name, layer, count, members))
    found = []
    for members_of in folded.values():
        name, first, _, members = members_of[0]
        layers = tuple(layer for _, layer, _, _ in members_of if layer is not None)
        found.append(
            ReportPart(
                name=name if first is None else _layers_name(layers),
                layers=layers,
                count=sum(count for _, _, count, _ in members_of),
                blocks=members,
                before=sum((times_of(block, fused=False) for block in members), Times()),
                after=sum((times_of(block, fused=True) for block in members), Times()),
            )
        )
    return tuple(found)


def typical(graph: GraphReport) -> ReportPart | None:
    """The layer that stands for most of the model; without layers, the part that does."""
    found = parts(graph)
    return max(found, key=lambda part: (bool(part.layers), part.count * part.before.us), default=None)


def _stretches(graph: GraphReport) -> Iterator[tuple[str, int | None, int, tuple[Block, ...]]]:
    """(name, layer, count, blocks) of every layer and of what is in none; blocks of unequal counts stay separate."""
    members: dict[tuple[str, int | None, int], list[Block]] = {}
    sequence = blocks(graph)
    layers = layers_of([module_of(block) for block in sequence])
    known = [index for index, layer in enumerate(layers) if layer is not None]
    for index, (block, layer) in enumerate(zip(sequence, layers, strict=True)):
        name = "layer"
        if layer is None:
            name = WHOLE if not known else EMBEDDING if index < known[0] else HEAD if index > known[-1] else BETWEEN
        members.setdefault((name, layer, count_of(block)), []).append(block)
    for (name, layer, count), found in members.items():
        yield name, layer, count, tuple(found)


def _kind(block: Block) -> Hashable:
    """Key that is equal for matching blocks of different layers."""
    module = collapse(module_of(block))
    if isinstance(block, OutsideWork):
        return (module, block.kind, block.us)
    return (module, block.chosen.choice, block.chosen.fabric, block.chosen.estimate, block.baseline)


def _layers_name(layers: Sequence[int]) -> str:
    """`layers 0…4, 6`."""
    ranges: list[list[int]] = []
    for layer in sorted(set(layers)):
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    words = ", ".join(str(low) if low == high else f"{low}…{high}" for low, high in ranges)
    return f"layer {words}" if len(set(layers)) == 1 else f"layers {words}"
