"""The installed package: entry points, what a wheel holds, and that nothing is loaded before it is asked for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import setuptools
from pybind11.setup_helpers import ParallelCompile

from distribution import check
from distribution.pythons import Interpreter
from weaveopt import versions

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = ("weaveopt", "rewrites", "cost_model", "csrc")
BUILD_FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter outside the source tree, and returns what it prints."""
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the sources, without CUDA.

    Objects that this checkout was built of are used again where the copy has all of the same text for them.
    """
    folder = tmp_path_factory.mktemp("wheel")
    objects = ROOT / "build" / "cpp"
    objects.mkdir(parents=True, exist_ok=True)
    (folder / "build").mkdir()
    (folder / "build" / "cpp").symlink_to(objects)
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


def test_wheel_runs_in_an_empty_environment_without_a_compiler(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """torch and what it needs are those of this environment."""
    own = Interpreter(sys.executable, f"{sys.version_info[0]}.{sys.version_info[1]}")
    check.installed(Path(str(wheel.filename)), own, tmp_path / "empty", cuda=False, complete=False)


@pytest.fixture
def setup_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module."""
    monkeypatch.setattr(setuptools, "setup", lambda **of: None)
    monkeypatch.setattr(ParallelCompile, "install", lambda self: None)
    spec = importlib.util.spec_from_file_location("weaveopt_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build(setup_module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """setup.py on a host without GPUs, with an nvcc that only says what it is asked for."""
    module = setup_module
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart_static.a").touch()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "--version) echo release 13.0 ;;\n"
        "--list-gpu-code) printf 'sm_80\\nsm_90\\nsm_100\\nsm_120\\n' ;;\n"
        f"--dryrun) echo '#$ TOP={tmp_path}' >&2 ;;\n"
        f'-c) echo "$@" >> {tmp_path}/asked; shift $(($# - 1)); touch "$1" ;;\n'
        "esac\n"
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("WEAVE_CUDA", raising=False)
    monkeypatch.delenv("WEAVE_CUDA_ARCHS", raising=False)
    monkeypatch.setattr(module, "asked_of_tool", list)
    monkeypatch.setattr(module, "asked_of_driver", list)
    monkeypatch.setattr(module, "OBJECTS", tmp_path / "objects")
    return module


def set_gpus(build: ModuleType, monkeypatch: pytest.MonkeyPatch, *archs: str) -> None:
    """Pretends that the host has these GPUs."""
    build.gpu_archs.cache_clear()
    monkeypatch.setattr(build, "asked_of_driver", lambda: list(archs))


def test_cuda_objects_are_found_again_by_their_content(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEAVE_CUDA_ARCHS", "all")
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
    by_dtype = [path for path in sources if build.DTYPES_MARK in path]
    assert len(set(objects)) == len(asked()) == len(sources) + len(by_dtype) > len(sources)
    for path in by_dtype:
        found = [re.findall(r"-DWEAVE_ELEMENT=(\w+)", line) for line in asked() if f" {path} " in line]
        assert sorted(found) == [["__half"], ["__nv_bfloat16"]]
    for line in asked():
        found = re.findall(r"-gencode=arch=compute_(\w+),code=(\w+)", line)
        everywhere = [("80", "sm_80"), ("90", "sm_90"), ("100", "sm_100"), ("100", "compute_100")]
        assert found == ([("90a", "sm_90a")] if build.HOPPER_SOURCE in line else everywhere)
    hopper = [path for path in sources if path.endswith(build.HOPPER_SOURCE)]
    assert sum(build.HOPPER_SOURCE in line for line in asked()) == len(hopper) + len(by_dtype) > len(by_dtype)
    assert compile_all() == objects and len(asked()) == len(objects), "nothing is compiled twice"
    monkeypatch.setenv("WEAVE_CUDA_ARCHS", "90a")
    assert not set(compile_all()) & set(objects), "other flags make other objects"
    assert "sm_100" not in asked()[-1] and "code=compute" not in asked()[-1], "PTX for one chip alone helps no other"
    (tmp_path / "lib64" / "libcudart_static.a").unlink()
    with pytest.raises(SystemExit, match="WEAVE_CUDA=0"):
        compile_all()


def test_cpp_objects_are_found_again_by_their_content(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "CPP_OBJECTS", tmp_path / "objects")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cpp").write_text('#include "a.h"\n')
    (tmp_path / "csrc" / "b.cpp").touch()
    (tmp_path / "csrc" / "a.h").write_text("one")
    asked: list[str] = []

    class Compiler:
        compiler_so: ClassVar = [os.environ.get("CXX", "g++")]

        def compile(self, paths: list[str], output_dir: str | None = None, **how: object) -> list[str]:
            asked.extend(paths)
            for path in paths:
                (tmp_path / f"{Path(path).stem}.o").write_text(path)
            return [str(tmp_path / f"{Path(path).stem}.o") for path in paths]

    command = build.BuildNative(setuptools.Distribution())
    command.compiler = Compiler()
    command.reuse_objects()

    def objects(**how: object) -> list[str]:
        asked.clear()
        return list(command.compiler.compile(["csrc/a.cpp", "csrc/b.cpp"], "temporary", depends=[], **how))

    first = objects()
    assert [Path(path).read_text() for path in first] == asked == ["csrc/a.cpp", "csrc/b.cpp"]
    assert objects() == first and asked == []
    cuda = [("WEAVE_WITH_CUDA", "1")]
    assert objects(macros=cuda) == first and asked == [], "no text names the macro"
    assert not set(objects(debug=1)) & set(first) and len(asked) == 2, "other flags make other objects"
    (tmp_path / "csrc" / "a.h").write_text("two")
    second = objects()
    assert second[0] != first[0] and second[1] == first[1] and asked == ["csrc/a.cpp"]
    (tmp_path / "csrc" / "a.h").write_text("#ifdef WEAVE_WITH_CUDA\n#endif\n")
    without, with_cuda = objects(), objects(macros=cuda)
    assert without[0] != with_cuda[0] and without[1] == with_cuda[1] == second[1]
    asked.clear()
    command.compiler.compile(["flag.cpp"], extra_postargs=["-std=c++17"])
    assert asked == ["flag.cpp"], "what no module is built of is compiled each time"
    (tmp_path / "csrc" / "b.cpp").write_text("#include <pybind11/pybind11.h>\n")
    monkeypatch.setenv("CXXFLAGS", "-O3")
    here = objects(include_dirs=["python3.11"])
    monkeypatch.setattr(build.sys, "version", "another")
    there = objects(include_dirs=["python3.13"])
    assert here[0] == there[0] and here[1] != there[1], "without Python's headers an object serves every Python"


def test_an_nvshmem_that_does_not_compile_is_left_out(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "include" / "non_abi").mkdir(parents=True)
    (tmp_path / "include" / "non_abi" / "nvshmem_version.h").touch()
    monkeypatch.setenv("WEAVE_CUDA_ARCHS", "all")
    monkeypatch.setattr(build, "find_nvshmem", lambda: tmp_path)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("-c) ", '-c) case "$2" in *nvshmem*) exit 1 ;; esac; '))
    built: list[str] = []
    monkeypatch.setattr(build.BuildNative, "reuse_objects", lambda self: None)  # there is no compiler
    monkeypatch.setattr(build.build_ext, "build_extensions", lambda self: built.extend(e.name for e in self.extensions))
    for asked, names in (("auto", ["weaveopt._native"]), ("1", [])):
        monkeypatch.setenv("WEAVE_NVSHMEM", asked)
        command = build.BuildNative(setuptools.Distribution())
        extensions = [build.extension(name, []) for name in ("weaveopt._native", build.NVSHMEM_MODULE)]
        command.extensions, built[:] = extensions, []
        if asked == "auto":
            command.build_extensions()
        else:
            with pytest.raises(subprocess.CalledProcessError):
                command.build_extensions()
        assert built == names
    assert "fabric nvshmem is left out" in capsys.readouterr().err


def test_cuda_is_built_where_it_is_of_use(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc = str(tmp_path / "bin" / "nvcc")
    assert build.find_nvcc() is None
    assert "no GPU found" in (said := capsys.readouterr().err) and "WEAVE_CUDA_ARCHS=all" in said
    set_gpus(build, monkeypatch, "70")
    assert build.find_nvcc() is None, "the kernels need 80"
    set_gpus(build, monkeypatch, "70", "90")
    assert build.find_nvcc() == nvcc and build.gpu_archs() == ("90",)
    set_gpus(build, monkeypatch)
    monkeypatch.setenv("WEAVE_CUDA", "1")
    assert build.find_nvcc() == nvcc
    monkeypatch.setenv("WEAVE_CUDA", "0")
    assert build.find_nvcc() is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("WEAVE_CUDA", "auto")
    set_gpus(build, monkeypatch, "90")
    assert build.find_nvcc() is None and "nvcc was not found" in capsys.readouterr().err
    for asked, message in (("1", "WEAVE_CUDA=1, but nvcc was not found"), ("yes", "expected 0, 1 or auto")):
        monkeypatch.setenv("WEAVE_CUDA", asked)
        with pytest.raises(SystemExit, match=message):
            build.find_nvcc()
    monkeypatch.setenv("WEAVE_CUDA", "auto")
    monkeypatch.setenv("WEAVE_CUDA_ARCHS", "all")
    with pytest.raises(SystemExit, match="WEAVE_CUDA_ARCHS=all, but nvcc was not found"):
        build.find_nvcc()


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"),
    [
        ("", ("90",), ("90",)),
        ("", ("120", "86"), ("86", "120")),
        ("", ("121",), ("120",)),  # nvcc does not know it: the PTX of what it knows
        ("", (), ("80", "90", "100")),
        ("all", ("90",), ("80", "90", "100")),
        ("90;80", ("90",), ("80", "90")),
        ("103,100a", (), ("100a", "103")),
    ],
)
def test_architectures_are_those_asked_for_else_the_hosts(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: str, gpus: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    monkeypatch.setenv("WEAVE_CUDA_ARCHS", asked)
    set_gpus(build, monkeypatch, *gpus)
    assert build.choose_archs(("80", "86", "90", "100", "120")) == expected


def test_an_architecture_that_is_none_is_refused(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEAVE_CUDA_ARCHS", "hopper")
    with pytest.raises(SystemExit, match="'hopper': expected all, or architectures such as 80;90"):
        build.choose_archs(("80",))


def test_the_drivers_tool_names_the_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setup_module: ModuleType
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1" = --query-gpu=compute_cap ] && printf "9.0\\n9.0\\n12.0\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert setup_module.gpu_archs() == ("90", "120")
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert setup_module.asked_of_tool() == []


def test_make_builds_again_only_where_other_architectures_are_asked_for(tmp_path: Path) -> None:
    log, installed = tmp_path / "log", tmp_path / ".installed"
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$WEAVE_CUDA_ARCHS: $*" >> {log}\n')
    python.chmod(0o755)
    installed.touch()

    def builds(**asked: str) -> list[str]:
        log.write_text("")
        without = {name: value for name, value in os.environ.items() if not name.startswith(("WEAVE_CUDA", "MAKE"))}
        command = ["make", f"VENV={tmp_path}", f"{tmp_path}/.built"]
        done = subprocess.run(command, cwd=ROOT, env={**without, **asked}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return [line.partition(":")[0] for line in log.read_text().splitlines() if "pip install" in line]

    assert builds() == [""]
    assert builds() == []
    assert builds(WEAVE_CUDA_ARCHS="all") == ["all"]
    assert builds(WEAVE_CUDA_ARCHS="all") == []
    assert builds() == [""]


def test_wheel_names_its_entry_points_and_needs(wheel: zipfile.ZipFile) -> None:
    info = f"weaveopt-{PROJECT['version']}.dist-info"
    assert "weave = weaveopt.backend:weave" in wheel.read(f"{info}/entry_points.txt").decode()
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"Requires-Dist: torch>={versions.TORCH.least}" in metadata
    assert f"Requires-Python: >={versions.PYTHON.least}" in metadata
