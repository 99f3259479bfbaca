"""Timeline of a graph: its sites and the kernels between them in order, before and after rewriting.

A block is a site or a kernel outside the sites. Blocks follow one another; within a site, computation may hide
communication (negative terms). The rest of it is exposed: nothing else runs meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from weaveopt.records.candidate import Estimate, Term, stream_of
from weaveopt.records.report import Decision, GraphReport, OutsideWork
from weaveopt.records.task import Stream
from weaveopt.wording import counted

STREAMS = (Stream.COMPUTE, Stream.COMMUNICATION)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")

Block = Decision | OutsideWork


@dataclass(frozen=True)
class Times:
    """Predicted time of a piece of the model, and how much of it is exposed communication."""

    us: float = 0.0
    exposed_us: float = 0.0

    @property
    def exposed_share(self) -> float:
        return self.exposed_us / self.us if self.us else 0.0

    def __add__(self, other: Times) -> Times:
        return Times(self.us + other.us, self.exposed_us + other.exposed_us)

    def __mul__(self, times: float) -> Times:
        return Times(times * self.us, times * self.exposed_us)


@dataclass(frozen=True)
class Span:
    """One term on one stream, in microseconds from the start of the timeline."""

    name: str
    stream: Stream
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def title(graph: GraphReport) -> str:
    """`prefill, 512 tokens`; the phase alone where no token count is known."""
    return f"{graph.phase}, {counted(graph.tokens, 'token')}" if graph.tokens else graph.phase


def blocks(graph: GraphReport) -> tuple[Block, ...]:
    """Sites and kernels in the order of the graph."""
    found: list[Block] = []
    for number in range(len(graph.decisions) + 1):
        last = number == len(graph.decisions)
        found.extend(w for w in graph.work if (w.after >= number if last else w.after == number))
        found.extend(graph.decisions[number : number + 1])
    return tuple(found)


def layers_of(modules: Sequence[str]) -> tuple[int | None, ...]:
    """Return the layer of each module path, in graph order; None outside the layers.

    A kernel without a module path (an empty one) that runs between two layers, or inside one, belongs to the layer
    before it.
    """
    found = [_LAYER.search(module) for module in modules]
    layers = [None if match is None else int(match[1]) for match in found]
    last = max((index for index, layer in enumerate(layers) if layer is not None), default=-1)
    before: int | None = None
    for index in range(last):
        if layers[index] is not None:
            before = layers[index]
        elif not modules[index]:
            layers[index] = before
    return tuple(layers)


def count_of(block: Block) -> int:
    """Places of the whole model that a block stands for."""
    return block.count if isinstance(block, OutsideWork) else block.site.count


def module_of(block: Block) -> str:
    return block.module if isinstance(block, OutsideWork) else block.site.module


def estimate_of(block: Block, fused: bool) -> Estimate | None:
    """Estimate before (`fused` False) or after rewriting; None if nothing was estimated."""
    if isinstance(block, OutsideWork):
        return Estimate((Term(block.kind, block.us),))
    return block.chosen.estimate if fused else block.baseline


def times_of(block: Block, fused: bool) -> Times:
    estimate = estimate_of(block, fused)
    return Times() if estimate is None else Times(estimate.us, estimate.exposed_us)


def total(graph: GraphReport, fused: bool) -> Times:
    """Sum over all blocks, each multiplied by the places of the model that it stands for.

    Where a variant of the graph runs, whose work overlaps between sites: the time of the captured graph before, and of
    the variant's timeline after, each multiplied by the share of the model that was captured.
    """
    summed = sum((times_of(block, fused) * count_of(block) for block in blocks(graph)), Times())
    running = next((each for each in graph.variants[1:] if each.name == graph.variant), None)
    if running is None or running.predicted_us is None or graph.variants[0].baseline_us is None:
        return summed
    once_us = sum(times_of(block, fused=False).us for block in blocks(graph))
    every_us = sum(times_of(block, fused=False).us * count_of(block) for block in blocks(graph))
    scale = every_us / once_us if once_us else 1.0
    if fused:
        return Times(running.predicted_us, running.exposed_us or 0.0) * scale
    us = graph.variants[0].baseline_us * scale
    return Times(us, min(summed.exposed_us, us))


def unrolled(graph: GraphReport) -> Iterator[tuple[Block, int]]:
    """Blocks in the order of the whole model, each with its repetition.

    Neighbours that stand for n layers are one piece, run n times.
    """
    for count, piece in groupby(blocks(graph), key=count_of):
        repeated = tuple(piece)
        for repetition in range(count):
            for block in repeated:
                yield block, repetition


def spans_of(sequence: Iterable[tuple[Block, int]], fused: bool) -> Iterator[tuple[Block, int, Span]]:
    """Every term of the blocks (each with its repetition), one block after the other, from 0 on."""
    start_us = 0.0
    for block, repetition in sequence:
        estimate = estimate_of(block, fused)
        if estimate is not None:
            for span in spans(estimate, start_us):
                yield block, repetition, span
            start_us += estimate.us


def spans(estimate: Estimate, start_us: float) -> tuple[Span, ...]:
    """The terms one after the other; what overlaps (negative terms) moves communication under earlier computation.

    Where that is not enough, computation moves under earlier communication too. The last span then ends
    `estimate.us` after `start_us`, unless more is hidden than there is to hide it under.
    """
    placed, left_us = _placed(estimate, start_us, (Stream.COMMUNICATION,))
    return _placed(estimate, start_us, STREAMS)[0] if left_us > 1e-9 else placed


def _placed(estimate: Estimate, start_us: float, movable: tuple[Stream, ...]) -> tuple[tuple[Span, ...], float]:
    """The spans, where terms on the `movable` streams may start early, and what is still to be hidden."""
    hidden_us = -sum(term.us for term in estimate.terms if term.us < 0)
    ends_us = dict.fromkeys(STREAMS, start_us)
    placed: list[Span] = []
    for term in estimate.terms:
        if term.us <= 0:
            continue
        stream, now = stream_of(term.name), max(ends_us.values())
        if stream in movable and hidden_us > 0:
            earlier_us = min(hidden_us, now - ends_us[stream], term.us)
            now -= earlier_us
            hidden_us -= earlier_us
        placed.append(Span(term.name, stream, now, term.us))
        ends_us[stream] = now + term.us
    return tuple(placed), hidden_us
