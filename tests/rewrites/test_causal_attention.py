"""The rule `causal_attention`: every form of attention by every kernel that may compute it, against eager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from tests.graphs.attention_graphs import (
    As,
    Compute,
    Ran,
    Sizes,
    attend,
    attend_written,
    bias,
    ran_each,
    rows,
    rules_of,
    seen,
)
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.records.candidate import LEAVE
from weaveopt.rewrites.causal_attention.candidates import FORMS, RULE

WEAVE = torch.ops.weave
INF = float("-inf")
LEAST = torch.finfo(torch.bfloat16).min
SQUARE = Sizes()
CHUNK = Sizes(queries=8)
"""Eight new tokens after sixteen that the cache holds."""
ROOM = Sizes(keys=40)
"""A static cache that is longer than the prompt."""
CHUNK_IN_ROOM = Sizes(queries=8, keys=40)
MLA = Sizes(kv_heads=4, head_dim=24)
ONE_KEY_HEAD = Sizes(kv_heads=1)

NO_CUDNN = {"cudnn": "mask_not_supported", "cpu": "mask_not_supported"}
NO_LIBRARY = {**NO_CUDNN, "flash": "mask_not_supported"}
NOT_KNOWN = dict.fromkeys(("flash", "cudnn", "cpu"), "mask_not_known")
NOT_REPEATED = {"grouped": "not_repeated"}
OWN_SCORES = {**dict.fromkeys(("flash", "cudnn", "cpu"), "scores_changed"), **NOT_REPEATED}


@dataclass(frozen=True)
class Case:
    name: str
    sizes: Sizes
    compute: Compute
    mask: str
    """As the site is described."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Form -> code; the others compute it."""
    more: tuple[Tensor, ...] = ()
    """Inputs other than query, key and value."""


def _left_padded() -> Tensor:
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, :5] = False
    return mask


def _documents() -> Tensor:
    return torch.tensor([[0] * 10 + [1] * 14, [0] * 3 + [1] * 9 + [2] * 12])


def _masked(q: Tensor, k: Tensor, v: Tensor, **which: int) -> Tensor:
    return attend(q, k, v, seen(q.shape[2], k.shape[2], **which))


def _added(q: Tensor, k: Tensor, v: Tensor, never: float) -> Tensor:
    return attend(q, k, v, bias(seen(24, 24), q.dtype, never))


def _interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return rows(F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True))


def _of_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return rows(F.scaled_dot_product_attention(q, k, v, seen(24, 24), enable_gqa=True))


def _scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return rows(F.scaled_dot_product_attention(q, k, v, seen(24, 24), scale=0.7, enable_gqa=True))


def _broadcast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """No kernel of the library takes one key head for all: torch writes it out."""
    return rows(F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale))


def _padded(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return attend(q, k, v, seen(24, 24) & padding[:, None, None])


def _packed(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    return attend(q, k, v, seen(24, 24) & (document[:, None, :, None] == document[:, None, None]))


def _hidden(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """The mask says what is hidden, not what is seen."""
    return attend(q, k, v, torch.zeros(24, 24, dtype=q.dtype).masked_fill(hidden[:, None, None], INF))


def _written(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, softcap: float = 0.0) -> Tensor:
    return attend_written(q, k, v, bias(seen(24, 24), q.dtype, LEAST), sinks, softcap)


CASES = (
    Case("no_mask", SQUARE, attend, ""),
    Case("is_causal", SQUARE, lambda q, k, v: attend(q, k, v, causal=True), "causal"),
    Case("booleans", SQUARE, _masked, "causal"),
    Case("added_infinity", SQUARE, lambda q, k, v: _added(q, k, v, INF), "causal"),
    Case("added_least", SQUARE, lambda q, k, v: _added(q, k, v, LEAST), "causal"),
    Case("second_chunk", CHUNK, lambda q, k, v: _masked(q, k, v, offset=16), "causal offset=16", NO_CUDNN),
    Case("one_query", Sizes(queries=1), lambda q, k, v: _masked(q, k, v, offset=23), "none"),
    Case("one_query_in_a_window", Sizes(queries=1), lambda q, k, v: _masked(q, k, v, offset=23, window=5),
         "window offset=23 window=5", NO_CUDNN),
    Case("window", SQUARE, lambda q, k, v: _masked(q, k, v, window=5), "window window=5", NO_CUDNN),
    Case("window_second_chunk", CHUNK, lambda q, k, v: _masked(q, k, v, offset=16, window=5),
         "window offset=16 window=5", NO_CUDNN),
    Case("chunked", SQUARE, lambda q, k, v: _masked(q, k, v, chunk=8), "chunked chunk=8", NO_LIBRARY),
    Case("room", ROOM, _masked, "causal filled=24"),
    Case("room_second_chunk", CHUNK_IN_ROOM, lambda q, k, v: _masked(q, k, v, offset=16),
         "causal offset=16 filled=24", NO_CUDNN),
    Case("room_window", ROOM, lambda q, k, v: _masked(q, k, v, window=7), "window window=7 filled=24", NO_CUDNN),
    Case("padding", SQUARE, _padded, "read at run time", NOT_KNOWN, (_left_padded(),)),
    Case("packed", SQUARE, _packed, "read at run time", NOT_KNOWN, (_documents(),)),
    Case("hidden", SQUARE, _hidden, "read at run time", NOT_KNOWN, (torch.arange(24).expand(2, 24) % 5 == 1,)),
    Case("interleaved", SQUARE, _interleaved, "causal"),
    Case("groups", SQUARE, _of_groups, "causal", NOT_REPEATED),
    Case("scale", SQUARE, _scaled, "causal", NOT_REPEATED),
    Case("written", SQUARE, _written, "causal", NOT_REPEATED),
    Case("soft_cap", SQUARE, lambda q, k, v: _written(q, k, v, softcap=5.0), "causal", OWN_SCORES),
    Case("sinks", SQUARE, _written, "causal", OWN_SCORES, (torch.linspace(-2.0, 2.0, 4).bfloat16(),)),
    Case("one_key_head", ONE_KEY_HEAD, _broadcast, "causal", NOT_REPEATED),
    Case("one_key_head_scaled", ONE_KEY_HEAD,
         lambda q, k, v: _broadcast(q, k, v, bias(seen(24, 24), q.dtype, LEAST), 0.7), "causal", NOT_REPEATED),
    Case("one_key_head_padded", ONE_KEY_HEAD,
         lambda q, k, v, padding: _broadcast(q, k, v, seen(24, 24) & padding[:, None, None]), "read at run time",
         {**NOT_KNOWN, **NOT_REPEATED}, (_left_padded(),)),
    Case("values_of_another_size", MLA, _written, "causal",
         {**NOT_REPEATED, "flash": "head_size", "cpu": "head_size"}),
)  # fmt: skip
EVERY_FORM = tuple((machine, form.value) for machine, device in (("h200x4", "cuda"), ("cpu", "cpu"))
                   for form in FORMS[device])  # fmt: skip
MACHINES = ("h200x4", "cpu")


def _hides_by_tensor(call: fx.Node) -> bool:
    return call.kwargs.get("attn_mask") is not None


def _rewritten_as(form: str, found: Ran) -> None:
    """The operators that a form of the rule stands for are in the graph, and no others."""
    library, masked = found.count(WEAVE.library_attention.default), found.count(WEAVE.masked_attention.default)
    kept = [node for node in found.graph.nodes if "_scaled_dot_product" in str(node.target)]
    # On CPU ranks the operator that is there takes other arguments; of attention that was written out none is there.
    in_place = form == "grouped" or (form == "cpu" and not library)
    assert (library, masked) == (form in ("flash", "cudnn", "cpu") and not in_place, form == "masked"), form
    assert len(kept) == in_place and (form != "cpu" or not in_place or not any(map(_hides_by_tensor, kept)))
    reads = dict(found.chosen.parameters).get("reads_mask", False)
    assert found.count(WEAVE.key_ranges.default) == bool(reads)
    calls = [node for node in found.graph.nodes if node.target is WEAVE.library_attention.default]
    assert all(call.args[-1] == form for call in calls)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_form_by_every_kernel(case: Case) -> None:
    """Each kernel gives eager's result, or the site says why it does not serve; of all, the cheapest is taken."""
    operands = (*case.sizes.operands(torch.bfloat16), *case.more)
    ways = [*(As(machine, rules_of(form)) for machine, form in EVERY_FORM), *map(As, MACHINES)]
    with torch.no_grad():
        want = case.compute(*operands)
    found = ran_each(case.compute, operands, ways)
    for (_, form), one in zip(EVERY_FORM, found, strict=False):
        assert_close(one.result, want, KERNEL, f"{case.name} by {form}")
        assert one.decision.site.rejections == () and one.report.fallbacks == ()
        if case.mask:
            assert f"mask ({case.mask})" in one.decision.site.description
        if form in case.refused:
            assert one.codes == {form: [case.refused[form]]} and one.chosen.choice == LEAVE
        else:
            assert (one.chosen.choice, one.chosen.variant) == (RULE, form), one.codes
            _rewritten_as(form, one)
    for machine, every in zip(MACHINES, found[len(EVERY_FORM) :], strict=True):
        alone = {form: one for (at, form), one in zip(EVERY_FORM, found, strict=False) if at == machine}
        _is_cheapest(every, alone, case.refused)


def _is_cheapest(every: Ran, alone: Mapping[str, Ran], refused: Mapping[str, str]) -> None:
    """The whole rule chooses the cheapest of its forms, and computes what that form computes alone."""
    allowed = {form: one for form, one in alone.items() if form not in refused}
    assert set(every.codes) == set(alone) - {every.chosen.variant}
    if not allowed:
        assert every.chosen.choice == LEAVE
        return
    predicted = {form: one.chosen.estimate.us for form, one in allowed.items()}  # type: ignore[union-attr]
    assert predicted[every.chosen.variant] == min(predicted.values())
    assert torch.equal(every.result, allowed[every.chosen.variant].result)


def test_each_form_serves_some_case() -> None:
    """And each is refused somewhere: here, or where dtypes are."""
    every = {form for _, form in EVERY_FORM}
    assert {form for case in CASES for form in every if form not in case.refused} == every
    assert {form for case in CASES for form in case.refused} == every - {"masked"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    """The GPU's kernels take halves; the CPU's takes what there is."""
    operands = SQUARE.operands(dtype)
    want = _masked(*operands)
    ways = [As(machine, rules_of(form)) for machine, form in EVERY_FORM]
    for (_, form), found in zip(some(EVERY_FORM), ran_each(_masked, operands, ways), strict=True):
        assert_close(found.result, want, KERNEL, form)
        if dtype is torch.float32 and form in ("flash", "cudnn", "masked"):
            assert found.codes == {form: ["dtype_not_supported"]}
        else:
            assert found.chosen.variant == form


@pytest.mark.parametrize(("head", "value", "refused"), [
    (128, 128, ()), (256, 256, ("cudnn",)), (20, 20, ("flash", "cudnn")), (192, 128, ("flash",)),
    (264, 264, ("flash", "cudnn", "masked")),
])  # fmt: skip
def test_head_sizes(head: int, value: int, refused: tuple[str, ...]) -> None:
    sizes = Sizes(1, 2, 1, 4, 4, head, value)
    forms = ("flash", "cudnn", "masked")

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_written(q, k, v, bias(seen(4, 4), q.dtype, LEAST))

    operands = sizes.operands(torch.bfloat16)
    for form, found in zip(forms, ran_each(compute, operands, [As("h200x4", rules_of(f)) for f in forms]), strict=True):
        assert found.codes.get(form, []) == (["head_size"] if form in refused else [])
        assert_close(found.result, compute(*operands), KERNEL, form)
