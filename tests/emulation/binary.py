"""Contents of the built extension, as NVIDIA's binary tools show them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from weaveopt import _native

needs_cuda_part = pytest.mark.skipif(
    not _native.has_cuda, reason="built without CUDA: WEAVE_CUDA_ARCHS=all builds it where nvcc is, as .ci/run does"
)
TOOLS = ("cuobjdump", "nvdisasm")
INSTALL = f"pip install {' '.join(f'nvidia-cuda-{tool}' for tool in TOOLS)} (requirements.txt pins them), or CUDA_HOME="


@cache
def tool(name: str) -> str:
    """Path of an NVIDIA binary tool: from its package, from PATH, or from CUDA_HOME."""
    found: list[Path] = []
    try:
        package = importlib.metadata.distribution(f"nvidia-cuda-{name}")
        found = [Path(str(file.locate())) for file in package.files or () if file.name == name]
    except importlib.metadata.PackageNotFoundError:
        pass
    on_path = shutil.which(name)
    found += [Path(on_path)] if on_path else []
    found += [Path(os.environ["CUDA_HOME"]) / "bin" / name] if "CUDA_HOME" in os.environ else []
    existing = [path for path in found if path.exists()]
    assert existing, f"{name} not found, which reads the instructions in the binary: {INSTALL}"
    return str(existing[0])


def dump(*arguments: str) -> str:
    # cuobjdump calls nvdisasm, which comes in a package of its own.
    path = os.pathsep.join((str(Path(tool("nvdisasm")).parent), os.environ.get("PATH", "")))
    command = [tool("cuobjdump"), *arguments, str(_native.__file__)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@cache
def architectures() -> tuple[str, ...]:
    """Those that the extension has machine code for: `sm_90`, ..."""
    return tuple(sorted(set(re.findall(r"\.(sm_\d+[a-z]?)\.cubin", dump("--list-elf")))))


def named_architectures() -> list[str]:
    """Those that the build was asked for: `90`, ..."""
    return _native.CUDA_ARCHS.partition("+")[0].split(";")


def for_all_chips() -> tuple[str, ...]:
    """Architectures that every kernel but those for Hopper alone was compiled for."""
    return tuple(each for each in architectures() if each.removeprefix("sm_") in named_architectures())


def number(architecture: str) -> int:
    """`sm_100a` → 100, as cudaFuncGetAttributes says it."""
    return int("".join(filter(str.isdigit, architecture)))


@cache
def kernels(architecture: str) -> tuple[str, ...]:
    """The mangled names of all kernels."""
    return tuple(name for found, name, _ in _functions("--dump-resource-usage") if found == architecture)


def instructions(architecture: str, names: list[str]) -> dict[str, str]:
    """Mangled name -> text of the kernels named."""
    every = _functions("--dump-sass", "-fun", ",".join(sorted(names)))
    texts = {name: text for found, name, text in every if found == architecture}
    assert set(texts) == set(names)
    return texts


@cache
def _functions(*arguments: str) -> tuple[tuple[str, str, str], ...]:
    """Architecture, mangled name and text. `-arch sm_90` shows sm_90a too: all are asked for and
    distinguished, once."""
    found = []
    _, *parts = re.split(r"^arch = (\w+)$", dump(*arguments), flags=re.MULTILINE)
    for architecture, listed in zip(parts[::2], parts[1::2], strict=True):
        _, *functions = re.split(r"Function *: *(\w+)|Function (\w+):", listed)
        for one, other, text in zip(functions[::3], functions[1::3], functions[2::3], strict=True):
            found.append((architecture, one or other, text))
    return tuple(found)
