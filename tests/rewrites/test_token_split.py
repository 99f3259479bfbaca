"""Token splits of families: the graph in parts computes what the captured one does, and exchanges in turns.

One family of each archetype; with `make test-all` every family, and archetypes with every cache and mask. Tokens that
split graphs generate are compared with eager's where every family generates: `tests/test_models.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weaveopt
from tests.graphs import forms
from tests.graphs.models import FAMILIES, VOCABULARY, Family, load, one_layer, save
from tests.graphs.nonempty import some
from tests.graphs.split_graphs import BATCH, LENGTH, WORLD, Call, Compared, call_of, compared
from tests.ranks import run_ranks
from tests.ranks.simulated import TEST_ALL, equal_ranks

ARCHETYPES = ("llama", "gemma2", "gemma3_text", "mixtral", "deepseek_v3", "gpt_oss-ep")
"""Families, by id: dense, attention written out with soft caps, sliding windows, a mixture, keys and values of other
sizes, a mixture sharded by experts with sinks."""
IN_PARTS = (*ARCHETYPES, "phi3", "gpt_oss")
"""And one whose products are taken apart, and a mixture whose layers are whole on every rank: only the embedding is
summed."""
TWO_LAYERS = tuple((name, kind) for name in ("llama", "gpt_oss-ep") for kind in ("none", "grown", "static"))
"""Families, by id, and kinds that are tested with both layers: windows and full attention, or what joins layers."""
KINDS = {
    "llama": ("grown", "static", "padded", "last"), "gemma2": ("padded",), "gemma3_text": ("grown", "static"),
    "deepseek_v3": ("grown", "static"), "gpt_oss-ep": ("grown", "static"),
}  # fmt: skip
"""Caches, masks and logits that are asked for, by family's id, where they make a graph of another structure."""
if TEST_ALL:
    KINDS = dict.fromkeys(ARCHETYPES, KINDS["llama"])
WAITS = {
    ("deepseek_v3", "grown"): "cache_form_not_known",
    ("deepseek_v3", "static"): "cache_form_not_known",
    ("gemma2", "padded"): "mask_not_proven",
    ("gpt_oss-ep", "static"): "cache_form_not_known",
}
"""Why a part of the sequence waits for all keys, which is right and hides nothing. DeepSeek caches latents, from which
it computes keys; a padded query of Gemma 2 that sees no key takes the mean of all values. A window of gpt-oss has its
mask from a number in the graph and writes where a counter says, and nothing proves them equal."""
FORCED: dict[str, Any] = {
    "backend": "weave", "dynamic": False, "options": {"force": ["token_split"], "strict": True}
}  # fmt: skip
ONE_COLLECTIVE = ("gpt_oss",)
"""Families, by id, whose graph has only the embedding's all-reduce."""


def _compared(family: Family, kind: str, path: Path, parts: tuple[int, ...] = (2,)) -> list[Compared]:
    family = family if (family.id, kind) in TWO_LAYERS else one_layer(family)
    save(family, str(path))
    with equal_ranks(WORLD):
        with torch.no_grad():
            call = call_of(load(family, str(path), WORLD), kind)
        return compared(call, parts)


def _problems(found: list[Compared], family: Family) -> list[str]:
    """Differences, and dependencies that keep parts from running while others exchange."""
    problems = [f"{each.axis} in {each.num_parts}: {text}" for each in found for text in each.differences]
    for each in found:
        name, order = f"{each.axis} in {each.num_parts}", each.made.order
        starts = each.made.num_collectives * each.num_parts
        pairs = sum(min(each.num_parts - 1, starts - 1 - at) for at in range(starts))
        if len(order.pairs) != pairs:
            problems.append(f"{name}: {len(order.pairs)} pairs of wait and start, not {pairs}")
        if each.made.late:
            problems.append(f"{name}: {each.made.late} wait for a later part: {each.made.joins}")
        if family.id not in ONE_COLLECTIVE and len(each.sites) != each.num_parts * len(each.before):
            problems.append(f"{name}: {len(each.sites)} sites of {len(each.before)}")
        known = [site.site.rejections for site in each.before]
        problems += [f"{name}: {r.code}" for site in each.sites for r in site.site.rejections if not any(known)]
    return problems


@pytest.mark.parametrize(
    "family", [each for each in FAMILIES if TEST_ALL or each.id in IN_PARTS], ids=lambda family: family.id
)
def test_family_in_parts_computes_the_same(family: Family, tmp_path: Path) -> None:
    """Cuts by sequence and by batch, of odd lengths, one family of each kind in three parts too; each part has every
    site. The first half of a sequence has its own keys alone, the second one all of them: both masks are causal."""
    parts = (2, 3) if family.id in ARCHETYPES else (2,)
    found = _compared(family, "none", tmp_path, parts)
    wanted = [(axis, num) for axis in ("sequence", "batch") for num in parts]
    assert [(each.axis, each.num_parts) for each in found] == wanted
    assert _problems(found, family) == []
    if family.id == "llama":
        masks = [dict(site.site.facts)["mask"] for site in some(found[0].sites)]
        assert masks == ["causal", "causal offset=5"] * 2


@pytest.mark.parametrize(
    ("family", "kind"),
    [(each, kind) for each in FAMILIES for kind in KINDS.get(each.id, ())],
    ids=lambda value: value.id if isinstance(value, Family) else value,
)
def test_family_with_caches_and_masks_computes_the_same(family: Family, kind: str, tmp_path: Path) -> None:
    found = _compared(family, kind, tmp_path)
    assert [each.axis for each in found] == ["sequence", "batch"]
    why = WAITS.get((family.id, kind))
    if why is not None:
        by_sequence = found.pop(0)
        assert by_sequence.differences == [] and by_sequence.made.late
        assert why in {join.code for join in by_sequence.made.joins}
    assert _problems(found, family) == []


def test_packed_positions_by_batch(tmp_path: Path) -> None:
    """Positions that are an input prove no mask: by sequence a half waits for the other one's keys, and is right."""
    llama = next(each for each in FAMILIES if each.id == "llama")
    by_sequence, by_batch = _compared(llama, "packed", tmp_path)
    assert by_sequence.differences == [] and by_batch.differences == []
    assert {join.code for join in by_sequence.made.joins} == {"mask_not_proven"} and by_sequence.made.late
    assert not by_batch.made.late


def test_symbolic_length(tmp_path: Path) -> None:
    """The cut is an expression of the length, for every length that the graph serves."""
    llama = one_layer(next(each for each in FAMILIES if each.id == "llama"))
    save(llama, str(tmp_path))
    with equal_ranks(WORLD):
        with torch.no_grad():
            call = call_of(load(llama, str(tmp_path), WORLD), "none")
        by_sequence = compared(call, dynamic=True)[0]
    assert by_sequence.axis == "sequence" and by_sequence.differences == [] and not by_sequence.made.late


def _sunk(ids: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    """Causal attention, scaled by a sink that its scores give besides, as Granite's with windows is."""
    x = forms.all_reduce(torch.nn.functional.embedding(ids, table))
    places = torch.arange(ids.shape[1])
    bias = torch.where(places[None, :] <= places[:, None], 0.0, float("-inf"))
    for _ in range(2):
        query, key, value = (x @ weight).unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, 1)
        scores = query @ key.transpose(-1, -2) * 0.3 + bias
        attended = scores.softmax(-1) @ value * (scores.logsumexp(-1) - 0.5).sigmoid()[..., None]
        x = x + forms.all_reduce(attended.transpose(1, 2).flatten(-2))
    return x


def test_attention_whose_scores_are_read_besides() -> None:
    """It is no block that can be copied for each part; its nodes are computed one by one."""
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    with equal_ranks(WORLD):
        found = compared(Call(_sunk, (ids, torch.randn(VOCABULARY, 16), torch.randn(16, 48))), (2, 3))
    assert [(each.axis, each.num_parts) for each in found] == [
        (axis, num) for axis in ("sequence", "batch") for num in (2, 3)
    ]
    assert [text for each in found for text in each.differences] == []
    assert all(len(each.before) == 2 for each in found), "attention was found"


def _check_logits(rank: int, family: Family, folder: str) -> list[str]:
    model, ids = _on_ranks(rank, family, folder)
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        model.compile(**FORCED)
        got = model(input_ids=ids, use_cache=False).logits
    problems = _not_split(model)
    if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())):
        problems.append(f"logits differ by {(got - wanted).abs().max():.2e}")
    return problems


def _check_tokens(rank: int, family: Family, folder: str) -> list[str]:
    model, ids = _on_ranks(rank, family, folder)
    generate = partial(model.generate, ids, max_new_tokens=3, do_sample=False, disable_compile=True)
    with torch.no_grad():
        wanted = generate()
        model.compile(**FORCED)
        got = generate()
    problems = _not_split(model)
    if not torch.equal(got, wanted):
        problems.append(f"tokens {got.tolist()} in place of {wanted.tolist()}")
    return problems


def _on_ranks(rank: int, family: Family, folder: str) -> tuple[Any, Tensor]:
    if rank == 0:
        save(family, folder)
    dist.barrier()
    ids = torch.randint(3, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(1))
    return load(family, folder, dist.get_world_size()), ids


def _not_split(model: torch.nn.Module) -> list[str]:
    return [graph.variant for graph in weaveopt.report(model).graphs if "token_split" not in graph.variant]


@pytest.mark.parametrize(("name", "check"), [("llama", _check_logits), ("mixtral", _check_tokens)])
def test_ranks_compute_as_eager(name: str, check: Callable[..., list[str]], tmp_path: Path) -> None:
    """Forced, through Inductor, on ranks whose weights differ; the order is read back from the code that it wrote."""
    family = next(each for each in FAMILIES if each.id == name)
    family = family if (name, "none") in TWO_LAYERS else one_layer(family)
    assert run_ranks(check, WORLD, family, str(tmp_path), timeout_s=420) == [[]] * WORLD
