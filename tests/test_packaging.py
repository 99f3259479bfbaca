"""The installed package: entry points, what a wheel holds, and that nothing is loaded before it is asked for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import setuptools
from pybind11.setup_helpers import ParallelCompile

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = ("weaveopt", "rewrites", "cost_model", "csrc")
BUILD_FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


def run_python(code: str) -> str:
    """What a fresh interpreter, started outside the source tree, prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_version_is_the_projects() -> None:
    assert importlib.metadata.version("weaveopt") == PROJECT["version"]
    assert run_python("import weaveopt; print(weaveopt.__version__)") == PROJECT["version"]


def test_backend_is_found_without_an_import() -> None:
    code = (
        "import sys, torch\n"
        "assert 'weave' in torch._dynamo.list_backends(), torch._dynamo.list_backends()\n"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] == 'weaveopt'))"
    )
    assert run_python(code) == "[]"


def test_backend_entry_point_loads() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="weave")
    assert callable(entry.load())


def test_command_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="weaveopt")
    assert entry.value == "weaveopt.cli.main:main"
    done = subprocess.run(
        [sys.executable, "-m", "weaveopt.cli.main", "--help"], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert "explain" in done.stdout and "doctor" in done.stdout


def test_supported_versions_are_declared() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    assert {"torch>=2.11", "transformers>=5.23"} <= set(PROJECT["dependencies"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the sources; the native module is built in it from nothing, without CUDA."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, folder / name)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", "out", "."],
        cwd=folder,
        env={**os.environ, "WEAVE_CUDA": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (folder / "out").glob("weaveopt-*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_every_source_and_data_file(wheel: zipfile.ZipFile) -> None:
    held = set(wheel.namelist())
    wanted = {f"weaveopt/{p.relative_to(ROOT / 'weaveopt')}" for p in (ROOT / "weaveopt").rglob("*.py")}
    wanted |= {f"weaveopt/presets/{p.name}" for p in (ROOT / "weaveopt/presets").glob("*.json")}
    for folder in ("rewrites", "cost_model"):
        files = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.json")]
        wanted |= {f"weaveopt/{p.relative_to(ROOT)}" for p in files}
    assert "weaveopt/cost_model/profiles/cpu.json" in wanted
    assert any(name.startswith("weaveopt/presets/") for name in wanted)
    missing = (wanted | {"weaveopt/py.typed"}) - held
    assert not missing, sorted(missing)


def test_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"weaveopt", f"weaveopt-{PROJECT['version']}.dist-info"}


def test_wheel_holds_the_native_module_without_torch(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    (native,) = (name for name in wheel.namelist() if name.startswith("weaveopt/_native.") and name.endswith(".so"))
    path = wheel.extract(native, tmp_path)
    linked = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    assert "libtorch" not in linked and "libc10" not in linked
    load = f"import importlib.util as u; s = u.spec_from_file_location('weaveopt._native', {path!r})"
    assert run_python(f"{load}; m = u.module_from_spec(s); s.loader.exec_module(m); print(m.has_cuda)") == "False"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """setup.py as a module, and an nvcc that only says what it is asked for."""
    monkeypatch.setattr(setuptools, "setup", lambda **of: None)
    monkeypatch.setattr(ParallelCompile, "install", lambda self: None)
    spec = importlib.util.spec_from_file_location("weaveopt_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart_static.a").touch()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "--version) echo release 13.0 ;;\n"
        f"--dryrun) echo '#$ TOP={tmp_path}' >&2 ;;\n"
        f'-c) echo "$@" >> {tmp_path}/asked; touch "$4" ;;\n'
        "esac\n"
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(module, "OBJECTS", tmp_path / "objects")
    return module


def test_cuda_objects_are_found_again_by_their_content(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.find_nvcc() == str(tmp_path / "bin" / "nvcc")
    sources = build.sources(".cu")
    assert "csrc/fabric/peer.cu" in sources

    def compile_all() -> list[str]:
        compiler = build.CudaCompiler(build.find_nvcc())
        assert compiler.library_dir == tmp_path / "lib64"
        return list(compiler.compile_all(sources))

    def asked() -> list[str]:
        return (tmp_path / "asked").read_text().splitlines()

    objects = compile_all()
    assert len(set(objects)) == len(sources) == len(asked())
    assert all("arch=compute_90a,code=sm_90a" in line and "code=sm_100a" in line for line in asked())
    assert compile_all() == objects and len(asked()) == len(sources), "nothing is compiled twice"
    monkeypatch.setenv("WEAVE_CUDA_ARCHS", "90a")
    assert not set(compile_all()) & set(objects), "other flags make other objects"
    assert "sm_100a" not in asked()[-1]
    (tmp_path / "lib64" / "libcudart_static.a").unlink()
    with pytest.raises(SystemExit, match="WEAVE_CUDA=0"):
        compile_all()


def test_cuda_is_built_as_asked(build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEAVE_CUDA", "0")
    assert build.find_nvcc() is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("WEAVE_CUDA", "auto")
    assert build.find_nvcc() is None
    for asked, message in (("1", "nvcc was not found"), ("yes", "expected 0, 1 or auto")):
        monkeypatch.setenv("WEAVE_CUDA", asked)
        with pytest.raises(SystemExit, match=message):
            build.find_nvcc()


def test_wheel_names_its_entry_points_and_needs(wheel: zipfile.ZipFile) -> None:
    info = f"weaveopt-{PROJECT['version']}.dist-info"
    assert "weave = weaveopt.backend:weave" in wheel.read(f"{info}/entry_points.txt").decode()
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "Requires-Dist: torch>=2.11" in metadata and "Requires-Python: >=3.11" in metadata
