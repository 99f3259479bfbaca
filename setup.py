"""Builds weaveopt: Python packages from two source folders more than the usual one, and one native module.

`rewrites/` and `cost_model/` stand at the top of the source tree and import as `weaveopt.rewrites` and
`weaveopt.cost_model`. The native module `weaveopt._native` holds no torch, so it builds in an isolated
environment that has neither torch nor a GPU, and one binary serves every torch version.

`WEAVE_CUDA=0|1|auto` (default auto: where nvcc is found) builds the CUDA sources, `WEAVE_CUDA_ARCHS` (default
`80;90a;100a`) names the GPU architectures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

ROOT = Path(__file__).parent
DEFAULT_ARCHS = "80;90a;100a"


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


class BuildNative(build_ext):
    """Compiles the C++ sources, and with nvcc the CUDA sources, into one module."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        cuda = sources(".cu")
        nvcc = find_nvcc() if cuda else None
        if nvcc is not None:
            ext.extra_objects = [*ext.extra_objects, *(self.compile_cuda(nvcc, source) for source in cuda)]
            ext.define_macros.append(("WEAVE_WITH_CUDA", "1"))
            ext.extra_link_args.append(f"-L{Path(nvcc).resolve().parents[1] / 'lib64'}")
            ext.libraries.append("cudart_static")
        super().build_extension(ext)

    def compile_cuda(self, nvcc: str, source: str) -> str:
        target = Path(self.build_temp, source).with_suffix(".cu.o")
        target.parent.mkdir(parents=True, exist_ok=True)
        archs = os.environ.get("WEAVE_CUDA_ARCHS", DEFAULT_ARCHS).split(";")
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs if arch]
        subprocess.check_call(
            [nvcc, "-c", source, "-o", str(target), "-std=c++17", "-O3", "-Icsrc", "-Xcompiler", "-fPIC", *codes]
        )
        return str(target)


native = Pybind11Extension(
    "weaveopt._native",
    sources(".cpp"),
    include_dirs=["csrc"],
    depends=[*sources(".h"), *sources(".inc"), *sources(".hpp")],
    extra_compile_args=["-std=c++17", "-O3", "-fopenmp", "-fvisibility=hidden"],
    extra_link_args=["-fopenmp"],
)

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
