"""Lengths of files, and what a rule consists of."""

from __future__ import annotations

from tests.house.source import FILES, ROOT

PYTHON_LINE_CAP = 400
NATIVE_LINE_CAP = 600


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


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports a file of a folder that is no package by its name alone."""
    folders: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if not (path.parent / "__init__.py").is_file():
            folders.setdefault(path.name, []).append(path.parent.name)
    assert {name: found for name, found in folders.items() if len(found) > 1} == {}
