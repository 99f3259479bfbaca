"""Reports of hand-written blocks, which no CLI can ask for: dynamic token counts with their regimes, FP8 linears."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.golden.compact import Record
from tests.graphs import forms, quantizations
from tests.graphs.preview import FORCED, previewed

HIDDEN, INNER = 4096, 512
WORLD = 4
TOKENS = (4, 512, 4096)
Block = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def record(block: Block, inputs: tuple[Tensor, Tensor], machine: str, *, dynamic: bool, forced: bool) -> Record:
    """The JSON report of one block on `WORLD` ranks. `dynamic`: token counts are symbols, other sizes numbers."""
    from weaveopt.records.report import Report
    from weaveopt.reporting.document import to_json

    device = "cpu" if machine == "cpu" else "cuda"
    graph = previewed(
        block, inputs, world=WORLD, machine=machine, device=device, static=not dynamic,
        force=FORCED if forced else (),
    )  # fmt: skip
    return dict(json.loads(to_json(Report("block", WORLD, None, (graph,)))))


def chain() -> Block:
    """Three sites in a row, in the sizes of a model's layers."""
    sizes = ((INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN,))
    product, after, norm = (torch.ones(*size, dtype=torch.bfloat16) for size in sizes)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total, hidden = residual, x
        for _ in range(3):
            total = total + forms.all_reduce(hidden @ product)
            hidden = forms.rms(total, norm) @ after
        return (hidden,)

    return block


def cases() -> Iterator[tuple[str, Callable[[], Record]]]:
    """Names, and what makes the report."""
    for machine in ("h200x4", "h100x8", "a100x4-slingshot", "cpu"):
        for tokens in TOKENS:
            inputs = tuple(torch.zeros(1, tokens, size, dtype=torch.bfloat16) for size in (INNER, HIDDEN))
            name = f"block:chain, any number of tokens, {tokens} first, {machine}"
            yield name, _later(chain(), inputs, machine, dynamic=True, forced=False)
    weights = forms.make_weights(torch.bfloat16)
    small = tuple(torch.zeros(2, 8, size, dtype=torch.bfloat16) for size in (forms.INNER, forms.HIDDEN))
    named = [(form.__name__, form) for form in forms.FORMS]
    named += [(f"fp8 {case.quantize.__name__}", quantizations.block(case.quantize)) for case in quantizations.CASES]
    named += [("fp8 chain", quantizations.chain(quantizations.torchao_rows))]
    named += [(f"fp8 left {index}", form) for index, (form, _) in enumerate(quantizations.LEFT)]
    for name, form in named:

        def block(x: Tensor, residual: Tensor, form: quantizations.Form = form) -> tuple[Tensor, ...]:
            return form(weights, x, residual)

        dynamic = name.startswith("fp8")
        yield f"block:{name}, forced, h200x4", _later(block, small, "h200x4", dynamic=dynamic, forced=True)


def _later(
    block: Block, inputs: tuple[Tensor, ...], machine: str, *, dynamic: bool, forced: bool
) -> Callable[[], Record]:
    return lambda: record(block, (inputs[0], inputs[1]), machine, dynamic=dynamic, forced=forced)
