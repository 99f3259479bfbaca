"""`torch.compile(model, backend="weave")`: the steps in order, and then Inductor.

The steps sit where Inductor's own compile of one graph begins (`inner_compile`), so they see inference, forward and
backward graphs after AOTAutograd, on every compile. AOTAutograd's cache would skip them on a warm run and is off around
the call; Inductor's graph cache comes after them and keeps working.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch.fx as fx

from weaveopt import debug
from weaveopt.autotune.candidate_run import Make
from weaveopt.autotune.tune import tune
from weaveopt.autotune.verify import Verification
from weaveopt.config import Config, OptionValue, resolve
from weaveopt.errors import WeaveError
from weaveopt.inductor import seams
from weaveopt.inductor.seams import Compiled, GraphPass
from weaveopt.pipeline.agree import agree
from weaveopt.pipeline.bind import bind, count_calls, decides_again
from weaveopt.pipeline.capture import capture
from weaveopt.pipeline.choose import choose
from weaveopt.pipeline.compilation import (
    Compilation,
    Step,
    VariantState,
    in_order,
    made,
    of_each_variant,
    of_variants,
    run,
)  # fmt: skip
from weaveopt.pipeline.context import context
from weaveopt.pipeline.decide import decide
from weaveopt.pipeline.plan import plan
from weaveopt.pipeline.price import price
from weaveopt.pipeline.problem import ProblemTemplate
from weaveopt.pipeline.recognize import recognize
from weaveopt.pipeline.rewrite import rewrite
from weaveopt.pipeline.sensitivity import sensitivities
from weaveopt.pipeline.specialize import specialize
from weaveopt.pipeline.variants import variants
from weaveopt.reporting import registry
from weaveopt.rewrites import RULES
from weaveopt.rule import RuleSet


def _regime(c: Compilation, v: VariantState) -> VariantState:
    frame = ProblemTemplate(v.captured, v.sites, c.rules, c.context)
    regime, tokens = specialize(v.captured, frame, c.context)
    return replace(v, frame=frame, regime=regime, tokens=tokens)


def _choose(c: Compilation) -> Compilation:
    chosen = choose(c.decided, c.refused, c.regimes, c.context, c.timed)
    return replace(c, chosen=chosen, sensitivity=sensitivities(chosen.best, c.context) if c.asks_sensitivity else ())


RECOGNIZE = Step("recognize", of_each_variant(lambda c, v: replace(
    v, sites=recognize(v.captured, c.rules, c.context))))  # fmt: skip
OF_A_GRAPH = (
    Step("regime", of_each_variant(_regime)),
    Step("price", of_each_variant(lambda c, v: replace(v, priced=price(
        v.captured, made(v.frame), v.problem, c.context)))),
    Step("verify", of_each_variant(lambda c, v: v.verified(c.time, c.context)), is_asked=lambda c: c.time is not None),
    Step("decide", of_each_variant(lambda c, v: replace(v, decided=decide(made(v.priced), c.rules, c.context)))),
)  # fmt: skip
"""Steps that the captured graph and every variant take alike."""
DECIDE = (
    Step("capture", lambda c: c.with_captured(capture(c.module, c.name, c.graph_pass, c.inputs))),
    Step("context", lambda c: replace(c, found=context(c.graph, c.config, c.known)), always=True),
    RECOGNIZE,
    Step("tune", lambda c: replace(c, tuned=tune(c.graph, c.sites, c.rules, c.context, c.tunes)), always=True),
    *OF_A_GRAPH,
    Step("variants", lambda c: c.with_variants(variants(made(c.variants[0].decided), c.rules, c.context))),
    *of_variants((RECOGNIZE, *OF_A_GRAPH)),
    Step("time variants", lambda c: c.with_timed_variants(), is_asked=lambda c: c.time is not None),
    Step("choose", _choose),
    Step("plan", lambda c: replace(c, planned=plan(made(c.best), c.rules, c.context))),
)  # fmt: skip
"""Steps of every rank by itself, and of `preview`."""
REWRITE = Step("rewrite", lambda c: c if c.agreed.decided is None else replace(
    c, rewritten=rewrite(c.agreed.decided, c.agreed.planned, c.rules, c.context)))  # fmt: skip
TOGETHER = (
    Step("agree", lambda c: replace(c, agreed=agree(
        c.decided, None if c.fallbacks else c.best, c.rules, c.context, c.graph, c.failure)), always=True),
    REWRITE,
    Step("bind", lambda c: replace(c, not_bound=bind(
        c.agreed, c.agreed.failure or c.failure, c.context)), always=True),
)  # fmt: skip
"""Steps that ranks take together: those that share a site rewrite it alike, or leave it."""


def weave(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, OptionValue] | None = None,
    rules: RuleSet = RULES,
) -> Compiled:
    """The backend. `mode` is Inductor's; `options` holds weaveopt's (see `weaveopt.config`) and Inductor's.

    The first call of the compiled function raises a `WeaveError` (unknown option, ranks that disagree) as it is.
    """
    try:
        debug.listen()
        config = resolve(options, seams.known_options(), rules.names)
        entry, hooks = registry.open_entry(example_inputs, graph_module), rules.inductor_hooks()
        make, counted = partial(seams.compile_alone, hooks=hooks), set[str]()

        # Inductor's own signature: what it passes is passed on unchanged.
        def optimize_and_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
            done = optimize(module, inputs, GraphPass.of(arguments), config, entry, rules, make)
            compile_graph = partial(seams.compile_graph, module, inputs, arguments, hooks, entry.note(done.graph.name))
            compiled, done = in_order(done, compile_graph, partial(registry.correct, entry))
            counted.update(done.rewritten_groups)
            return compiled

        watched, patches = entry.watch(optimize_and_compile), seams.patches_for(mode, config)
        compiled = seams.compile_with(watched, graph_module, example_inputs, patches)
        return debug.watched(count_calls(compiled, sorted(counted), config.compile_timeout_s))
    except WeaveError as error:
        return seams.raising(error)


def optimize(
    module: fx.GraphModule, inputs: Sequence[object], graph_pass: GraphPass, config: Config, entry: registry.Entry,
    rules: RuleSet = RULES, make: Make = seams.compile_alone,
) -> Compilation:  # fmt: skip
    """All steps on one graph; `module` gets the rewritten graph, if any. `make` compiles what `verify` times."""
    asked = Verification(rules, make) if config.verify else None
    done = run(DECIDE, Compilation(module, inputs, config, rules, graph_pass, time=asked), debug.log_step)
    try:
        done = run(TOGETHER, done, debug.log_step)
    finally:
        if not (again := decides_again(done.not_bound)):
            registry.add(entry, done.report, done.context, made(done.found).stands_in_for, made(done.found).note)
    if again:  # without what was lost; every time one group fewer has it
        return optimize(module, inputs, graph_pass, config, entry, rules, make)
    if config.strict:
        done.raise_failure()
    if done.result is not None:
        module.graph = done.result
    return done
