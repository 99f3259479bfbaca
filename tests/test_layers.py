"""The layers of the house, read from the imports: a lower one never imports a higher one.

errors, config, decision < runtime < cost_model, ops < rule, pattern, … < rewrites, pipeline < backend < cli
"""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = {"weaveopt": "weaveopt", "rewrites": "weaveopt.rewrites", "cost_model": "weaveopt.cost_model"}
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "config", "decision"),
    ("runtime",),
    ("cost_model", "ops"),
    (
        "rule",
        "pattern",
        "facts",
        "graph_cost",
        "landing",
        "lowering",
        "norm",
        "pricing",
        "quantized",
        "reduced",
        "regimes",
        "scalars",
        "selection",
        "sharing",
        "specialize",
        "splice",
    ),
    ("rewrites", "pipeline", "measure"),
    ("backend", "registry", "inductor"),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
UNLAYERED = {"", "presets", "_native"}
"""The package itself (`weaveopt/__init__.py`), its data, and the native module, which imports nothing of ours."""
MIXED = (set(LAYERS[0]), set(LAYERS[3]), set(LAYERS[5]))
"""Levels of single files that may import one another, without a circle; other parts of one level may not."""
PYTHON_LINE_CAP = 400
NATIVE_LINE_CAP = 600


def python_files() -> dict[str, Path]:
    """Import name -> file, for every Python file of the package."""
    found: dict[str, Path] = {}
    for folder, package in SOURCE_FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = path
    return found


FILES = python_files()


def imports(module: str) -> set[str]:
    """Every dotted name that a module imports anywhere in it, lazily or not.

    `from weaveopt import rule` counts as `weaveopt.rule`; `from weaveopt.rule import Rule` as `weaveopt.rule.Rule`.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def own_imports(module: str) -> set[str]:
    """The modules of weaveopt that `module` imports: the longest known module in each imported name."""
    found = set()
    for name in imports(module):
        if name.startswith("weaveopt._native"):
            continue
        parts = name.split(".")
        while parts and ".".join(parts) not in FILES:
            parts.pop()
        if parts:
            found.add(".".join(parts))
    return found - {module}


def layer(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def test_every_module_has_a_layer() -> None:
    unknown = sorted(module for module in FILES if layer(module) not in LEVEL and layer(module) not in UNLAYERED)
    assert not unknown, f"add them to LAYERS: {unknown}"


@pytest.mark.parametrize("module", sorted(m for m in FILES if layer(m) in LEVEL))
def test_lower_layers_never_import_higher(module: str) -> None:
    higher = {
        name
        for name in own_imports(module)
        if layer(name) in LEVEL and layer(name) != layer(module) and LEVEL[layer(name)] >= LEVEL[layer(module)]
    }
    for level in MIXED:
        if layer(module) in level:
            higher = {name for name in higher if layer(name) not in level}
    assert not higher, f"{module} (layer {layer(module)}) imports {sorted(higher)}"


def test_imports_have_no_circle() -> None:
    order = graphlib.TopologicalSorter({module: own_imports(module) for module in FILES})
    order.prepare()  # raises CycleError, which names the circle


def test_steps_do_not_import_one_another_nor_a_rule() -> None:
    steps = {f"weaveopt.pipeline.{step}" for step in ("capture", "recognize", "decide", "plan", "rewrite", "bind")}
    missing = steps - FILES.keys()
    assert not missing, f"the six steps are one file each: {sorted(missing)} not found"
    for step in steps:
        found = {n for n in own_imports(step) if n in steps or layer(n) == "rewrites"}
        assert not found, f"{step} imports {sorted(found)}"


def test_pipeline_knows_no_rule() -> None:
    for module in (m for m in FILES if layer(m) == "pipeline"):
        found = {n for n in own_imports(module) if layer(n) == "rewrites"}
        assert not found, f"{module} imports {sorted(found)}: backend hands it the list"


def test_rules_do_not_import_one_another() -> None:
    from weaveopt.rewrites import RULES

    rules = {f"weaveopt.rewrites.{rule.name}" for rule in RULES}
    for module in rules:
        found = own_imports(module) & rules
        assert not found, f"{module} imports {sorted(found)}"


def test_kernel_families_do_not_import_one_another() -> None:
    """A family may be spread over files that share its name as a prefix; its neighbours are closed to it."""
    modules = sorted(m for m in FILES if m.startswith("weaveopt.ops."))
    names = [m.rpartition(".")[2] for m in modules]
    families = {name: min((o for o in names if name.startswith(o)), key=len) for name in names}
    for module in modules:
        family = families[module.rpartition(".")[2]]
        found = {
            n for n in own_imports(module) if n.startswith("weaveopt.ops.") and families[n.rpartition(".")[2]] != family
        }
        assert not found, f"{module} imports {sorted(found)}"


def test_cost_model_is_pure_arithmetic() -> None:
    """It knows our records and errors, and neither graphs nor devices."""
    for module in (m for m in FILES if layer(m) == "cost_model"):
        ours = {n for n in own_imports(module) if layer(n) not in {"decision", "errors", "cost_model", ""}}
        assert not ours, f"{module} imports {sorted(ours)}"
        foreign = {n for n in imports(module) if n.partition(".")[0] in {"torch", "transformers", "numpy"}}
        assert not foreign, f"{module} imports {sorted(foreign)}"


@pytest.mark.parametrize(
    "name",
    [
        *("compare", "memory", "parts", "picture", "reasons", "render"),
        *("report_json", "report_reader", "sections", "timeline", "trace", "why"),
    ],
)
def test_what_prints_reads_the_records_only(name: str) -> None:
    """A report cannot differ from what ran when its printer can see nothing else."""
    module = f"weaveopt.cli.{name}"
    ours = {n for n in own_imports(module) if layer(n) not in {"decision", "errors", "cli", ""}}
    assert not ours, f"{module} imports {sorted(ours)}"
    assert not {n for n in imports(module) if n.partition(".")[0] == "torch"}


def test_source_folders_are_imported_by_their_package_name() -> None:
    everything = [*FILES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    for path in [*everything, *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                tops = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                tops = {str(node.module).partition(".")[0]}
            else:
                continue
            bare = tops & {"rewrites", "cost_model"}
            assert not bare, f"{path.relative_to(ROOT)}:{node.lineno}: import weaveopt.{bare.pop()}"


def test_no_file_is_too_long() -> None:
    python = [*FILES.values(), *(p for f in ("tests", "benchmarks", "examples") for p in (ROOT / f).rglob("*.py"))]
    native = [p for suffix in ("cpp", "h", "inc", "cu", "cuh") for p in (ROOT / "csrc").rglob(f"*.{suffix}")]
    assert native, "no native sources found: is this the source tree?"
    lengths = {path: len(path.read_text().splitlines()) for path in [*python, *native]}
    too_long = {
        str(path.relative_to(ROOT)): length
        for path, length in lengths.items()
        if length > (PYTHON_LINE_CAP if path.suffix == ".py" else NATIVE_LINE_CAP)
    }
    assert not too_long
    own = sorted(lengths[path] for path in FILES.values())
    assert own[len(own) // 2] < 180, f"the median file has {own[len(own) // 2]} lines"


def test_every_rule_is_one_file_and_one_test() -> None:
    from weaveopt.rewrites import RULES

    names = [rule.name for rule in RULES]
    assert names, "RULES is empty"
    assert len(set(names)) == len(names), f"two rules of one name in {names}"
    for name in names:
        assert (ROOT / "rewrites" / f"{name}.py").is_file(), f"rule {name!r} has no rewrites/{name}.py"
        assert (ROOT / "tests" / "rewrites" / f"test_{name}.py").is_file(), f"rule {name!r} has no test file"


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports inside functions, aliases and packages are all seen."""
    source = "def late():\n    from weaveopt import backend as b\n    import weaveopt.cli.main\n    return b\n"
    (tmp_path / "probe.py").write_text(source)
    known = {"weaveopt.rule": tmp_path / "probe.py", "weaveopt.backend": tmp_path, "weaveopt.cli.main": tmp_path}
    monkeypatch.setitem(globals(), "FILES", known)
    assert own_imports("weaveopt.rule") == {"weaveopt.backend", "weaveopt.cli.main"}
    with pytest.raises(AssertionError, match="imports"):
        test_lower_layers_never_import_higher("weaveopt.rule")
