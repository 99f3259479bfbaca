"""README and docs say what the code says: options, rules, profiles, report fields, figures; no link is dead."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.graphs.nonempty import some
from tests.house.test_rooms import LAYERS
from weaveopt import cost_model
from weaveopt.autotune.tune import GPU_BUDGET_S
from weaveopt.config import BUILD_VARIABLES, OPTIONS, Option
from weaveopt.records.candidate import Fabric
from weaveopt.reporting.document import SCHEMA
from weaveopt.rewrites import RULES

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
README_LIMIT_BYTES = 10 * 1024
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def row_of(page: Path, start: str) -> list[str]:
    """The cells of the only table row of a page that begins so."""
    (line,) = (line for line in page.read_text().splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_readme_is_short_and_has_the_set_up_commands() -> None:
    assert README.stat().st_size <= README_LIMIT_BYTES
    lines = README.read_text().splitlines()
    for command in ("make run", "make test", "make gpu-test", "make gpu-bench"):
        assert any(line.split("#")[0].strip() == command for line in lines), command


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_documented(option: Option) -> None:
    _, variable, default, meaning = row_of(DOCS / "options.md", f"| `{option.name}` |")
    assert (variable, meaning) == (f"`{option.env}`", option.help)
    number = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
    if option.is_number:
        number = f"{GPU_BUDGET_S:g} on GPUs, else 0"
    assert default == ("none" if option.default in ((), None) and not option.is_number else number)
    assert f"`{option.name}`" in README.read_text()


def test_every_build_variable_is_documented() -> None:
    for name, meaning in some(BUILD_VARIABLES):
        assert row_of(DOCS / "options.md", f"| `{name}` |")[1] == meaning


@pytest.mark.parametrize("rule", RULES.names)
def test_every_rule_has_a_row_and_a_page(rule: str) -> None:
    assert row_of(README, f"| [`{rule}`](docs/{rule}.md) |")[2].startswith("works")
    assert f"[{rule}.md]({rule}.md)" in (DOCS / "index.md").read_text()


@pytest.mark.parametrize("name", cost_model.names())
def test_every_profile_is_documented(name: str) -> None:
    machine = cost_model.load(name)
    _, ranks, fabrics, origins, error = row_of(DOCS / "machines.md", f"| `{name}` |")
    assert ranks.split()[0] == str(machine.ranks_per_host) and error == f"{100 * machine.relative_error:.0f} %"
    assert set(re.findall(r"`(\w+)`", fabrics)) == {fabric.value for fabric in machine.fabrics}
    assert ("**measured**" in origins) == any(origin.kind == "measured" for _, origin in machine.origins)


def test_every_fabric_is_documented() -> None:
    for fabric in some(Fabric):
        assert row_of(DOCS / "fabrics.md", f"| `{fabric.value}` |")


def test_every_field_of_the_report_is_documented() -> None:
    rooms = ("reporting/document.py", "reporting/generation.py")
    sources = [(ROOT / "weaveopt" / name).read_text() for name in rooms]
    keys = {
        key.value
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    assert len(keys) > 50
    schema = (DOCS / "explain.md").read_text().partition("## JSON")[2]
    words = set(re.findall(r"\w+", schema))
    assert keys - words == set()
    assert f"## JSON, schema {SCHEMA}\n" in (DOCS / "explain.md").read_text()


def test_the_readmes_figures_are_those_of_the_result_file() -> None:
    """Two ranks, hidden 8192, the sum sharded; all of the commit that the README names."""
    found = json.loads((ROOT / "benchmarks" / "results" / "h200x4" / "all_reduce_rms_norm.json").read_text())
    rows = {
        str(row["case"]["tokens"]): row
        for row in found["rows"]
        if (row["case"]["ranks"], row["case"]["hidden"], row["case"]["sum"]) == (2, 8192, "sharded")
    }
    (commit,) = re.findall(r"all of commit ([0-9a-f]{7})", README.read_text())
    counts = row_of(README, "| tokens |")[1:]
    for start, field, digits in (
        ("| weave", "weave_us", 1),
        ("| best / weave", "ratio", 2),
        ("| the link", "bound_us", 1),
    ):
        shown = row_of(README, start)[1:]
        for tokens, figure in zip(some(counts), shown, strict=True):
            row = rows[tokens]
            assert "earlier_run" not in row["parameters"] and found["commit"].startswith(commit)
            assert abs(float(figure) - row[field]) <= 0.501 * 10**-digits, f"{tokens} tokens: {field}"


def test_the_decode_kernels_figures_are_those_of_the_result_file() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "h200x4" / "attention_decode.json").read_text())
    rows = {
        tuple(row["case"][key] for key in ("batch", "filled", "key_heads")): row
        for row in found["rows"]
        if row["case"]["phase"] == "decode" and "earlier_run" not in row["parameters"]
    }
    page = (DOCS / "causal_attention.md").read_text()
    assert f"commit {found['commit'][:7]}, {len(rows)} shapes" in page
    shown = re.findall(r"^\| (\d+) x (\d+) x (\d+) \|(.*)\|$", page, re.MULTILINE)
    assert len(shown) >= 8
    for *case, figures in shown:
        row = rows[tuple(map(int, case))]
        wanted = [row["weave_us"], *(row["baselines"][name] for name in ("flex", "sdpa_gqa_mask", "sdpa_gqa"))]
        *us, gb_per_s = map(float, figures.split("|"))
        assert all(abs(one - other) <= 0.0501 for one, other in zip(us, wanted, strict=True)), case
        assert gb_per_s == row["parameters"]["gb_per_s"], case
    slower = [row for row in rows.values() if row["baselines"]["sdpa_gqa"] < row["weave_us"]]
    assert f"is the faster one at {len(slower)} of the {len(rows)}" in " ".join(page.split())


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in LINK.findall(FENCED.sub("", page.read_text())):
            if "://" not in target:
                yield page, target


@pytest.mark.parametrize(("page", "target"), [pytest.param(p, t, id=f"{p.name}-{t}") for p, t in links()])
def test_links_lead_somewhere(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve() if path else page
    assert there.exists(), f"{page.name} links to {target}"
    if anchor:
        headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
        known = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in known, f"{page.name} links to {target}; known: {sorted(known)}"


def test_contributing_has_the_layers() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("### Layers")[2]
    block = " ".join(line.strip() for line in text.splitlines() if line.startswith("    "))
    assert [tuple(layer.strip().split(", ")) for layer in block.split("<")] == [tuple(rooms) for rooms in LAYERS]


def test_index_lists_every_page() -> None:
    listed = set(LINK.findall((DOCS / "index.md").read_text()))
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= listed
