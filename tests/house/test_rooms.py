"""The house: imports lead downwards only, and nothing outside a rule's own rooms names the rule."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.house.source import FILES, ROOT, imports_of, room

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "kernel_memory", "plain_json", "records", "versions", "wording"),
    ("config", "cost_model"),
    ("graph", "solver"),
    ("fabrics",),
    ("ops",),
    ("rule", "integrations"),
    ("sites", "inductor"),
    ("rewrites",),
    ("pipeline",),
    ("reporting", "measure"),
    ("autotune", "debug"),
    ("backend", "accelerator", "generation"),
    ("preview",),
    ("cli",),
    ("__main__",),
)
"""Rooms and single files of the package, from the lowest up. A room imports rooms of lower layers only."""
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}

FAMILIES = {
    "all_reduce_rms_norm": re.compile(r"all_?reduce_?rms_?norm", re.IGNORECASE),
    "gemm_all_reduce": re.compile(r"gemm_?all_?reduce", re.IGNORECASE),
    "all_gather_gemm": re.compile(r"all_?gather_?gemm", re.IGNORECASE),
    "hierarchical_all_reduce": re.compile(r"hierarchical_?all_?reduce", re.IGNORECASE),
    "causal_attention": re.compile(r"causal_?attention|masked_?attention|library_?attention", re.IGNORECASE),
    "moe_fused": re.compile(r"moe_?fused", re.IGNORECASE),
    "gemm_reduce_scatter": re.compile(r"gemm_?reduce_?scatter", re.IGNORECASE),
    "moe_sharded": re.compile(r"moe_?sharded", re.IGNORECASE),
    "expert_prefetch": re.compile(r"expert_?prefetch", re.IGNORECASE),
    "shard_norm": re.compile(r"(?<![a-z])shard_?norm", re.IGNORECASE),
    "merged_gemm": re.compile(r"merged_?(gemm|linear)", re.IGNORECASE),
    "token_split": re.compile(r"token_?split", re.IGNORECASE),
    "all_reduce_norm": re.compile(r"(?<!gemm_)all_?reduce_?norm", re.IGNORECASE),
    "moe_experts": re.compile(r"moe_?experts", re.IGNORECASE),
}
"""Each rule, and every name of it and of its operations; last, kernels that several rules run: those of reductions, and
of a mixture's experts."""
ROOMS = {
    "all_reduce_rms_norm": ("rewrites/all_reduce_rms_norm/",),
    "gemm_all_reduce": (
        "rewrites/gemm_all_reduce/",
        "weaveopt/ops/gemm_comm/",
        "weaveopt/measure/cases/gemm_comm/",
        "csrc/gemm_comm/pushed_tiles",
    ),
    "all_gather_gemm": (
        "rewrites/all_gather_gemm/",
        "rewrites/shard_norm/",
        "weaveopt/ops/gemm_comm/",
        "weaveopt/measure/cases/gemm_comm/",
        "csrc/gemm_comm/all_gather/",
    ),
    "hierarchical_all_reduce": (
        "rewrites/hierarchical_all_reduce/",
        "csrc/reduction/hosts/",
    ),
    "causal_attention": (
        "rewrites/causal_attention/",
        "weaveopt/ops/attention/",
        "weaveopt/measure/cases/attention/",
    ),
    "moe_fused": ("rewrites/moe_fused/",),
    "gemm_reduce_scatter": (
        "rewrites/gemm_reduce_scatter/",
        "rewrites/shard_norm/",
        "weaveopt/ops/gemm_comm/",
        "weaveopt/measure/cases/gemm_comm/",
        "csrc/gemm_comm/reduce_scatter/",
    ),
    "moe_sharded": (
        "rewrites/moe_sharded.py",
        "weaveopt/ops/experts/",
        "weaveopt/integrations/transformers/",
        "weaveopt/measure/cases/experts/",
        "csrc/experts/sharded/",
    ),
    "expert_prefetch": ("rewrites/expert_prefetch/", "weaveopt/ops/experts/"),
    "shard_norm": ("rewrites/shard_norm/",),
    "merged_gemm": ("rewrites/merged_gemm.py", "weaveopt/ops/merged_gemm/"),
    "token_split": ("rewrites/token_split/",),
    "all_reduce_norm": (
        "rewrites/all_reduce_rms_norm/",
        "rewrites/hierarchical_all_reduce/",
        "rewrites/reduction/",
        "weaveopt/ops/reduction/",
        "weaveopt/measure/cases/reduction/",
        "csrc/reduction/",
    ),
    "moe_experts": (
        "rewrites/moe_fused/",
        "weaveopt/ops/experts/",
        "weaveopt/measure/cases/experts/",
        "csrc/experts/",
    ),
}
REGISTRIES = (
    "rewrites/__init__.py",
    "weaveopt/ops/__init__.py",
    "weaveopt/measure/cases/__init__.py",
    "csrc/base/families.cpp",
    "weaveopt/_native.pyi",
    "weaveopt/_nvshmem.pyi",
)
"""Files in which a rule, an operation family, its measurements and its kernels each have their line; and the types of
all that the native modules hold."""


def test_every_room_has_a_layer() -> None:
    rooms = {room(module) for module in FILES} - {""}
    assert rooms - LAYER_OF.keys() - {"presets"} == set()


@pytest.mark.parametrize("module", FILES)
def test_imports_lead_downwards(module: str) -> None:
    """Imports for type checkers are free."""
    own = room(module)
    if own not in LAYER_OF:
        return
    wrong = [
        name
        for name in sorted(imports_of(FILES[module], for_types=False))
        if name.startswith("weaveopt.")
        if (other := room(name)) in LAYER_OF and other != own and LAYER_OF[other] >= LAYER_OF[own]
    ]
    assert not wrong, f"{module} is in layer {LAYER_OF[own]} and imports {wrong}"


def sources() -> Iterator[str]:
    for folder in ("weaveopt", "rewrites", "cost_model", "csrc"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".pyi", ".h", ".cuh", ".cu", ".cpp", ".inc") and not path.is_symlink():
                yield str(path.relative_to(ROOT))


@pytest.mark.parametrize("rule", FAMILIES)
def test_nothing_outside_its_rooms_names_a_rule(rule: str) -> None:
    found = []
    for name in sources():
        if name.startswith(ROOMS[rule]) or name in REGISTRIES:
            continue
        for number, line in enumerate((ROOT / name).read_text().splitlines(), start=1):
            if FAMILIES[rule].search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
