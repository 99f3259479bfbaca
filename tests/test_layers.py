"""What single rooms may not import, read from their source; circles, lengths, and what a rule consists of.

`tests/house` holds the layers.
"""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = {"weaveopt": "weaveopt", "rewrites": "weaveopt.rewrites", "cost_model": "weaveopt.cost_model"}
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
    """The room, or the single file, that a module is in."""
    return module.partition(".")[2].partition(".")[0]


def test_imports_have_no_circle() -> None:
    order = graphlib.TopologicalSorter({module: own_imports(module) for module in FILES})
    order.prepare()  # raises CycleError, which names the circle


STEPS = ("capture", "variants", "recognize", "specialize", "price", "decide", "plan", "rewrite", "bind")
"""In their order."""
RECORDS_OF_STEPS = {"PricedGraph", "DecidedGraph", "Planned"}
"""What a step makes and a later one reads."""


def test_steps_run_forwards_and_call_one_another_never() -> None:
    """A step takes what an earlier one made; only `backend` calls them."""
    names = {f"weaveopt.pipeline.{step}": at for at, step in enumerate(STEPS)}
    missing = names.keys() - FILES.keys()
    assert not missing, f"the steps are one file each: {sorted(missing)} not found"
    for step, at in names.items():
        taken = {name for name in imports(step) if name.rpartition(".")[0] in names}
        calls = {name for name in taken if name.rpartition(".")[2] not in RECORDS_OF_STEPS}
        later = {name for name in taken if names[name.rpartition(".")[0]] >= at}
        assert not calls and not later, f"{step} imports {sorted(calls | later)}"


def test_every_step_is_called_from_the_backend() -> None:
    called = {name for name in imports("weaveopt.backend") if name.startswith("weaveopt.pipeline.")}
    assert {f"weaveopt.pipeline.{step}.{step}" for step in STEPS} <= called


def test_pipeline_knows_no_rule() -> None:
    for module in (m for m in FILES if layer(m) == "pipeline"):
        found = {n for n in own_imports(module) if layer(n) in ("rewrites", "sites")}
        assert not found, f"{module} imports {sorted(found)}: backend hands it the matchers and rules"


def rule_of(module: str) -> str:
    """The rule whose file or folder a module is; empty for `rewrites/__init__.py`."""
    return module.removeprefix("weaveopt.rewrites").strip(".").partition(".")[0]


def test_rules_do_not_import_one_another() -> None:
    for module in (m for m in FILES if layer(m) == "rewrites" and rule_of(m)):
        found = {n for n in own_imports(module) if layer(n) == "rewrites" and rule_of(n) not in ("", rule_of(module))}
        assert not found, f"{module} imports {sorted(found)}"


def test_kernel_families_do_not_import_one_another() -> None:
    def family(module: str) -> str:
        return module.removeprefix("weaveopt.ops").strip(".").partition(".")[0]

    for module in (m for m in FILES if layer(m) == "ops" and family(m)):
        found = {n for n in own_imports(module) if layer(n) == "ops" and family(n) not in ("", family(module))}
        assert not found, f"{module} imports {sorted(found)}"


def test_cost_model_is_pure_arithmetic() -> None:
    """It knows our records and errors, and neither graphs nor devices."""
    for module in (m for m in FILES if layer(m) == "cost_model"):
        ours = {n for n in own_imports(module) if layer(n) not in {"records", "errors", "cost_model", ""}}
        assert not ours, f"{module} imports {sorted(ours)}"
        foreign = {n for n in imports(module) if n.partition(".")[0] in {"torch", "transformers", "numpy"}}
        assert not foreign, f"{module} imports {sorted(foreign)}"


@pytest.mark.parametrize("module", sorted(m for m in FILES if layer(m) == "reporting" and not m.endswith("registry")))
def test_what_prints_reads_the_records_only(module: str) -> None:
    """A report cannot differ from what ran when its printer can see nothing else."""
    ours = {n for n in own_imports(module) if layer(n) not in {"records", "errors", "reporting", ""}}
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


def test_every_rule_is_one_file_or_folder_and_has_tests() -> None:
    from weaveopt.rewrites import RULES

    names = RULES.names
    assert names, "there is no rule"
    assert len(set(names)) == len(names), f"two rules of one name in {names}"
    for name in names:
        forms = [ROOT / "rewrites" / f"{name}.py", ROOT / "rewrites" / name / "__init__.py"]
        assert sum(form.is_file() for form in forms) == 1, f"rule {name!r} is not one of {forms}"
        assert (ROOT / "tests" / "rewrites" / f"test_{name}.py").is_file(), f"rule {name!r} has no test file"


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports inside functions, aliases and packages are all seen."""
    source = "def late():\n    from weaveopt import backend as b\n    import weaveopt.cli.main\n    return b\n"
    (tmp_path / "probe.py").write_text(source)
    known = {"weaveopt.rule": tmp_path / "probe.py", "weaveopt.backend": tmp_path, "weaveopt.cli.main": tmp_path}
    monkeypatch.setitem(globals(), "FILES", known)
    assert own_imports("weaveopt.rule") == {"weaveopt.backend", "weaveopt.cli.main"}
