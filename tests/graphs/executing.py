"""A backend for tests: all steps for real, then the rewritten graph as it is, without Inductor's code generation.

It shows what the rewrite and the kernels compute at a tenth of the compile time; a few tests go through Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.fx as fx
from functorch.compile import make_boxed_func

from weaveopt import cost_model
from weaveopt.autotune.candidate_run import Call, Make
from weaveopt.backend import optimize
from weaveopt.config import Config
from weaveopt.fabrics import topology
from weaveopt.inductor import seams as inductor
from weaveopt.pipeline.bind import compiling, count_calls
from weaveopt.pipeline.context import Known
from weaveopt.pipeline.specialize import guard
from weaveopt.preview import rewritten_alone
from weaveopt.records.report import GraphReport
from weaveopt.reporting import registry
from weaveopt.rewrites import RULES
from weaveopt.rule import RuleSet

FORCED = Config(
    force=("all_reduce_rms_norm", "causal_attention", "moe_fused"), strict=True, timeout_s=30.0, compile_timeout_s=60.0,
    max_tokens=4096,
)  # fmt: skip
"""Rewrite wherever it is allowed, whatever the model predicts; any failing step is an error. Graphs of symbolic sizes
are decided for fewer token counts than users ask for, which takes a part of the time."""


Backend = Callable[[Config, list[GraphReport]], Callable[..., object]]
"""Makes a Dynamo backend that appends the reports of its graphs."""


def as_it_is(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Call:
    """Makes a call that runs the graph node by node."""
    return lambda values: module(*values)


def executing(
    config: Config, reports: list[GraphReport], rules: RuleSet = RULES, make: Make = as_it_is, tunes: bool = False
) -> Callable[..., object]:
    """A dynamo backend; the reports of its graphs are appended to `reports`. `make` is for what `verify` times.

    Without `tunes` profiles decide, whose numbers are the same everywhere.
    """
    config = config if tunes else replace(config, tune_budget_s=0.0)

    groups: set[str] = set()

    def inner_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        entry = registry.open_entry(())
        done = optimize(module, inputs, inductor.GraphPass.of(arguments), config, entry, rules, make)
        with compiling(done.agreed, done.context):
            guard(done.graph, done.report.regime, done.numbers)
        groups.update(done.rewritten_groups)
        reports.extend(entry.graphs)
        return make_boxed_func(module.forward)

    def weave(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> object:
        compiled = inductor.compile_with(inner_compile, graph_module, example_inputs)
        return count_calls(compiled, sorted(groups), config.compile_timeout_s)

    return weave


@dataclass
class OneOf:
    """Configurations by each of which the same captured graphs are rewritten: a model that is traced once runs one."""

    configs: tuple[Config, ...]
    reports: tuple[list[GraphReport], ...]
    """Reports of all graphs, by configuration."""
    current: int = 0
    """The configuration whose graphs run."""


def executing_alone(config: Config, reports: list[GraphReport], world: int) -> Callable[..., object]:
    """`executing` in a group of equal ranks (`tests/ranks/simulated.py`), which has no peers to agree with."""
    return executing_one_of(OneOf((config,), (reports,)), world)


def executing_one_of(ways: OneOf, world: int) -> Callable[..., object]:
    """`executing_alone` by several configurations."""

    def inner_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        known = Known(topology.fake(world), cost_model.load("cpu"))
        modules = []
        for config, reports in zip(ways.configs, ways.reports, strict=True):
            done = rewritten_alone(module, inputs, inductor.GraphPass.of(arguments), config, known)
            assert done.report.fallbacks == ()
            reports.append(done.report)
            modules.append(module if done.result is None else fx.GraphModule(module, done.result))
        return make_boxed_func(lambda *values: modules[ways.current](*values))

    def weave(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> object:
        return inductor.compile_with(inner_compile, graph_module, example_inputs)

    return weave


@contextmanager
def without_code() -> Iterator[None]:
    """The backend `weave`, by its name, does all but have Inductor write code: its graphs run node by node."""
    with mock.patch.object(inductor, "compile_graph", lambda module, *_, **__: make_boxed_func(module.forward)):
        yield
