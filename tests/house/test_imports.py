"""Finer than rooms: circles, the order of the steps, and what single rooms may not import."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

from tests.graphs.nonempty import some
from tests.house.source import FILES, ROOT, imports_of, room


def imports(module: str) -> set[str]:
    return imports_of(FILES[module])


def own_imports(module: str) -> set[str]:
    """The modules of weaveopt that `module` imports: the longest known module in each imported name."""
    found = set()
    for name in imports(module):
        if name.startswith(("weaveopt._native", "weaveopt._nvshmem")):
            continue
        parts = name.split(".")
        while parts and ".".join(parts) not in FILES:
            parts.pop()
        if parts:
            found.add(".".join(parts))
    return found - {module}


def test_imports_have_no_circle() -> None:
    order = graphlib.TopologicalSorter({module: own_imports(module) for module in FILES})
    order.prepare()  # raises CycleError, which names the circle


STEPS = (
    "capture", "context", "recognize", "specialize", "price", "decide", "variants", "choose", "plan", "rewrite", "bind",
)  # fmt: skip
"""In their order."""
RECORDS_OF_STEPS = {"PricedGraph", "DecidedGraph", "ChosenGraph", "Planned"}
"""Records that a step makes and a later one reads."""


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
    for module in some(m for m in FILES if room(m) == "pipeline"):
        found = {n for n in own_imports(module) if room(n) in ("rewrites", "sites")}
        assert not found, f"{module} imports {sorted(found)}: backend hands it the matchers and rules"


def rule_of(module: str) -> str:
    """The rule whose file or folder a module is; empty for `rewrites/__init__.py`."""
    return module.removeprefix("weaveopt.rewrites").strip(".").partition(".")[0]


SHARED_BY_RULES = "reduction"
"""Room in `rewrites/` of what several rules do at reduction sites."""


def test_rules_do_not_import_one_another() -> None:
    for module in some(m for m in FILES if room(m) == "rewrites" and rule_of(m)):
        allowed = ("", SHARED_BY_RULES, rule_of(module))
        found = {n for n in own_imports(module) if room(n) == "rewrites" and rule_of(n) not in allowed}
        assert not found, f"{module} imports {sorted(found)}"


BUILT_ON = {"gemm_comm": "reduction"}
"""Kernel families with an operation that contains one of another family."""


def test_kernel_families_do_not_import_one_another() -> None:
    def family(module: str) -> str:
        return module.removeprefix("weaveopt.ops").strip(".").partition(".")[0]

    for module in some(m for m in FILES if room(m) == "ops" and family(m)):
        allowed = ("", BUILT_ON.get(family(module)), family(module))
        found = {n for n in own_imports(module) if room(n) == "ops" and family(n) not in allowed}
        assert not found, f"{module} imports {sorted(found)}"


def test_cost_model_is_pure_arithmetic() -> None:
    """It knows our records and errors, for type checkers too, and neither graphs nor devices."""
    for module in some(m for m in FILES if room(m) == "cost_model"):
        ours = {n for n in own_imports(module) if room(n) not in {"records", "errors", "plain_json", "cost_model", ""}}
        assert not ours, f"{module} imports {sorted(ours)}"
        foreign = {n for n in imports(module) if n.partition(".")[0] in {"torch", "transformers", "numpy"}}
        assert not foreign, f"{module} imports {sorted(foreign)}"


@pytest.mark.parametrize("module", sorted(m for m in FILES if room(m) == "reporting" and not m.endswith("registry")))
def test_what_prints_reads_the_records_only(module: str) -> None:
    """A report cannot differ from what ran when its printer can see nothing else."""
    allowed = {"records", "errors", "plain_json", "wording", "reporting", ""}
    ours = {n for n in own_imports(module) if room(n) not in allowed}
    assert not ours, f"{module} imports {sorted(ours)}"
    assert not {n for n in imports(module) if n.partition(".")[0] == "torch"}


def test_source_folders_are_imported_by_their_package_name() -> None:
    everything = [*FILES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    num_imports = 0
    for path in [*everything, *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                tops = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                tops = {str(node.module).partition(".")[0]}
            else:
                continue
            num_imports += 1
            bare = tops & {"rewrites", "cost_model"}
            assert not bare, f"{path.relative_to(ROOT)}:{node.lineno}: import weaveopt.{bare.pop()}"
    assert num_imports > len(everything), f"{num_imports} imports found"


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports inside functions, aliases and packages are all seen."""
    source = "def late():\n    from weaveopt import backend as b\n    import weaveopt.cli.main\n    return b\n"
    (tmp_path / "probe.py").write_text(source)
    known = {"weaveopt.rule": tmp_path / "probe.py", "weaveopt.backend": tmp_path, "weaveopt.cli.main": tmp_path}
    monkeypatch.setitem(globals(), "FILES", known)
    assert own_imports("weaveopt.rule") == {"weaveopt.backend", "weaveopt.cli.main"}
