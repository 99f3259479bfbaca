"""Rule `token_split`: tokens in parts, so that one part's collectives run under the computation of the others.

    x = all_reduce(partial(x)); x = layer(x); ...        # [tokens, hidden]
    a, b = x[:cut], x[cut:]                              # all_reduce(a) while layer(b), all_reduce(b) while layer(a)

TokenWeave, section 4.1, A.2 and A.3: there for three models edited by hand and run eagerly, here for any graph. The
collectives stay the library's, which are asynchronous; the order of the graph is what has to be kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from weaveopt.graph.values import argument
from weaveopt.records.candidate import Rejection, Scalar, Values
from weaveopt.rewrites.token_split.axis import BATCH, SEQUENCE, TokenAxis, token_axes
from weaveopt.rewrites.token_split.cuts import JudgedCut, judged, pays, turning_points
from weaveopt.rewrites.token_split.interpreter import Join
from weaveopt.rewrites.token_split.split import SplitGraph, split
from weaveopt.rewrites.token_split.values import Cut
from weaveopt.rule import CapturedGraph, Context, Exposure
from weaveopt.sites.attention.matcher import AttentionMatcher
from weaveopt.sites.mixture.matcher import MixtureMatcher

FORM = "library"
"""Whose collectives run concurrently with the other parts' computation."""
LEAST_SYMBOLIC = 4
"""Least symbolic length that is cut: torch makes guards of sizes that are 1, and would compile for those alone."""
_NEEDS_OTHER = {
    "barrier": "a part needs the other parts' tokens in every layer",
    "mask_not_proven": "attention may read keys of later parts: the mask is not proven to be causal",
    "cache_form_not_known": "attention reads a cache whose form is not known, so a part waits for all keys",
}


@dataclass(frozen=True)
class TokenSplit:
    """See the module's docstring."""

    axes: tuple[str, ...] = (SEQUENCE, BATCH)
    """Axes that may be cut."""
    name: str = "token_split"

    def variants(self, captured: CapturedGraph, exposure: Exposure, context: Context) -> Sequence[CapturedGraph]:
        """One variant for each token axis, cut where the schedule of its stages is shortest; or the reason why none."""
        forced = self.name in context.config.force
        why = self._against(captured, exposure, context, forced)
        axes = () if why else tuple(axis for axis in token_axes(captured.graph) if axis.name in self.axes)
        if why is None and not axes:
            why = Rejection("no_token_axis", "no input of the graph has the tokens that it exchanges")
        able = [axis for axis in axes if axis.hint >= (2 if isinstance(axis.length, int) else LEAST_SYMBOLIC)]
        if why is None and not able:
            lengths: Values = tuple((axis.name, axis.hint) for axis in axes)
            why = Rejection("few_tokens", "no axis of the tokens is long enough to be cut", lengths)
        cuts = [] if why else judged(able, exposure, context.machine)
        if why is None and not forced:
            why = self._no_saving(cuts, exposure, context)
        if why is not None:
            return (replace(captured, variant=self.name, rejections=(why,)),)
        turns = () if forced else turning_points(cuts[0], exposure, context.machine)
        matchers = (AttentionMatcher(), MixtureMatcher())
        sites = [found for matcher in matchers for found in matcher.find(captured.graph, context)]
        best: dict[str, JudgedCut] = {}
        for each in cuts:
            best.setdefault(each.axis.name, each)
        return tuple(
            self._variant(captured, each, split(captured.graph, each.cut, each.axis.seeds, sites), turns)
            for each in best.values()
        )

    def _against(self, captured: CapturedGraph, exposure: Exposure, context: Context, forced: bool) -> Rejection | None:
        """Reasons that are known from the captured graph alone."""
        if captured.phase in ("forward", "backward"):
            return Rejection("saved_for_backward", "the backward pass reads what the graph saves of all tokens")
        drawn = [node for node in captured.graph.nodes if _draws(node)]
        if len(drawn) > 1:
            values: Values = (("first", drawn[0].name), ("draws", len(drawn)))
            return Rejection("random_order", "random numbers would be drawn in another order", values)
        if forced:
            return None
        if captured.symbolic_tokens is not None:
            message = (
                "the graph serves many token counts, and splits pay at some: compile with dynamic=False, or force it"
            )
            return Rejection("symbolic_tokens", message)
        if exposure.us <= 0.0:
            return Rejection("nothing_exposed", "no communication of the graph is exposed")
        if exposure.total_us is None:
            return Rejection("not_priced", "what the graph runs could not be priced")
        error = context.machine.relative_error
        if exposure.us <= error * (exposure.total_us - exposure.us):
            values = (("exposed_us", round(exposure.us, 2)), ("graph_us", round(exposure.total_us, 2)))
            message = "less communication is exposed than the model's own error: hiding all of it would not show"
            return Rejection("nothing_exposed", message, values)
        return None

    def _no_saving(self, cuts: Sequence[JudgedCut], exposure: Exposure, context: Context) -> Rejection | None:
        """The reason why no cut pays, where the schedule of its stages alone shows it."""
        assert exposure.total_us is not None, "a graph that was not priced is not judged"
        error, best = context.machine.relative_error, cuts[0]
        values: tuple[tuple[str, Scalar], ...] = (
            ("captured_us", round(exposure.total_us, 2)), ("predicted_us", round(best.upper_us, 2)),
            ("cut", written(best.cut)),
        )  # fmt: skip
        if pays(best, exposure, context.machine):
            return None
        values = (*values, *turning_points(best, exposure, context.machine))
        if exposure.total_us - best.us > error * best.us:
            message = (
                "it saves only by work that runs at once, and how much that slows each other down was not measured"
            )
            return Rejection("not_measured", message, (*values, ("ideal_us", round(best.us, 2))))
        return Rejection("no_saving", "the predicted saving does not exceed the model's own error", values)

    def _variant(
        self, captured: CapturedGraph, judged_cut: JudgedCut, made: SplitGraph, turns: tuple[tuple[str, Scalar], ...]
    ) -> CapturedGraph:
        axis, cut = judged_cut.axis, judged_cut.cut
        parameters: tuple[tuple[str, Scalar], ...] = (("cut", written(cut)), ("form", FORM), *turns)
        joined = Counter(join.code for join in made.joins)
        if joined:
            where = ", ".join(f"{join.node} ({join.module})" for join in made.joins[:4])
            parameters = (*parameters, ("joined", sum(joined.values())), ("joined_at", where))
        variant = replace(captured, variant=variant_name(self.name, axis), parameters=parameters)
        why = _needs_others(made)
        if why is not None:
            return replace(variant, rejections=(why,))
        return replace(variant, graph=made.graph, order=made.order)


def _draws(node: fx.Node) -> bool:
    """True if a node draws random numbers from a generator; attention does only where it drops weights."""
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return is_op and torch.Tag.nondeterministic_seeded in node.target.tags and argument(node, "dropout_p") != 0  # type: ignore[union-attr]


def variant_name(rule: str, axis: TokenAxis) -> str:
    return f"{rule} by {axis.name}"


def written(cut: Cut) -> str:
    """`sequence: 2176 + 1920 of 4096`."""
    parts = [cut.part(index) for index in range(cut.num_parts)]
    return f"{cut.name}: {' + '.join(map(str, parts))} of {cut.length}"


def _needs_others(made: SplitGraph) -> Rejection | None:
    """The reason why most collectives of the first part wait for another part's: nothing would run under them."""
    if not made.num_collectives:
        return Rejection("no_token_axis", "no collective of the graph has tokens in parts")
    if 2 * len(made.late) < made.num_collectives or not made.joins:
        return None
    first: Join = next((join for join in made.joins if join.code != "barrier"), made.joins[0])
    values: Values = (
        ("node", first.node), ("module", first.module), ("waiting", len(made.late)),
        ("collectives", made.num_collectives),
    )  # fmt: skip
    return Rejection(first.code, _NEEDS_OTHER[first.code], values)
