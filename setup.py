"""Builds weaveopt: Python packages from two source folders more than the usual one, and one native module.

`rewrites/` and `cost_model/` stand at the top of the source tree and import as `weaveopt.rewrites` and
`weaveopt.cost_model`. The native module `weaveopt._native` holds no torch, so it builds in an isolated
environment that has neither torch nor a GPU, and one binary serves every torch version.

`WEAVE_CUDA=0|1|auto` (default auto: where nvcc is found) builds the CUDA sources, `WEAVE_CUDA_ARCHS` (default
`80;90a;100a`) names the GPU architectures.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup

ROOT = Path(__file__).parent
DEFAULT_ARCHS = "80;90a;100a"
HEADERS = (".h", ".hpp", ".inc", ".cuh")
# CUDA objects by content, so that one built here is found again, and may be carried to another machine.
OBJECTS = ROOT / "build" / "cuda"


def sources(suffix: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"csrc/**/*{suffix}"))


def packages(folder: str, name: str) -> list[str]:
    """A source folder that imports as `name`, and every package in it."""
    return [name, *(f"{name}.{inner}" for inner in find_packages(str(ROOT / folder)))]


def find_nvcc() -> str | None:
    """nvcc where the CUDA part is to be built, else None."""
    asked = os.environ.get("WEAVE_CUDA", "auto")
    if asked not in {"0", "1", "auto"}:
        raise SystemExit(f"WEAVE_CUDA={asked!r}: expected 0, 1 or auto")
    if asked == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if nvcc is None and asked == "1":
        raise SystemExit(
            "WEAVE_CUDA=1, but nvcc was not found: put it on PATH, set CUDA_HOME, or build with WEAVE_CUDA=0"
        )
    return nvcc


def find_runtime(nvcc: str) -> Path:
    """Where the CUDA runtime lies: nvcc says so itself, as it may be a link or a script."""
    plan = subprocess.run([nvcc, "--dryrun", sources(".cu")[0]], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [Path(folder) for folder in re.findall(r'"-L([^"]+)"', plan.stderr)]
    found += [Path(top.strip()) / "lib64" for top in re.findall(r"^#\$ TOP=(.*)$", plan.stderr, re.MULTILINE)]
    for folder in found:
        if (folder / "libcudart_static.a").exists():
            return folder.resolve()
    raise SystemExit(
        f"{nvcc} has no libcudart_static.a in {found}: install the CUDA runtime, or build with WEAVE_CUDA=0"
    )


class CudaCompiler:
    """nvcc for the architectures asked for. An object that was made of the same text before is used again."""

    def __init__(self, nvcc: str) -> None:
        self.nvcc = nvcc
        self.library_dir = find_runtime(nvcc)
        archs = [arch for arch in os.environ.get("WEAVE_CUDA_ARCHS", DEFAULT_ARCHS).split(";") if arch]
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        self.flags = ["-std=c++17", "-O3", "-Icsrc", "-Xcompiler", "-fPIC,-fvisibility=hidden", *codes]
        self.threads = f"--threads={max(len(archs), 1)}"
        version = subprocess.check_output([nvcc, "--version"], text=True)
        headers = [path for suffix in HEADERS for path in sources(suffix)]
        self.surroundings = [version, *self.flags, *(text for path in headers for text in (path, read(path)))]

    def compile_all(self, paths: list[str]) -> list[str]:
        OBJECTS.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(self.compile, paths))

    def compile(self, path: str) -> str:
        text = "\0".join([*self.surroundings, path, read(path)])
        target = OBJECTS / f"{hashlib.sha256(text.encode()).hexdigest()}.o"
        if not target.exists():
            unfinished = target.with_suffix(f".{os.getpid()}.o")
            command = [self.nvcc, "-c", path, "-o", str(unfinished), *self.flags, self.threads]
            print(" ".join(command), flush=True)
            subprocess.check_call(command, cwd=ROOT)
            unfinished.replace(target)
        return str(target)


def read(path: str) -> str:
    return (ROOT / path).read_text()


class BuildNative(build_ext):
    """Compiles the C++ sources, and with nvcc the CUDA sources, into one module."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        cuda = sources(".cu")
        nvcc = find_nvcc() if cuda else None
        if nvcc is not None:
            compiler = CudaCompiler(nvcc)
            objects = compiler.compile_all(cuda)
            ext.extra_objects = [*ext.extra_objects, *objects]
            ext.depends = [*ext.depends, *objects]
            ext.define_macros.append(("WEAVE_WITH_CUDA", "1"))
            ext.extra_link_args.append(f"-L{compiler.library_dir}")
            ext.libraries += ["cudart_static", "dl", "rt", "pthread"]
        super().build_extension(ext)


native = Pybind11Extension(
    "weaveopt._native",
    sources(".cpp"),
    include_dirs=["csrc"],
    depends=[path for suffix in HEADERS for path in sources(suffix)],
    extra_compile_args=["-std=c++17", "-O3", "-fopenmp", "-fvisibility=hidden"],
    extra_link_args=["-fopenmp"],
)

ParallelCompile(default=0).install()

setup(
    packages=[
        *packages("weaveopt", "weaveopt"),
        *packages("rewrites", "weaveopt.rewrites"),
        *packages("cost_model", "weaveopt.cost_model"),
        "weaveopt.cost_model.profiles",
    ],
    package_dir={"weaveopt.rewrites": "rewrites", "weaveopt.cost_model": "cost_model"},
    package_data={
        "weaveopt": ["py.typed"],
        "weaveopt.presets": ["*.json"],
        "weaveopt.cost_model": ["*.json"],
        "weaveopt.cost_model.profiles": ["*.json"],
    },
    ext_modules=[native] if native.sources else [],
    cmdclass={"build_ext": BuildNative},
)
