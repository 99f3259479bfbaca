"""The steps without peers, for `weaveopt explain`: what would be rewritten on a machine that is not here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.fx as fx

from weaveopt import debug
from weaveopt.backend import DECIDE, REWRITE
from weaveopt.config import Config
from weaveopt.cost_model import Machine
from weaveopt.errors import ProfileError
from weaveopt.fabrics.topology import Topology
from weaveopt.inductor import seams
from weaveopt.inductor.seams import Compiled, GraphPass
from weaveopt.pipeline.agree import Agreed
from weaveopt.pipeline.compilation import Compilation, Step, made, run
from weaveopt.pipeline.context import Known
from weaveopt.records.report import GraphReport
from weaveopt.reporting import events
from weaveopt.rewrites import RULES
from weaveopt.rule import RuleSet

ALONE = (*DECIDE, Step("agree", lambda c: replace(c, agreed=Agreed(c.best, made(c.planned)))), REWRITE)
"""Nothing is compared with peers, and no memory is reserved."""


def rewritten_alone(
    module: fx.GraphModule, inputs: Sequence[object], graph_pass: GraphPass, config: Config, known: Known,
    rules: RuleSet = RULES, *, asks_sensitivity: bool = False,
) -> Compilation:  # fmt: skip
    """All steps on one graph. Every process group is taken to have the topology of `known`.

    Raises `ProfileError` for a profile that a rule cannot read: without peers it need not become a fallback.
    """
    start = Compilation(module, inputs, config, rules, graph_pass, known, asks_sensitivity=asks_sensitivity)
    return run(ALONE, start, debug.log_step, raised=(ProfileError,))


def returning_fakes(graph: fx.Graph) -> Compiled:
    """A compiled graph, as AOTAutograd calls it, that only returns the fake tensors of its outputs."""
    values = fx.map_arg(graph.output_node().args[0], lambda node: node.meta["val"])

    def run(arguments: list[object]) -> object:
        arguments.clear()
        return values

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def preview(
    config: Config,
    known: Topology,
    machine: Machine,
    sink: Callable[[GraphReport], None],
    rules: RuleSet = RULES,
    ask_sensitivity: bool = False,
) -> Compiled:
    """A backend that captures, decides and rewrites as `weave` does: no peers, no kernels.

    What it returns only makes outputs of the right shapes, so it is good for fake inputs alone. With `ask_sensitivity`
    the reports say what would change the choices.
    """
    debug.listen()

    def inner_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        done = rewritten_alone(
            module, inputs, GraphPass.of(arguments), config, Known(known, machine), rules,
            asks_sensitivity=ask_sensitivity,
        )  # fmt: skip
        events.log(done.report)
        sink(done.report)
        return returning_fakes(module.graph)

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> Compiled:
        return seams.compile_with(inner_compile, graph_module, example_inputs)

    return backend
